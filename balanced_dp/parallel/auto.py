"""How many samples of a batch each device gets: by a number, by weights or by "auto"."""

from __future__ import annotations

import contextlib
import functools
import threading
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

_PATIENCE = 100
"""After so many calls without an optimizer step, a warning says that "auto" learns nothing."""

STATE_KEY = "auto_split"
"""Where a checkpoint says what "auto" has found."""


def smallest_chunk(module: nn.Module) -> int:
    """Return the fewest samples a replica can train on: batch norm refuses a single one."""
    return 1 + any(isinstance(child, _BatchNorm) for child in module.modules())


def has_gradients(module: nn.Module) -> bool:
    """Return whether a backward pass adds to gradients that are there."""
    return any(parameter.grad is not None for parameter in module.parameters())


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
        self.split(0)  # raises where a number is out of its range

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
                fact = f"the batch of {sum(chunk_sizes)} was split {split}"
                add_note(error, f"{fact}{self._remedy(chunk_sizes)}")
            raise

    def _remedy(self, chunk_sizes: Sequence[int]) -> str:
        if self.device_weights is not None:
            weights = list(self.device_weights)
            return f". Lower the weight of the device that ran out (device_weights={weights})"
        if self._number == 0:
            return "; raise gpu0_bsz (now 0) or lower the batch size"
        lower, higher = f"lower gpu0_bsz (now {self._number})", "raise gpu0_bsz or "
        if self._number is None:
            lower, higher = f"set gpu0_bsz below {chunk_sizes[0]}", ""
        return (
            f". If {self.devices[0]} ran out, {lower}; if another device did, {higher}lower the "
            "batch size"
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a later run can start with, as numbers and lists, or None."""
        return None

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Start with what an earlier run has found, unless training has begun."""


class AutoSplit(SplitPolicy):
    """The rule by which ``gpu0_bsz="auto"`` splits: it searches while a training loop runs.

    An iteration ends with the step of a ``torch.optim.Optimizer``; with gradient accumulation it
    has several calls. The first one does not count, since it creates the optimizer's state.

    Attributes:
        batch_size: the largest batch so far; None before the first one.

    Raises:
        ArgumentError: the devices do not count their memory, or one of them repeats.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        modules = {device: torch.get_device_module(device) for device in devices}
        counts = all(hasattr(module, "max_memory_allocated") for module in modules.values())
        if len(devices) > 1 and (not counts or len(modules) < len(devices)):
            raise ArgumentError(
                "gpu0_bsz='auto' compares how full different devices were, of a type that counts "
                f"its memory, got {', '.join(map(str, devices))}; give a number, or try it inside "
                "emulate_devices"
            )
        self.batch_size: int | None = None
        self._loaded: dict[str, Any] | None = None
        self._num_ooms: list[int] = []
        self._parameter_ids: frozenset[int] = frozenset()
        self._is_first = True
        self._end_calls()
        super().__init__(None, devices, spread=True)

    def _end_calls(self) -> None:
        # Of the iteration that is under way: batch sizes, and whether they add to gradients.
        self._adds: dict[int, bool] = {}
        self._peaks: Peaks | None = None
        self._peak_bytes: tuple[int, ...] | None = None
        self._num_calls = 0

    @functools.cached_property
    def search(self) -> LoopSearch:
        """The search for the value."""
        modules = [(torch.get_device_module(device), device) for device in self.devices]
        capacities = [m.get_device_properties(d).total_memory for m, d in modules]
        return LoopSearch(capacities, is_careful=not is_emulated(self.devices[0]))

    @property
    def gpu0_bsz(self) -> int | None:
        """The value for the largest batch so far; before the first one, that of a loaded state."""
        state = self._loaded or {}
        size = self.batch_size or state.get("batch_size")
        return None if size is None else self.split(size)[0]

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk sizes for a batch of the next call."""
        if self._adds and self._peak_bytes is None and torch.is_grad_enabled():
            self._look_for_out_of_memory()  # since the last call
        return self._split(batch_size)

    def _split(self, batch_size: int) -> tuple[int, ...]:
        if len(self.devices) < 2 or (self.batch_size is None and self._loaded is None):
            return split_batch(batch_size, max(1, len(self.devices)), batch_size)
        return self.search.split(batch_size)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Record the iteration before, if it is over, and return the chunk sizes for this call."""
        if self._peak_bytes is not None:
            self._end_iteration()
        if batch_size and torch.is_grad_enabled():
            if self._adds:  # gradients accumulate, or the step before failed
                self._look_for_out_of_memory()
            if not self._adds:
                self._begin_iteration(module)
            self.batch_size = max(batch_size, self.batch_size or 0)
            self._adds[batch_size] = self._adds.get(batch_size, False) or has_gradients(module)
            self._num_calls += 1
            if self._num_calls == _PATIENCE and not self.search.is_over:
                warn(
                    f"gpu0_bsz='auto' has seen no optimizer step in {_PATIENCE} calls of forward, "
                    "so it cannot tell how full the devices are; it waits for a "
                    "torch.optim.Optimizer of the model's parameters. Give gpu0_bsz a number"
                )
        return self._split(batch_size)

    def _begin_iteration(self, module: nn.Module) -> None:
        self._parameter_ids = frozenset(id(p) for p in module.parameters() if p.requires_grad)
        self.search.smallest = smallest_chunk(module)
        with _lock:
            _watching.add(self)
            _register_hook()
        if not self.search.is_over or not self._num_ooms:
            self._num_ooms = num_ooms(self.devices)
        if not self.search.is_over:
            self._peaks = Peaks(self.devices)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the peaks at the step of an optimizer, if it is the model's."""
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if any(id(parameter) in self._parameter_ids for parameter in parameters):
            # Read now, as scripts print and reset them after the step.
            peaks = [self._peaks.of(device)[0] for device in self.devices] if self._peaks else ()
            self._peak_bytes = tuple(peaks)

    def _end_iteration(self) -> None:
        peaks, (batch_size, accumulates) = self._peak_bytes or (), max(self._adds.items())
        self._end_calls()
        was_first, self._is_first = self._is_first, False
        if not was_first:
            self.search.tell(self.search.split(batch_size), peaks, accumulates)

    def _look_for_out_of_memory(self, has_failed: bool = False) -> bool:
        """End an iteration in which memory ran out; return whether the next split differs.

        Memory that runs out in evaluation changes nothing.

        Args:
            has_failed: whether memory is known to have run out.
        """
        before, self._num_ooms = self._num_ooms, num_ooms(self.devices)
        is_training = self._adds and torch.is_grad_enabled()
        if not is_training or not (has_failed or self._num_ooms != before):
            return False
        batch_size = max(self._adds)
        self._end_calls()
        return self.search.ran_out(batch_size, which_ran_out(self.devices, before))

    def _remedy(self, chunk_sizes: Sequence[int]) -> str:
        if self._look_for_out_of_memory(has_failed=True):
            value = self.split(sum(chunk_sizes))[0]
            return f". gpu0_bsz='auto' is now {value}: the step may be repeated"
        return ", and gpu0_bsz='auto' knows no better; lower the batch size"

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a later run can start with, as numbers and lists, or None."""
        if self.batch_size is None or len(self.devices) < 2:
            return self._loaded
        return self.search.state_dict(self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Start with what an earlier run has found, unless training has begun.

        Warns:
            BalanceWarning: the state is none that ``state_dict`` returns; it is ignored.
        """
        if self.batch_size is not None:
            return
        try:
            self.search.load_state_dict(state)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            warn(f"what the checkpoint says of gpu0_bsz='auto' is damaged and ignored: {state!r}")
        else:
            self._loaded = dict(state)
            self.search.smallest = smallest_chunk(module)


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


_watching: weakref.WeakSet[AutoSplit] = weakref.WeakSet()
_lock = threading.Lock()


@functools.cache
def _register_hook() -> None:
    def note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        with _lock:
            splits = list(_watching)
        for split in splits:
            split.note_step(optimizer)

    register_optimizer_step_post_hook(note_step)
