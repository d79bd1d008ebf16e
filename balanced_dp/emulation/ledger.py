"""Bookkeeping of the memory of each emulated device, to the byte. This file does not use torch.

A ``DeviceLedger`` records the memory of one device. It has one ``Block`` for each storage on the
device. Each storage holds the only reference to an ``Allocation``, so both are deallocated
together. When the ``Allocation`` is deallocated, it frees the block. Python's reference counting
deallocates storages, so memory is freed without the garbage collector.

Each block has a label, which says what the memory is used for. The label may change while the block
is allocated: for example, a tensor becomes a gradient only after it was computed. So the bytes for
each label at the peak are not stored when the peak is reached. They are computed on request, as the
sum of two parts:

- The blocks that existed at the peak and still exist. In each of them, ``number`` is at most
  ``_peak_number``, the number of the last block that was allocated up to the peak.
- The blocks that existed at the peak and have been freed since. The ledger does not keep these
  blocks, but ``_freed_since_peak`` keeps their bytes for each label.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

ROUND_BYTES = 512
"""The size of each block of memory is rounded up to a multiple of this number, as on CUDA.

Source: ``kMinBlockSize`` in c10/cuda/CUDACachingAllocator.h, torch 2.11 to 2.13.
"""


class Label(str, Enum):
    """What a block of memory is used for."""

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
    """The record that a ``DeviceLedger`` keeps of one storage on its device.

    Attributes:
        number: the number of blocks that were allocated on the device before this block.
        num_bytes: the size of the block in bytes, rounded up to a multiple of ``ROUND_BYTES``.
        label: what the memory is used for.
    """

    number: int
    num_bytes: int
    label: Label


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The bytes allocated on one device, for each use of memory, such as "activation".

    Each attribute is a dictionary such as ``{"parameter": 4096, ...}``, with all uses as keys.

    Attributes:
        now: the bytes allocated now, for each use. Their sum is what ``memory_allocated`` returns.
        peak: the bytes that were allocated for each use when the peak of memory was reached. Their
            sum is what ``torch.get_device_module("lazy").max_memory_allocated`` returns. Calling
            ``torch.cuda.reset_peak_memory_stats`` does not reset this peak, because ``torch.cuda``
            reports a peak of its own.
    """

    now: dict[str, int]
    peak: dict[str, int]


class DeviceLedger:
    """The memory that is allocated on one device, and statistics of it. Thread-safe.

    Args:
        capacity_bytes: the capacity of the device in bytes.
        out_of_memory: function that is called if a block does not fit. Its arguments are the size
            of the block and the number of free bytes. It returns the exception to raise.
    """

    def __init__(self, capacity_bytes: int, out_of_memory: Callable[[int, int], Exception]) -> None:
        self.capacity_bytes = capacity_bytes
        self.limit_bytes = capacity_bytes
        """The largest sum of block sizes that may be allocated.

        It is the capacity, until ``Machine.ignore_capacities`` lifts the limit.
        """
        self._out_of_memory = out_of_memory
        self.num_ooms = 0
        self._lock = threading.Lock()
        self._live: dict[int, Block] = {}
        self._freed_since_peak: Counter[Label] = Counter()
        # Allocation.__del__ only appends to this queue. __del__ may run anywhere, even while its
        # thread holds the lock, so __del__ must not take the lock.
        self._to_free: deque[Block] = deque()
        self._next_number = 0
        self._peak_number = -1
        self._allocated_bytes = 0
        self.peak_bytes = 0
        """The maximum of ``allocated_bytes`` since the last ``reset_peak``."""
        self.script_peak_bytes = 0
        """The maximum of ``allocated_bytes`` since the last ``reset_script_peak``.

        This is the peak that ``torch.cuda`` reports to scripts and that scripts reset. It is
        separate from ``peak_bytes``, so that a reset by a script does not disturb the measurements
        of this library.
        """
        self.total_bytes = 0
        """The sum of the sizes of all blocks ever allocated, including blocks that were freed."""

    def allocate(self, num_bytes: int, label: Label, marks_peak: bool = True) -> Allocation:
        """Allocate a block of ``num_bytes``, rounded up as on CUDA; return its ``Allocation``.

        Args:
            num_bytes: the size of the block before rounding.
            label: what the memory is used for.
            marks_peak: if true, the block counts toward the peak immediately, and an exception is
                raised if the block does not fit. If false, the block may exceed the limit, and it
                counts toward the peak only if it still exists when a method of this ledger is
                called next.

        Raises:
            Exception: the result of ``out_of_memory``, if ``marks_peak`` is true and the block does
                not fit.
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
        """Reset ``peak_bytes`` to the bytes allocated now."""
        with self._lock:
            self._free_blocks()
            self._mark_peak()

    def reset_script_peak(self) -> None:
        """Set the peak that scripts read through ``torch.cuda`` to the bytes allocated now."""
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
        """Return the bytes allocated now, at the peak and in total, and the bytes freed.

        The keys are "current", "peak", "allocated" and "freed". They are the endings of keys of
        ``torch.cuda.memory_stats``, such as "allocated_bytes.all.current".

        Args:
            peak_bytes: the value for "peak". The caller chooses one of the two peaks, the attribute
                ``peak_bytes`` or ``script_peak_bytes``.
        """
        now, total = self.allocated_bytes, self.total_bytes
        return {"current": now, "peak": peak_bytes, "allocated": total, "freed": total - now}

    def breakdown(self) -> MemoryBreakdown:
        """Return the bytes allocated for each use of memory, now and at the peak."""
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
    """A storage's reference to its block; the block is freed when this object is deallocated."""

    ledger: DeviceLedger
    block: Block

    def __del__(self) -> None:
        self.ledger._to_free.append(self.block)


def round_up(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of 512, as in CUDA's caching allocator."""
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
