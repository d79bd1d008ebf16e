"""``gpu0_bsz="auto"``: choose the split from the peaks of a training loop's iterations."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import ArgumentError, warn
from ..memory.peaks import Peaks
from ..planning.auto_balance import AutoBalance
from ..split import split_batch

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


def _is_state(state: Any) -> bool:
    match state:
        case {
            "batch_size": int(batch_size),
            "gpu0_bsz": int(value),
            "capacities": [int(), *_],
            "too_large": list(too_large),
            "too_small": list(too_small),
        }:
            pairs = [*too_large, *too_small]
            are_pairs = all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
            return 0 <= value <= batch_size > 0 and are_pairs
    return False


class AutoSplit:
    """Chooses splits from the memory peaks of earlier iterations of a training loop.

    An iteration ends with the step of a ``torch.optim.Optimizer``; with gradient accumulation it
    has several calls. The first one does not count, nor the first one after each change.

    Attributes:
        batch_size: the largest batch so far; None before the first one.

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
        self._loaded: Mapping[str, Any] | None = None
        self._num_ooms: list[int] = []
        # Sizes of batches whose gradients have been added to others. Peaks without them are less.
        self._accumulating: set[int] = set()
        # Of the iteration that is under way:
        self._adds: dict[int, bool] = {}  # batch size -> whether gradients were there before
        self._peaks: Peaks | None = None
        self._peak_bytes: tuple[int, ...] = ()
        self._parameter_ids: frozenset[int] = frozenset()
        self._has_stepped = False
        self._num_calls = 0

    @functools.cached_property
    def balance(self) -> AutoBalance:
        """What chooses the values."""
        modules = [(torch.get_device_module(device), device) for device in self.devices]
        balance = AutoBalance([m.get_device_properties(d).total_memory for m, d in modules])
        balance.is_settling = True  # optimizer state is created in the first iteration
        return balance

    @property
    def gpu0_bsz(self) -> int | None:
        """The value for the largest batch so far; before the first one, that of a loaded state."""
        self._end_failed_iteration()
        if self.batch_size is not None:
            return self.balance.gpu0_bsz(self.batch_size)
        return None if self._loaded is None else self._split(self._loaded["batch_size"])[0]

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk sizes for a batch of the next call."""
        self._end_failed_iteration()
        return self._split(batch_size)

    def _end_failed_iteration(self) -> None:
        """Change the value if memory has run out since the last call."""
        if self._adds and not self._has_stepped and torch.is_grad_enabled():
            self.look_for_out_of_memory()

    def _split(self, batch_size: int) -> tuple[int, ...]:
        is_even = len(self.devices) < 2 or (self.batch_size is None and self._loaded is None)
        value = batch_size if is_even else self.balance.gpu0_bsz(batch_size)
        return split_batch(batch_size, max(1, len(self.devices)), value)

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a later run can start with, as numbers and lists, or None."""
        if self.batch_size is None:
            return None if self._loaded is None else dict(self._loaded)
        return self.balance.state_dict(self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Start with what an earlier run has found, unless training has begun.

        Warns:
            BalanceWarning: the state is none that ``state_dict`` returns; it is ignored.
        """
        if self.batch_size is not None:
            return
        if not _is_state(state):
            warn(f"what the checkpoint says of gpu0_bsz='auto' is damaged and ignored: {state!r}")
            return
        self._loaded = dict(state)
        if len(self.devices) > 1:
            self.balance.smallest = smallest_chunk(module)
            self.balance.load_state_dict(state)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """End the iteration before, if it is over, and return the chunk sizes for this call.

        Warns:
            BalanceWarning: no optimizer has stepped for many calls.
        """
        if self._has_stepped:
            self._end_iteration(module)
        if torch.is_grad_enabled():  # training
            self._begin_training_call(module, batch_size)
        return self._split(batch_size)

    def _begin_training_call(self, module: nn.Module, batch_size: int) -> None:
        if self.batch_size is None:
            self.balance.smallest = smallest_chunk(module)
        self.batch_size = max(batch_size, self.batch_size or 0)
        if self._adds:  # gradients accumulate, or the step before failed
            self.look_for_out_of_memory()
        if not self._adds:
            self._begin_iteration(module)
        self._adds[batch_size] = self._adds.get(batch_size, False) or has_gradients(module)
        self._num_calls += 1
        if self._num_calls == _PATIENCE and not self.balance.is_frozen:
            warn(
                f"gpu0_bsz='auto' has seen no optimizer step in {_PATIENCE} calls of forward, so "
                "it cannot tell how full the devices are; it waits for a torch.optim.Optimizer of "
                "the model's parameters. Give gpu0_bsz a number"
            )

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the step of an optimizer, if it is the model's."""
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if any(id(parameter) in self._parameter_ids for parameter in parameters):
            self._has_stepped = True
            if self._peaks is not None:  # read now: scripts print and reset them after the step
                self._peak_bytes = tuple(self._peaks.of(device)[0] for device in self.devices)

    def look_for_out_of_memory(self, has_failed: bool = False) -> bool:
        """End an iteration in which memory ran out; return whether the next split differs.

        Memory that runs out in evaluation changes nothing.

        Args:
            has_failed: whether memory is known to have run out. cuBLAS and cuDNN allocate without
                torch, so its counters do not show their failures; the device with the least free
                memory is taken then.
        """
        before, self._num_ooms = self._num_ooms, self._count_ooms()
        if not self._adds or not torch.is_grad_enabled():
            return False
        ran_out = [now > count for count, now in zip(before, self._num_ooms, strict=True)]
        if has_failed and not any(ran_out):
            free_bytes = [torch.get_device_module(d).mem_get_info(d)[0] for d in self.devices]
            ran_out = [free == min(free_bytes) for free in free_bytes]
        if not any(ran_out):
            return False
        batch_size = max(self._adds)
        value = self.balance.gpu0_bsz(batch_size)
        self.balance.out_of_memory(batch_size, ran_out.index(True))
        self._end_calls()
        return self.balance.gpu0_bsz(batch_size) != value

    def _begin_iteration(self, module: nn.Module) -> None:
        self._parameter_ids = frozenset(id(p) for p in module.parameters() if p.requires_grad)
        with _lock:
            _watching.add(self)
            _register_hook()
        if not self.balance.is_frozen or not self._num_ooms:
            self._num_ooms = self._count_ooms()
        if not self.balance.is_frozen:
            self._peaks = Peaks(self.devices)

    def _end_calls(self) -> None:
        self._adds, self._peaks, self._has_stepped, self._num_calls = {}, None, False, 0

    def _end_iteration(self, module: nn.Module) -> None:
        # Of several batches that accumulate, the largest one makes the peak.
        batch_size, accumulates = max(self._adds.items())
        is_observed = self._peaks is not None
        self._end_calls()
        if is_observed and self.balance.settle():
            return
        if accumulates and batch_size not in self._accumulating:
            self._accumulating.add(batch_size)
            self.balance.forget(batch_size)
        if not is_observed:
            return
        if batch_size in self._accumulating and not accumulates:
            self.balance.skip()
            return
        self.balance.observe(
            batch_size,
            self._peak_bytes,
            self._empty_bytes(module),
            sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers())),
        )

    def _empty_bytes(self, module: nn.Module) -> int:
        """Return the bytes on device 0 between iterations, with gradients that it will hold."""
        allocated: int = torch.get_device_module(self.devices[0]).memory_allocated(self.devices[0])
        return allocated + sum(
            p.nbytes
            for p in module.parameters()
            if p.requires_grad and p.grad is None and p.device == self.devices[0]
        )

    def _count_ooms(self) -> list[int]:
        statistics = [torch.get_device_module(d).memory_stats(d) for d in self.devices]
        return [of_device.get("num_ooms", 0) for of_device in statistics]


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
