"""``gpu0_bsz="auto"``: finds the value while training runs, from how full each device was."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .errors import ArgumentError
from .memory.peaks import Peaks
from .memory_model import Law, MemoryModel, fit
from .plan import EQUAL, Planner, utilizations
from .split import even_share, split_batch

MAX_CHANGES = 5
"""How often a value is changed to find the best one; running out of memory comes on top."""

_MAX_FITTED = 16
"""How many observations the laws are fitted to, the latest."""

_MAX_SMALLER = 100
"""How many iterations with smaller batches are waited for the largest to come again."""

_PATIENCE = 100
"""Calls without an optimizer step after which a warning says that there is nothing to go by."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What each device held at most in an iteration."""

    chunk_sizes: tuple[int, ...]
    peak_bytes: tuple[int, ...]

    @property
    def phase_peak_bytes(self) -> tuple[tuple[int, ...], ...]:
        """The peaks: from outside, an iteration has one phase."""
        return (self.peak_bytes,)


class AutoBalance:
    """Which ``gpu0_bsz`` to try next, from what was observed. Pure arithmetic.

    It starts with the even split, goes where the laws of what was observed lead, and stays with the
    best value once they lead to none that is new. The first move assumes the most that a sample can
    take, so that it cannot fill another device more than the even split fills device 0.

    Args:
        capacities: bytes that each device can hold.
        smallest: the fewest samples to give device 0, if it gets any.
    """

    def __init__(self, capacities: Sequence[int], smallest: int = 1) -> None:
        self.capacities = capacities
        self.smallest = smallest
        self.num_changes = 0
        self.is_frozen = False
        self._observed: dict[tuple[int, int], Observation] = {}
        self._model: MemoryModel | None = None
        self._values: dict[int, int] = {}
        # Batch size -> value with which device 0, or another device, ran out of memory.
        self._too_large: dict[int, int] = {}
        self._too_small: dict[int, int] = {}
        self._num_smaller = 0

    def gpu0_bsz(self, batch_size: int) -> int:
        """Returns the value for a batch, by the laws if its size is new."""
        if batch_size not in self._values:
            self._values[batch_size] = self._limited(batch_size, self._predicted(batch_size))
        return self._values[batch_size]

    def observe(self, observation: Observation, empty_bytes: int, replica_bytes: int) -> None:
        """Takes note of an iteration, and moves or freezes if its batch was the largest so far.

        Args:
            observation: of one batch, with the value that was given for it.
            empty_bytes: what device 0 would hold with an empty batch.
            replica_bytes: what another device holds of the model, at least.
        """
        batch_size, value = sum(observation.chunk_sizes), observation.chunk_sizes[0]
        known = self._observed.get((batch_size, value), observation)
        peaks = tuple(map(max, zip(known.peak_bytes, observation.peak_bytes, strict=True)))
        self._observed[batch_size, value] = replace(observation, peak_bytes=peaks)
        if batch_size < max(size for size, _ in self._observed):
            # The largest batch decides: it is the one that fills the devices.
            self._num_smaller += 1
            self.is_frozen = self._num_smaller >= _MAX_SMALLER
            return
        if len(self._observed) == 1:
            self._model = _cautious_model(observation, replica_bytes)
        else:
            self._model = fit(list(self._observed.values())[-_MAX_FITTED:], empty_bytes)
        best = self._best_observed(batch_size)
        candidate = self._limited(batch_size, self._predicted(batch_size))
        if self._is_worth_trying(batch_size, candidate, best):
            pass
        elif self._is_idling_worth_trying(batch_size, best):
            candidate = 0  # no gradients are computed there, so no law tells what it holds
        else:
            self.is_frozen = True
            candidate = self._limited(batch_size, best)
        self.num_changes += candidate != value
        self._values = {batch_size: candidate}

    def out_of_memory(self, batch_size: int, index: int) -> None:
        """Moves away from the value of a batch with which device ``index`` ran out of memory."""
        value = self.gpu0_bsz(batch_size)
        ran = [chunk for size, chunk in self._observed if size == batch_size]
        if index == 0:
            self._too_large[batch_size] = value
            # What ran before will run again; where nothing did, half of it.
            value = max((chunk for chunk in ran if chunk < value), default=value // 2)
        else:
            self._too_small[batch_size] = value
            even = even_share(batch_size, len(self.capacities))
            above = (chunk for chunk in ran if chunk > value)
            value = min(above, default=value + math.ceil((even - value) / 2))
        self._values = {batch_size: self._limited(batch_size, value)}

    def _may_try(self, batch_size: int, value: int) -> bool:
        is_new = (batch_size, value) not in self._observed
        return is_new and self.num_changes < MAX_CHANGES - 1  # one is left to go back

    def _is_worth_trying(self, batch_size: int, candidate: int, best: int) -> bool:
        assert self._model is not None
        if not self._may_try(batch_size, candidate):
            return False
        if not self._model.is_lawful:
            return True
        expected = Planner(self._model, self.capacities).utilization(batch_size, candidate)
        if len(self._observed) == 1:  # the most that there can be
            return expected <= 1
        return expected < self._utilization(batch_size, best) * (1 - EQUAL)

    def _is_idling_worth_trying(self, batch_size: int, best: int) -> bool:
        """Whether device 0 without samples, which no law tells, could be the best."""
        assert self._model is not None
        if self._limited(batch_size, 0) or not self._may_try(batch_size, 0):
            return False
        if not self._first_is_fullest(batch_size, best):
            return False
        _, others = Planner(self._model, self.capacities).utilizations(batch_size, 0)
        return others < self._utilization(batch_size, best) * (1 - EQUAL)

    def _best_observed(self, batch_size: int) -> int:
        """Returns the largest of the values that were observed to be the best."""
        values = [value for size, value in self._observed if size == batch_size]
        if self._model is not None and not self._model.is_lawful:
            # Batches that differ in more than their size: compare devices in the same iteration.
            return min(
                (v for v in values if self._first_is_fullest(batch_size, v)),
                default=max(values),
            )
        limit = min(self._utilization(batch_size, value) for value in values) * (1 + EQUAL)
        return max(v for v in values if self._utilization(batch_size, v) <= limit)

    def _predicted(self, batch_size: int) -> int:
        even = even_share(batch_size, len(self.capacities))
        if self._model is None:
            return even
        if not self._model.is_lawful:
            shares = [
                value / size
                for size, value in self._observed
                if self._first_is_fullest(size, value)
            ]
            return min(even, math.ceil(batch_size * min(shares, default=1.0)))
        value = Planner(self._model, self.capacities).best_gpu0_bsz(batch_size)
        if len(self._observed) > 1:
            return value
        [(size, observed_value)] = self._observed
        if size == batch_size and self._first_is_fullest(size, observed_value):
            value = min(value, observed_value - 1)  # the next one at least, to learn
        # What device 0 needs without any sample follows other laws: first see it with one.
        return max(value, min(1, even - 1))

    def _limited(self, batch_size: int, value: int) -> int:
        """Returns the value, moved off those that ran out of memory; device 0's count more."""

        def bounds(ran_out: dict[int, int]) -> list[int]:
            return [value for size, value in ran_out.items() if size <= batch_size]

        value = max([value, *(v + 1 for v in bounds(self._too_small))])
        value = min([value, *(v - 1 for v in bounds(self._too_large))])
        if 0 < value < self.smallest:
            value = self.smallest
        return max(0, min(value, even_share(batch_size, len(self.capacities))))

    def _utilizations(self, batch_size: int, value: int) -> list[float]:
        return utilizations(self._observed[batch_size, value].peak_bytes, self.capacities)

    def _utilization(self, batch_size: int, value: int) -> float:
        return max(self._utilizations(batch_size, value))

    def _first_is_fullest(self, batch_size: int, value: int) -> bool:
        first, *others = self._utilizations(batch_size, value)
        return first >= max(others)


def _cautious_model(observation: Observation, replica_bytes: int) -> MemoryModel:
    """Returns laws for one observation, with the most bytes a sample that there can be."""
    own, first = observation.chunk_sizes[0], observation.peak_bytes[0]
    size, peak = max(zip(observation.chunk_sizes[1:], observation.peak_bytes[1:], strict=True))
    if not size:  # a batch of one sample
        size, peak = own, first
    fixed = min(replica_bytes, peak)
    per_sample = (peak - fixed) / size
    first_per_sample = min(per_sample, first / own) if own else per_sample
    return MemoryModel(
        first_laws=(Law(first - first_per_sample * own, first_per_sample),),
        idle_laws=(),
        other_laws=(Law(fixed, per_sample),),
        num_points=1,
        residual=0.0,
    )


def smallest_chunk(module: nn.Module) -> int:
    """Returns the fewest samples that a replica trains on: batch norm refuses a single one."""
    return 1 + any(isinstance(child, _BatchNorm) for child in module.modules())


_watching: weakref.WeakSet[AutoSplit] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> RemovableHandle:
    """Has every optimizer of torch tell, from now on, when it has made a step."""

    def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for watcher in list(_watching):
            watcher.note_step(optimizer)

    return register_optimizer_step_post_hook(note_step)


class AutoSplit:
    """Watches the iterations of a training loop, and splits by what it saw.

    An iteration ends with the step of a ``torch.optim.Optimizer``: with gradient accumulation it
    has several calls. The first one with a value is not counted, since optimizer state and tuned
    kernels come with it.

    Args:
        devices: those of the model, device 0 first.

    Raises:
        ArgumentError: the devices do not count their memory, or one of them repeats.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        for device in devices if len(devices) > 1 else ():
            if not hasattr(torch.get_device_module(device), "max_memory_allocated"):
                raise ArgumentError(
                    f"gpu0_bsz='auto' reads how full each device was, which {device} does not "
                    "count; give a number, or try it inside emulate_devices"
                )
        if len(set(devices)) < len(devices):
            raise ArgumentError(
                "gpu0_bsz='auto' compares devices, but device_ids repeats one: "
                f"{', '.join(map(str, devices))}; give a number"
            )
        self.devices = devices
        self.batch_size: int | None = None
        self.balance: AutoBalance | None = None
        self._num_ooms: list[int] = []
        self._is_settling = True
        # Of the iteration that is under way:
        self._batch_sizes: set[int] = set()
        self._peaks: Peaks | None = None
        self._parameter_ids: frozenset[int] = frozenset()
        self._has_stepped = False
        self._num_calls = 0

    @property
    def gpu0_bsz(self) -> int | None:
        """The value now, for batches of the size of the last one; None before the first."""
        if self.balance is None or self.batch_size is None:
            return None
        if self._batch_sizes and not self._has_stepped and torch.is_grad_enabled():
            self.look_for_out_of_memory()
        return self.balance.gpu0_bsz(self.batch_size)

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Returns the chunk sizes for a batch."""
        value = batch_size if self.balance is None else self.balance.gpu0_bsz(batch_size)
        return split_batch(batch_size, max(1, len(self.devices)), value)

    def begin_call(self, module: nn.Module, batch_size: int) -> str | None:
        """Looks back at the iteration that ends where this call begins, if one does.

        Returns what the user is to be warned of.
        """
        if self.balance is None:
            self.balance = AutoBalance(
                [
                    torch.get_device_module(device).get_device_properties(device).total_memory
                    for device in self.devices
                ],
                smallest_chunk(module),
            )
        if self._has_stepped:
            self._end_iteration(module)
        if not torch.is_grad_enabled():  # not training
            return None
        self.batch_size = batch_size
        if self._batch_sizes:  # gradients accumulate, or the step before failed
            self.look_for_out_of_memory()
        if not self._batch_sizes:
            self._begin_iteration(module)
        self._batch_sizes.add(batch_size)
        self._num_calls += 1
        if self._num_calls != _PATIENCE or self.balance.is_frozen:
            return None
        return (
            f"gpu0_bsz='auto' has seen no optimizer step in {_PATIENCE} calls of forward, so it "
            "has nothing to go by: it waits for a torch.optim.Optimizer of the model's parameters; "
            "give gpu0_bsz a number"
        )

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes note of an optimizer's step, if it is the model's optimizer."""
        groups = optimizer.param_groups
        if any(id(p) in self._parameter_ids for group in groups for p in group["params"]):
            self._has_stepped = True

    def look_for_out_of_memory(self) -> bool:
        """Ends an iteration in which memory ran out; returns whether the next split differs.

        What ran out in evaluation is nothing to learn from.
        """
        before, self._num_ooms = self._num_ooms, self._count_ooms()
        if not self._batch_sizes or not torch.is_grad_enabled():
            return False
        pairs = enumerate(zip(before, self._num_ooms, strict=True))
        ran_out = [index for index, (count, now) in pairs if now > count]
        if not ran_out:
            return False
        assert self.balance is not None
        batch_size = max(self._batch_sizes)
        value = self.balance.gpu0_bsz(batch_size)
        self.balance.out_of_memory(batch_size, ran_out[0])
        self._batch_sizes, self._peaks, self._is_settling = set(), None, True
        return self.balance.gpu0_bsz(batch_size) != value

    def _begin_iteration(self, module: nn.Module) -> None:
        assert self.balance is not None
        self._parameter_ids = frozenset(id(p) for p in module.parameters() if p.requires_grad)
        _watch_optimizers()
        _watching.add(self)
        if not self.balance.is_frozen or not self._num_ooms:
            self._num_ooms = self._count_ooms()
        if not self.balance.is_frozen:
            self._peaks = Peaks(self.devices)

    def _end_iteration(self, module: nn.Module) -> None:
        assert self.balance is not None
        sizes, peaks = self._batch_sizes, self._peaks
        self._batch_sizes, self._peaks = set(), None
        self._has_stepped, self._num_calls = False, 0
        if peaks is None:
            return
        if self._is_settling:
            self._is_settling = False
            return
        batch_size = max(sizes)  # of several that accumulate, it makes the peak
        num_changes = self.balance.num_changes
        self.balance.observe(
            Observation(
                self.split(batch_size), tuple(peaks.of(device)[0] for device in self.devices)
            ),
            self._empty_bytes(module),
            sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers())),
        )
        self._is_settling = self.balance.num_changes > num_changes

    def _empty_bytes(self, module: nn.Module) -> int:
        """Returns what device 0 holds between iterations, and gradients that will be there."""
        allocated: int = torch.get_device_module(self.devices[0]).memory_allocated(self.devices[0])
        return allocated + sum(
            p.nbytes for p in module.parameters() if p.requires_grad and p.grad is None
        )

    def _count_ooms(self) -> list[int]:
        return [
            torch.get_device_module(device).memory_stats(device).get("num_ooms", 0)
            for device in self.devices
        ]
