"""Choose how the batches of a training loop are split while it runs, and report what was found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from ..devices import is_emulated
from ..parallel.auto import SplitPolicy, has_gradients, smallest_chunk
from ..planning.auto_balance import AutoBalance
from ..planning.memory_model import fit
from ..split import even_share, split_batch
from .measurement import Measurement, fittable
from .report_types import Provenance, Report
from .reports import report_of_measurements


class SplitSearch(SplitPolicy):
    """The rule by which a training loop is split, which learns from its iterations.

    It is the policy of all models of the loop.

    Args:
        gpu0_bsz: ``"auto"`` to search for the best value; None for the even split; or a value. On
            emulated devices, any split may be tried: there the even split and half of it come
            before a given value, since a plan takes three splits.
        devices: the devices of the loop.
        capacities: capacity of each device in bytes, or None if they do not matter: then the even
            split of the loop's batch fills the devices.
        reserve: bytes of each capacity to keep free.

    Attributes:
        wanted: ``gpu0_bsz`` as it was given.
        measurements: what was measured, by batch size and chunk size of the first device.
        chunk_sizes: how the largest batch of this iteration is split; empty before it.
        num_parameters: number of trained parameters.
    """

    def __init__(
        self,
        gpu0_bsz: int | Literal["auto"] | None,
        devices: Sequence[torch.device],
        capacities: Sequence[int] | None = None,
        reserve: int = 0,
    ) -> None:
        self.devices = devices
        self.capacities = capacities
        self.reserve = reserve
        self.chunk_sizes: tuple[int, ...] = ()
        self.num_parameters = 0
        self.wanted = gpu0_bsz
        self._is_free = is_emulated(devices[0])
        self._largest = 0
        self._accumulating: set[int] = set()
        self._added_sizes: set[int] = set()
        self._precision: str | None = None
        self._num_iterations = 0
        self._forget()
        super().__init__(None, devices, spread=True)  # splits an empty batch

    def __deepcopy__(self, memo: object) -> SplitSearch:
        """Return this object: copies of a model are part of the same loop."""
        return self

    def _forget(self) -> None:
        budgets = self.budgets or [1] * len(self.devices)
        self._balance = AutoBalance(budgets, is_free=self._is_free)
        self.measurements: dict[tuple[int, int], Measurement] = {}
        self._empty_bytes: dict[tuple[int, int], tuple[int, ...]] = {}

    @property
    def budgets(self) -> list[int] | None:
        """The bytes of each device that may be used, None if they do not matter."""
        if self.capacities is None:
            return None
        return [capacity - self.reserve for capacity in self.capacities]

    def use(self, devices: Sequence[torch.device]) -> None:
        """Use some of the devices only, or in another order."""
        if self.capacities is not None:
            of_device = dict(zip(self.devices, self.capacities, strict=True))
            self.capacities = [of_device[device] for device in devices]
        self.devices = devices
        self._forget()

    # How the next batch is split.

    @property
    def is_over(self) -> bool:
        """Whether the value stays as it is."""
        return self.wanted != "auto" or self._balance.is_frozen

    @property
    def gpu0_bsz(self) -> int | None:
        """The chunk size of the first device for the largest batch so far, None before it."""
        return self.split(self._largest)[0] if self._largest else None

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk size of each device for a batch of the next call."""
        return split_batch(batch_size, len(self.devices), self._value(batch_size))

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Record the call of a model, and return its chunk sizes."""
        self._largest = max(self._largest, batch_size)
        if torch.is_grad_enabled():
            if has_gradients(module):
                self._added_sizes.add(batch_size)
            if batch_size >= sum(self.chunk_sizes):  # the largest one makes the peak
                self._balance.smallest = smallest_chunk(module)
                self.chunk_sizes = self.split(batch_size)
                if torch.is_autocast_enabled(self.devices[0].type):
                    self._precision = str(torch.get_autocast_dtype(self.devices[0].type))
        return self.split(batch_size)

    def _value(self, batch_size: int) -> int:
        """Return the chunk size of the first device for a batch."""
        even = even_share(batch_size, len(self.devices))
        # Half the even chunk tells the samples of a chunk from those of the batch.
        half = even // 2 if even // 2 >= self._balance.smallest else 0
        if self.wanted == "auto":
            value = self._balance.gpu0_bsz(batch_size)
            tried = {first for size, first in self.measurements if size == batch_size}
            is_only_one = value == even and tried == {even} and self._num_iterations > 1
            return half if is_only_one and self._is_free else value
        if self.wanted is None or (self._is_free and self._num_iterations < 2):
            return even
        return half if self._is_free and self._num_iterations == 2 else min(even, self.wanted)

    # What the iterations took.

    def observe(
        self, measured: Measurement, empty_bytes: tuple[int, ...], replica_bytes: int
    ) -> None:
        """Record an iteration; the first one, without optimizer state, is not learned from.

        If gradients accumulate, the second batch adds to them, unless the data ends before: then
        the peak has no gradients that those of other iterations have, and is left out.

        Args:
            measured: what was measured.
            empty_bytes: what device 0 would hold with an empty batch, in each phase.
            replica_bytes: the least that another device holds of the model.
        """
        size, value = key = measured.batch_size, measured.chunk_sizes[0]
        accumulates = size in self._added_sizes
        self._added_sizes, self.chunk_sizes = set(), ()
        if self._num_iterations == 1:
            self.measurements.clear()
        if accumulates and size not in self._accumulating:
            self._accumulating.add(size)
            if any(known == size for known, _ in self.measurements):
                self._num_iterations = 0
                self._forget()
        elif size in self._accumulating and not accumulates:
            return
        self._num_iterations += 1
        known = self.measurements.pop(key, measured)  # the latest one is the last one
        self.measurements[key] = max(measured, known, key=lambda m: max(m.peak_bytes))
        if self.measurements[key] is measured:
            self._empty_bytes[key] = empty_bytes
        if self._num_iterations < 2 or not size or value != self._balance.gpu0_bsz(size):
            return  # also where the value was not of its choice
        first_peaks = [peaks[0] for peaks in measured.phase_peak_bytes]
        empty = empty_bytes[first_peaks.index(max(first_peaks))]
        if not self._balance.settle():
            self._balance.observe(size, measured.peak_bytes, empty, replica_bytes)

    @property
    def last(self) -> Measurement | None:
        """The last measurement of the largest batch."""
        latest_first = reversed(self.measurements.values())
        return max(latest_first, key=lambda measured: measured.batch_size, default=None)

    @property
    def asked(self) -> Measurement | None:
        """The measurement of the largest batch with the given value, or else the last one."""
        last = self.last
        if last is None or not isinstance(self.wanted, int):
            return last
        value = min(self.wanted, even_share(last.batch_size, len(self.devices)))
        return self.measurements.get((last.batch_size, value), last)

    def report(self) -> Report | None:
        """Return the report on the batch size with the most splits; None if it has one only."""
        counts = Counter(size for size, _ in self.measurements)
        batch_size = max(counts, key=lambda size: (counts[size], size), default=0)
        even = even_share(batch_size, len(self.devices))
        if counts[batch_size] < 2 or (batch_size, even) not in self.measurements:
            return None
        measured = {key: m for key, m in self.measurements.items() if key[0] == batch_size}
        capacities = self.capacities
        if capacities is None:
            peak = max(measured[batch_size, even].peak_bytes)
            capacities = [math.ceil(peak / 2**20) * 2**20] * len(self.devices)
        names = (torch.get_device_module(d).get_device_name(d) for d in self.devices)
        return report_of_measurements(
            list(measured.values()),
            Provenance.of_this_process(names),
            capacities,
            self.reserve,
            batch_size=batch_size,
            model=fit(fittable(measured.values()), [self._empty_bytes[key] for key in measured]),
            num_parameters=self.num_parameters,
            precision=self._precision,
        )
