"""What each emulated device holds, to the byte. Pure bookkeeping, no torch.

A ``Block`` is the entry of one storage. The ``Allocation`` of the same storage is held
by every tensor that views it; when the last one dies, so does the allocation, and the block leaves
the ledger. Nothing here waits for the garbage collector.

Labels may still change while a block lives (a tensor becomes a gradient after it was computed), so
the composition of the peak is not copied when the peak is reached: it is what was alive then, that
is every block with a number up to the peak's, whether it still lives or has died since.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

ROUND_BYTES = 512
"""CUDA's caching allocator rounds each request up to this many bytes.

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
    """One storage: its place in the order of allocations, its size and its use."""

    number: int
    num_bytes: int
    label: Label


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes per label on one device; both mappings hold every label and add up exactly.

    Attributes:
        now: what is allocated now; the values add up to ``memory_allocated``.
        peak: what was allocated when the peak was reached; adds up to ``max_memory_allocated``.
    """

    now: dict[str, int]
    peak: dict[str, int]


@dataclass(eq=False)
class OverCapacityError(Exception):
    """An allocation does not fit; carries the figures in bytes."""

    requested_bytes: int
    free_bytes: int


class DeviceLedger:
    """The books of one device. Safe to use from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.closed = False
        self.num_ooms = 0
        self._lock = threading.Lock()
        self._live: dict[int, Block] = {}
        self._dead_at_peak: Counter[Label] = Counter()
        # Filled by Allocation.__del__, which may run anywhere, so it must take no lock.
        self._dropped: deque[Block] = deque()
        self._next_number = 0
        self._peak_number = -1
        self._allocated_bytes = 0
        self.peak_bytes = 0
        """The most bytes held at one time since the last ``reset_peak``."""
        self.total_bytes = 0
        """Bytes allocated so far, freed ones included."""

    def allocate(self, num_bytes: int, label: Label) -> Allocation:
        """Enters a new block of ``num_bytes``, rounded up as CUDA does.

        Raises:
            OverCapacityError: it does not fit; nothing is entered.
        """
        return Allocation(self, self._enter(num_bytes, label))

    def resize(self, allocation: Allocation, num_bytes: int) -> None:
        """Makes ``allocation`` one of ``num_bytes``, after its storage grew or shrank.

        Raises:
            OverCapacityError: it does not fit; the old block stays.
        """
        old = allocation.block
        if old.num_bytes != _round_up(num_bytes):
            allocation.block = self._enter(num_bytes, old.label)
            self._dropped.append(old)

    def _enter(self, num_bytes: int, label: Label) -> Block:
        size = _round_up(num_bytes)
        with self._lock:
            self._settle()
            free_bytes = self.capacity_bytes - self._allocated_bytes
            if size > free_bytes:
                self.num_ooms += 1
                raise OverCapacityError(size, free_bytes)
            block = Block(self._next_number, size, label)
            self._next_number += 1
            self._live[block.number] = block
            self._allocated_bytes += size
            self.total_bytes += size
            if self._allocated_bytes > self.peak_bytes:
                self._mark_peak()
        return block

    def _settle(self) -> None:
        while self._dropped:
            block = self._dropped.popleft()
            del self._live[block.number]
            self._allocated_bytes -= block.num_bytes
            if block.number <= self._peak_number:
                self._dead_at_peak[block.label] += block.num_bytes

    def _mark_peak(self) -> None:
        self.peak_bytes = self._allocated_bytes
        self._peak_number = self._next_number - 1
        self._dead_at_peak.clear()

    def reset_peak(self) -> None:
        """Makes what is allocated now the peak."""
        with self._lock:
            self._settle()
            self._mark_peak()

    @property
    def allocated_bytes(self) -> int:
        """Bytes held now."""
        with self._lock:
            self._settle()
            return self._allocated_bytes

    @property
    def num_blocks(self) -> int:
        """How many storages live now."""
        with self._lock:
            self._settle()
            return len(self._live)

    def breakdown(self) -> MemoryBreakdown:
        """Returns what is held now and what was at the peak, by label."""
        with self._lock:
            self._settle()
            now: Counter[Label] = Counter()
            peak = self._dead_at_peak.copy()
            for block in self._live.values():
                now[block.label] += block.num_bytes
                if block.number <= self._peak_number:
                    peak[block.label] += block.num_bytes
        return MemoryBreakdown(
            now={label.value: now[label] for label in Label},
            peak={label.value: peak[label] for label in Label},
        )


class Allocation:
    """Keeps a block in its ledger for as long as somebody holds this object."""

    __slots__ = ("__weakref__", "block", "ledger", "storage")

    def __init__(self, ledger: DeviceLedger, block: Block) -> None:
        self.ledger = ledger
        self.block = block
        self.storage: Any = None
        """Whatever must live as long as the block; set by who allocates."""

    def __del__(self) -> None:
        self.ledger._dropped.append(self.block)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
