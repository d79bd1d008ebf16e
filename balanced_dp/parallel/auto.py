"""The split of each batch with "auto", which watches a training loop."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..devices import capacities_of, is_emulated, num_ooms, which_ran_out
from ..errors import ArgumentError, ArgumentTypeError
from ..memory.peaks import Peaks
from ..search import LoopSearch
from .split_policy import SplitPolicy

STATE_KEY = "auto_split"
"""The key of the result of "auto" in a checkpoint."""


def smallest_chunk(module: nn.Module) -> int:
    """Return the fewest samples that a replica can train on: batch norm refuses a single one."""
    return 1 + any(isinstance(child, _BatchNorm) for child in module.modules())


class AutoSplit(SplitPolicy):
    """The rule by which ``gpu0_bsz="auto"`` splits: it searches while a training loop runs.

    An iteration begins with a forward pass with gradients on, and ends with the step of a
    ``torch.optim.Optimizer``; with gradient accumulation it has several calls. The first one does
    not count, since it creates the optimizer's state.

    Attributes:
        batch_size: the largest batch so far, or that of a checkpoint; None before both.
        num_iterations: the number of iterations that have ended.

    Raises:
        ArgumentError: the devices do not count their memory, or one of them repeats.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        counts = all(
            hasattr(torch.get_device_module(device), "max_memory_allocated") for device in devices
        )
        if len(devices) > 1 and (not counts or len(set(devices)) < len(devices)):
            raise ArgumentError(
                "gpu0_bsz='auto' needs distinct devices of a type that counts its memory, "
                f"got {', '.join(map(str, devices))}; give a number, or try it inside "
                "emulate_devices"
            )
        super().__init__(None, devices, spread=True)
        self.batch_size: int | None = None
        self.num_iterations = 0
        self._num_ooms: list[int] = []
        self._parameter_ids: frozenset[int] = frozenset()
        self._peaks: Peaks | None = None  # of the iteration that is under way
        self._calls: dict[int, bool] = {}  # its batches, and whether their gradients were added up

    @functools.cached_property
    def search(self) -> LoopSearch:
        """The search for the value."""
        is_careful = not is_emulated(self.devices[0])
        return LoopSearch(capacities_of(self.devices), is_careful=is_careful)

    @property
    def gpu0_bsz(self) -> int | None:
        """The value for the largest batch so far."""
        return None if self.batch_size is None else self.split(self.batch_size)[0]

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk sizes for a batch of the next call."""
        if len(self.devices) < 2:
            return super().split(batch_size)
        self._note_failure()
        return self.search.split(batch_size)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Record the call, and return its chunk sizes."""
        chunk_sizes = self.split(batch_size)
        if batch_size and torch.is_grad_enabled() and len(self.devices) > 1:
            self.begin()
            if not self._calls:
                self._parameter_ids = frozenset(
                    id(p) for p in module.parameters() if p.requires_grad
                )
                self.search.smallest = smallest_chunk(module)
            adds = any(parameter.grad is not None for parameter in module.parameters())
            self._calls[batch_size] = self._calls.get(batch_size, False) or adds
            self.batch_size = max(batch_size, self.batch_size or 0)
        return chunk_sizes

    def begin(self) -> None:
        """Begin an iteration unless one is under way; its peaks are read only if it counts."""
        if self._peaks is None:
            _watching[id(self)] = self
            _register_hook()
            if not self.search.is_over or not self._num_ooms:
                self._num_ooms = num_ooms(self.devices)
            self._calls = {}
            self._peaks = Peaks(self.devices if self._counts() else ())

    def _counts(self) -> bool:
        return self.num_iterations > 0 and not self.search.is_over

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the iteration that ends with the step of an optimizer, if it is the model's."""
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        is_ours = any(id(parameter) in self._parameter_ids for parameter in parameters)
        if self._peaks is not None and is_ours:
            if self._counts():
                size, accumulates = max(self._calls.items())
                self.search.tell(self.search.split(size), self.peak_bytes, accumulates)
            self._peaks = None
            self.num_iterations += 1

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak of each device in this iteration."""
        assert self._peaks is not None
        return tuple(self._peaks.of(device)[0] for device in self.devices)

    def _note_failure(self, has_failed: bool = False) -> bool:
        """End an iteration in which memory ran out; return whether the next split differs.

        Memory that runs out in evaluation changes nothing.

        Args:
            has_failed: whether memory is known to have run out.
        """
        if self._peaks is None and not has_failed:
            return False
        before, self._num_ooms = self._num_ooms, num_ooms(self.devices)
        is_training = torch.is_grad_enabled() and (has_failed or self._num_ooms != before)
        if self._peaks is None or not self._calls or not is_training:
            return False
        self._peaks = None
        return self.search.ran_out(max(self._calls), which_ran_out(self.devices, before))

    def _remedy(self, batch_size: int) -> str:
        if self._note_failure(has_failed=True):
            value = self.split(batch_size)[0]
            return f". gpu0_bsz='auto' is now {value}: the step may be repeated"
        return ", and gpu0_bsz='auto' has no better split; lower the batch size"

    def state_dict(self) -> dict[str, Any] | None:
        """Return a state for a later run to start with, as numbers and lists, or None."""
        return None if self.batch_size is None else self.search.state_dict(self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Start with the state of an earlier run, unless training has begun."""
        if not self._parameter_ids and len(self.devices) > 1:
            self.search.load_state_dict(state)
            self.search.smallest = smallest_chunk(module)
            self.batch_size = state["batch_size"]


def split_policy(
    gpu0_bsz: int | Literal["auto"] | None,
    devices: Sequence[torch.device],
    device_weights: Sequence[float] | None = None,
    spread: bool = False,
) -> SplitPolicy:
    """Return the rule for a number, None or ``"auto"``, as for ``SplitPolicy``."""
    if not isinstance(gpu0_bsz, str):
        return SplitPolicy(gpu0_bsz, devices, device_weights, spread)
    if device_weights is not None:
        raise ArgumentError(
            f"device_weights need a gpu0_bsz that is a number or None, got {gpu0_bsz!r}"
        )
    if gpu0_bsz != "auto":
        raise ArgumentTypeError(f"gpu0_bsz must be an integer, 'auto' or None, got {gpu0_bsz!r}")
    return AutoSplit(devices)


_watching: weakref.WeakValueDictionary[int, AutoSplit] = weakref.WeakValueDictionary()


@functools.cache
def _register_hook() -> None:
    def note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for reference in _watching.valuerefs():
            if (split := reference()) is not None:
                split.note_step(optimizer)

    register_optimizer_step_post_hook(note_step)
