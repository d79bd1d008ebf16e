"""How many samples of a batch each device gets: by a number, by weights or by "auto"."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..devices import is_emulated, is_out_of_memory, num_ooms, which_ran_out
from ..errors import ArgumentError, ArgumentTypeError, add_note, warn
from ..memory.peaks import Peaks
from ..search import LoopSearch
from ..split import even_share, split_batch, split_by_weights

STATE_KEY = "auto_split"
"""Where a checkpoint says what "auto" has found."""


def smallest_chunk(module: nn.Module) -> int:
    """Return the fewest samples a replica can train on: batch norm refuses a single one."""
    return 1 + any(isinstance(child, _BatchNorm) for child in module.modules())


class SplitPolicy:
    """The rule by which batches are split: by a number or by weights.

    Args:
        gpu0_bsz: the most samples for the first device, or None for no limit.
        devices: the devices that share a batch.
        device_weights: if given, batches are split in proportion to them.
        spread: whether parameters are spread over the devices. Then the first one holds little more
            than the others, so no value gives a warning.

    Raises:
        ArgumentError, ArgumentTypeError: the arguments cannot be used, or not together.
    """

    def __init__(
        self,
        gpu0_bsz: int | None,
        devices: Sequence[torch.device],
        device_weights: Sequence[float] | None = None,
        spread: bool = False,
    ) -> None:
        self.devices = devices
        self._number = gpu0_bsz
        self.device_weights = None if device_weights is None else tuple(device_weights)
        self._may_warn = not spread and device_weights is None
        if device_weights is not None and len(device_weights) != max(1, len(devices)):
            raise ArgumentError(
                f"device_weights must be one number for each of {max(1, len(devices))} devices, "
                f"got {len(device_weights)}"
            )
        SplitPolicy.split(self, 0)  # raises where a number is out of its range

    @property
    def gpu0_bsz(self) -> int | None:
        """The most samples that the first device gets now; None if "auto" has seen no batch."""
        return self._number

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk size of each device for a batch of the next call."""
        if self.device_weights is not None:
            return split_by_weights(batch_size, self.device_weights, self._number)
        limit = batch_size if self._number is None else self._number
        return split_batch(batch_size, max(1, len(self.devices)), limit)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Return the chunk size of each device for this call.

        Warns:
            BalanceWarning: the number has no effect on the first batch, or "auto" sees no
                optimizer step.
        """
        chunk_sizes = self.split(batch_size)
        if batch_size and self._may_warn:
            self._may_warn = False
            even = even_share(batch_size, len(self.devices))
            if self._number is not None and self._number >= even:
                warn(
                    f"gpu0_bsz={self._number} balances nothing: the even share of this first batch "
                    f"of {batch_size} on {len(self.devices)} devices is {even}, so the split is "
                    f"that of nn.DataParallel, {chunk_sizes}; choose gpu0_bsz below {even}"
                )
        return chunk_sizes

    @contextlib.contextmanager
    def advising(self, chunk_sizes: Sequence[int]) -> Iterator[None]:
        """Add the remedy to an error that says that a device ran out of memory."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                sizes = zip(self.devices, chunk_sizes, strict=True)
                split = ", ".join(f"{device}: {size}" for device, size in sizes)
                size = sum(chunk_sizes)
                add_note(error, f"the batch of {size} was split {split}{self._remedy(size)}")
            raise

    def _remedy(self, batch_size: int) -> str:
        """Return what to do where memory ran out."""
        return (
            "; give the device that ran out fewer samples (gpu0_bsz, or device_weights), or lower "
            "the batch size"
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a later run can start with, as numbers and lists, or None."""
        return None

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Start with what an earlier run has found, unless training has begun."""


class Iteration:
    """An iteration of a training loop, from its first forward pass with gradients on.

    Args:
        devices: the devices whose peaks are measured; none to measure nothing.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._peaks = Peaks(devices)
        self._adds: dict[int, bool] = {}

    def add(self, module: nn.Module, batch_size: int) -> None:
        """Record the call of a model."""
        adds = any(parameter.grad is not None for parameter in module.parameters())
        self._adds[batch_size] = self._adds.get(batch_size, False) or adds

    @property
    def largest(self) -> tuple[int, bool]:
        """The size of the largest batch, and whether its gradients were added to others."""
        return max(self._adds.items(), default=(0, False))

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak of each device until now."""
        return tuple(self._peaks.of(device)[0] for device in self.devices)


class AutoSplit(SplitPolicy):
    """The rule by which ``gpu0_bsz="auto"`` splits: it searches while a training loop runs.

    An iteration ends with the step of a ``torch.optim.Optimizer``; with gradient accumulation it
    has several calls. The first one does not count, since it creates the optimizer's state.

    Attributes:
        batch_size: the largest batch so far, or that of a checkpoint; None before both.

    Raises:
        ArgumentError: the devices do not count their memory, or one of them repeats.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        counts = all(
            hasattr(torch.get_device_module(device), "max_memory_allocated") for device in devices
        )
        if len(devices) > 1 and (not counts or len(set(devices)) < len(devices)):
            raise ArgumentError(
                "gpu0_bsz='auto' compares how full different devices were, of a type that counts "
                f"its memory, got {', '.join(map(str, devices))}; give a number, or try it inside "
                "emulate_devices"
            )
        super().__init__(None, devices, spread=True)
        self.batch_size: int | None = None
        self._num_ooms: list[int] = []
        self._parameter_ids: frozenset[int] = frozenset()
        self._iteration: Iteration | None = None

    @functools.cached_property
    def search(self) -> LoopSearch:
        """The search for the value."""
        modules = [(torch.get_device_module(device), device) for device in self.devices]
        capacities = [m.get_device_properties(d).total_memory for m, d in modules]
        return LoopSearch(capacities, is_careful=not is_emulated(self.devices[0]))

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
            self._iteration = self._iteration or self._begin_iteration(module)
            self._iteration.add(module, batch_size)
            self.batch_size = max(batch_size, self.batch_size or 0)
        return chunk_sizes

    def _begin_iteration(self, module: nn.Module) -> Iteration:
        is_first = not self._parameter_ids
        self._parameter_ids = frozenset(id(p) for p in module.parameters() if p.requires_grad)
        self.search.smallest = smallest_chunk(module)
        if not self.search.is_over or not self._num_ooms:
            self._num_ooms = num_ooms(self.devices)
        _watching[id(self)] = self
        _register_hook()
        return Iteration([] if is_first or self.search.is_over else self.devices)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the iteration that ends with the step of an optimizer, if it is the model's."""
        iteration = self._iteration
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        is_ours = any(id(parameter) in self._parameter_ids for parameter in parameters)
        if iteration is not None and is_ours:
            self._iteration = None
            if iteration.devices:
                size, accumulates = iteration.largest
                self.search.tell(self.search.split(size), iteration.peak_bytes, accumulates)

    def _note_failure(self, has_failed: bool = False) -> bool:
        """End an iteration in which memory ran out; return whether the next split differs.

        Memory that runs out in evaluation changes nothing.

        Args:
            has_failed: whether memory is known to have run out.
        """
        iteration = self._iteration
        if iteration is None and not has_failed:
            return False
        before, self._num_ooms = self._num_ooms, num_ooms(self.devices)
        is_training = torch.is_grad_enabled() and (has_failed or self._num_ooms != before)
        if iteration is None or not is_training:
            return False
        self._iteration = None
        return self.search.ran_out(iteration.largest[0], which_ran_out(self.devices, before))

    def _remedy(self, batch_size: int) -> str:
        if self._note_failure(has_failed=True):
            value = self.split(batch_size)[0]
            return f". gpu0_bsz='auto' is now {value}: the step may be repeated"
        return ", and gpu0_bsz='auto' knows no better; lower the batch size"

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a later run can start with, as numbers and lists, or None."""
        return None if self.batch_size is None else self.search.state_dict(self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Start with what an earlier run has found, unless training has begun."""
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
