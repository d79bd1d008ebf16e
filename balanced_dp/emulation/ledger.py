"""The memory of each emulated device, to the byte. Pure bookkeeping, without torch.

A ``Block`` is the ledger's entry for one storage. The storage holds the only reference to its
``Allocation``. When the storage is deallocated, so is the allocation, and the block leaves the
ledger. Reference counting is enough for this: memory is freed without the garbage collector.

The label of a block may change while the block is allocated: a tensor becomes a gradient only after
it was computed. So the breakdown of the peak is not stored when the peak is reached. Instead, it is
computed on request from the blocks that were allocated at the peak. They are the blocks numbered at
most ``_peak_number`` that are still allocated or were freed after the peak.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

ROUND_BYTES = 512
"""CUDA's caching allocator rounds each request up to a multiple of this.

Source: ``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.h, torch 2.11 to 2.13.
"""


class Label(str, Enum):
    """The use of a block of memory."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    ACTIVATION = "activation"
    GATHERED_OUTPUT = "gathered output"
    OTHER = "other"


@dataclass(slots=True, eq=False)
class Block:
    """The entry of one storage: its number in the order of allocations, its size and its use."""

    number: int
    num_bytes: int
    label: Label


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The bytes of each label on one device. Both mappings have all labels as keys.

    Attributes:
        now: bytes allocated now; their sum is ``memory_allocated``.
        peak: bytes allocated when the peak was reached; their sum is ``max_memory_allocated``.
    """

    now: dict[str, int]
    peak: dict[str, int]


class DeviceLedger:
    """The blocks of one device and their statistics. Thread-safe.

    Args:
        capacity_bytes: the capacity of the device.
        out_of_memory: called with the size of a block that does not fit and with the free bytes;
            returns the error to raise.
    """

    def __init__(self, capacity_bytes: int, out_of_memory: Callable[[int, int], Exception]) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = capacity_bytes
        """The limit of allocated bytes: the capacity, unless ``ignore_capacities`` lifts it."""
        self._out_of_memory = out_of_memory
        self.num_ooms = 0
        self._lock = threading.Lock()
        self._live: dict[int, Block] = {}
        self._freed_since_peak: Counter[Label] = Counter()
        # Allocation.__del__ appends to this queue, because it may run anywhere and so must not
        # take the lock.
        self._to_free: deque[Block] = deque()
        self._next_number = 0
        self._peak_number = -1
        self._allocated_bytes = 0
        self.peak_bytes = 0
        """The maximum of ``allocated_bytes`` since the last ``reset_peak``."""
        self.script_peak_bytes = 0
        """The maximum of ``allocated_bytes`` since the last ``reset_script_peak``.

        Scripts have this peak of their own, so that their resets do not disturb measurements.
        """
        self.total_bytes = 0
        """All bytes ever allocated, including those freed since."""

    def allocate(self, num_bytes: int, label: Label, marks_peak: bool = True) -> Allocation:
        """Allocate a block of ``num_bytes``, rounded up as on CUDA.

        Args:
            num_bytes: the size.
            label: the use.
            marks_peak: whether the block counts toward the peak at once, and must fit. Otherwise it
                counts only if it is still allocated at the next call.

        Raises:
            Exception: the block does not fit. The exception is what ``out_of_memory`` returns.
        """
        size = round_up(num_bytes)
        with self._lock:
            self._free_blocks()
            free_bytes = self.limit_bytes - self._allocated_bytes
            if size > free_bytes and marks_peak:
                self.num_ooms += 1
                raise self._out_of_memory(size, free_bytes)
            block = Block(self._next_number, size, label)
            self._next_number += 1
            self._live[block.number] = block
            self._allocated_bytes += size
            self.total_bytes += size
            if marks_peak:
                self._update_peaks()
        return Allocation(self, block)

    def _free_blocks(self) -> None:
        while self._to_free:
            block = self._to_free.popleft()
            del self._live[block.number]
            self._allocated_bytes -= block.num_bytes
            if block.number <= self._peak_number:
                self._freed_since_peak[block.label] += block.num_bytes
        self._update_peaks()

    def _update_peaks(self) -> None:
        self.script_peak_bytes = max(self.script_peak_bytes, self._allocated_bytes)
        if self._allocated_bytes > self.peak_bytes:
            self._mark_peak()

    def _mark_peak(self) -> None:
        self.peak_bytes = self._allocated_bytes
        self._peak_number = self._next_number - 1
        self._freed_since_peak.clear()

    def reset_peak(self) -> None:
        """Reset the peak to the bytes allocated now."""
        with self._lock:
            self._free_blocks()
            self._mark_peak()

    def reset_script_peak(self) -> None:
        """Reset the scripts' peak to the bytes allocated now."""
        with self._lock:
            self._free_blocks()
            self.script_peak_bytes = self._allocated_bytes

    @property
    def allocated_bytes(self) -> int:
        """The bytes allocated now."""
        with self._lock:
            self._free_blocks()
            return self._allocated_bytes

    def statistics(self, peak_bytes: int) -> dict[str, int]:
        """Return byte counts, with the given peak, named as by ``torch.cuda.memory_stats``."""
        now, total = self.allocated_bytes, self.total_bytes
        return {"current": now, "peak": peak_bytes, "allocated": total, "freed": total - now}

    def breakdown(self) -> MemoryBreakdown:
        """Return the bytes allocated now and at the peak, by label."""
        with self._lock:
            self._free_blocks()
            now: Counter[Label] = Counter()
            peak = self._freed_since_peak.copy()
            for block in self._live.values():
                now[block.label] += block.num_bytes
                if block.number <= self._peak_number:
                    peak[block.label] += block.num_bytes
        return MemoryBreakdown(
            now={label.value: now[label] for label in Label},
            peak={label.value: peak[label] for label in Label},
        )


@dataclass(slots=True, eq=False)
class Allocation:
    """A reference to a block, which is freed when this object is deallocated."""

    ledger: DeviceLedger
    block: Block

    def __del__(self) -> None:
        self.ledger._to_free.append(self.block)


def round_up(num_bytes: int) -> int:
    """Round a size up as CUDA's caching allocator does."""
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
