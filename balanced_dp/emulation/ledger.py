"""The memory of each emulated device, to the byte. Pure bookkeeping, without torch.

A ``Block`` is the ledger's entry of one storage. The storage refers to its ``Allocation``; with the
storage it is deallocated, and the block is removed from the ledger. Reference counting is enough:
nothing waits for the garbage collector.

The label of a block may change while it is allocated (a tensor becomes a gradient after it was
computed). So the breakdown of the peak is not copied when the peak is reached, but made of the
blocks that were allocated then: those with numbers up to the peak's, whether allocated still or
freed since.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

ROUND_BYTES = 512
"""CUDA's caching allocator rounds each request up to a multiple of this.

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
    """The entry of one storage: its number in the order of allocations, its size and its use."""

    number: int
    num_bytes: int
    label: Label
    storage: Callable[[], Any] = lambda: None
    """A weak reference to the storage; the caller of ``allocate`` sets it."""


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
        out_of_memory: makes the error that is raised where a block does not fit, from the bytes
            that the block takes and the bytes that are free.
    """

    def __init__(self, capacity_bytes: int, out_of_memory: Callable[[int, int], Exception]) -> None:
        self.capacity_bytes = capacity_bytes
        self._out_of_memory = out_of_memory
        self.enforces_capacity = True
        """Whether blocks must fit into the capacity."""
        self.num_ooms = 0
        self._lock = threading.Lock()
        self._live: dict[int, Block] = {}
        self._freed_since_peak: Counter[Label] = Counter()
        # Allocation.__del__ appends to it. It may run anywhere, so it must not take the lock.
        self._to_free: deque[Block] = deque()
        self._next_number = 0
        self._peak_number = -1
        self._allocated_bytes = 0
        self.peak_bytes = 0
        """The maximum of ``allocated_bytes`` since the last ``reset_peak``."""
        self.script_peak_bytes = 0
        """The same since the last ``reset_script_peak``: scripts do not disturb measurements."""
        self.total_bytes = 0
        """All bytes ever allocated, including those freed since."""

    def allocate(self, num_bytes: int, label: Label) -> Allocation:
        """Allocate a block of ``num_bytes``, rounded up as on CUDA.

        Raises:
            Exception: ``out_of_memory``'s: the block does not fit; the ledger is unchanged.
        """
        return Allocation(self, self._enter(num_bytes, label))

    def resize(self, allocation: Allocation, num_bytes: int) -> None:
        """Replace the block of ``allocation`` if its size is not ``num_bytes``, rounded up.

        Raises:
            Exception: ``out_of_memory``'s: the new block does not fit; the old one stays.
        """
        old = allocation.block
        if old.num_bytes != round_up(num_bytes):
            allocation.block = self._enter(num_bytes, old.label, old.storage)
            self._to_free.append(old)

    def _enter(
        self, num_bytes: int, label: Label, storage: Callable[[], Any] = lambda: None
    ) -> Block:
        size = round_up(num_bytes)
        with self._lock:
            self._free_blocks()
            free_bytes = self.capacity_bytes - self._allocated_bytes
            if size > free_bytes and self.enforces_capacity:
                self.num_ooms += 1
                raise self._out_of_memory(size, free_bytes)
            block = Block(self._next_number, size, label, storage)
            self._next_number += 1
            self._live[block.number] = block
            self._allocated_bytes += size
            self.total_bytes += size
            self.script_peak_bytes = max(self.script_peak_bytes, self._allocated_bytes)
            if self._allocated_bytes > self.peak_bytes:
                self._mark_peak()
        return block

    def _free_blocks(self) -> None:
        while self._to_free:
            block = self._to_free.popleft()
            del self._live[block.number]
            self._allocated_bytes -= block.num_bytes
            if block.number <= self._peak_number:
                self._freed_since_peak[block.label] += block.num_bytes

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

    @property
    def blocks(self) -> list[Block]:
        """The blocks allocated now."""
        with self._lock:
            self._free_blocks()
            return list(self._live.values())

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


class Allocation:
    """A reference to a block, which is freed when this object is deallocated."""

    __slots__ = ("block", "ledger")

    def __init__(self, ledger: DeviceLedger, block: Block) -> None:
        self.ledger = ledger
        self.block = block

    def __del__(self) -> None:
        self.ledger._to_free.append(self.block)


def round_up(num_bytes: int) -> int:
    """Round a size up as CUDA's caching allocator does."""
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
