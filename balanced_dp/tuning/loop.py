"""Observe somebody's training loop, and split its batches as a search asks."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..devices import is_emulated
from ..memory.breakdown import memory_breakdown
from ..memory.peaks import Peaks
from ..parallel.auto import SplitPolicy, has_gradients, smallest_chunk
from ..parallel.data_parallel import BalancedDataParallel
from ..search import LoopSearch
from ..split import even_share, split_batch
from .options import Option


class StepsDone(SystemExit):
    """Ends the script after as many iterations as were asked for; the exit code is 0."""


class Loop(SplitPolicy):
    """Measures the iterations of a training loop that knows nothing of it.

    It is the policy of all models of the loop. An iteration lasts from the first forward pass with
    gradients to the first forward pass after an optimizer's step: that of the optimizer which steps
    first, if there are several, or a backward pass if there is none. The first iteration is not
    counted, unless it is the only one: there was no optimizer state at its peak.

    Args:
        gpu0_bsz: ``"auto"`` to search for the best value; None for the even split; or a value,
            before which emulated devices get the even split once, to compare with.
        devices: the devices of the loop.
        budgets: the bytes of each device that may be used, or None if they do not matter.
        num_steps: the number of iterations after which the next forward pass raises ``StepsDone``;
            None means never.

    Attributes:
        options: what was measured, by the chunk sizes of the largest batch.
        last: the last measurement; None before the first.
        model: the script's model that is split, or its ``nn.DataParallel``, or None.
        num_iterations: the number of iterations that have ended.
        num_parameters: the number of trained parameters.
        precision: the dtype of autocast as text, or None.
    """

    def __init__(
        self,
        gpu0_bsz: int | Literal["auto"] | None,
        devices: Sequence[torch.device],
        budgets: Sequence[int] | None = None,
        num_steps: int | None = None,
    ) -> None:
        self.wanted = gpu0_bsz
        self.budgets = budgets
        self.num_steps = num_steps
        self.options: dict[tuple[int, ...], Option] = {}
        self.last: Option | None = None
        self.model: nn.Module | None = None
        self.num_iterations = self.num_parameters = 0
        self.precision: str | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._others: set[int] = set()
        self._pending: set[int] = set()
        self._largest = (0, False)
        self._use(devices)
        super().__init__(None, devices, spread=True)

    def __deepcopy__(self, memo: object) -> Loop:
        """Return this object: copies of a model are part of the same loop."""
        return self

    def _use(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        is_careful = not is_emulated(devices[0])
        budgets = self.budgets or [1] * len(devices)
        self._search = LoopSearch(budgets, is_careful=is_careful, for_speed=True)
        self._end_calls()

    def _end_calls(self) -> None:
        # Of the iteration that is under way:
        self._peaks: Peaks | None = None
        self._adds: dict[int, bool] = {}  # batch size -> whether it adds to gradients
        self._has_gone_back = self._has_stepped = False

    @property
    def is_splitting(self) -> bool:
        """Whether a model of the script is split by this object."""
        return isinstance(self.model, BalancedDataParallel) and self.model._policy is self

    @property
    def is_over(self) -> bool:
        """Whether the value stays as it is."""
        return self.wanted != "auto" or self._search.is_over

    def adopt(self, model: BalancedDataParallel[Any]) -> None:
        """Split the batches of a model.

        The devices of the first one become those of the loop. A model on others, or on these in
        another order, gets even chunks. One that repeats a device is left as it is.
        """
        if not 1 < len(model.devices) == len(set(self.devices).intersection(model.devices)):
            return
        if self.model is None:
            if self.budgets is not None:
                budget_of = dict(zip(self.devices, self.budgets, strict=True))
                self.budgets = [budget_of[device] for device in model.devices]
            self._use(model.devices)
        if model.devices == self.devices:
            self.model = model
            model._policy = self
        else:
            model._policy = SplitPolicy(None, model.devices, spread=True)

    # How the next batch is split.

    @property
    def gpu0_bsz(self) -> int | None:
        """The chunk size of the first device for the largest batch so far, None before it."""
        size, _ = self._largest
        return self.split(size)[0] if size else None

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk size of each device for a batch of the next call."""
        if self.wanted == "auto":
            return self._search.split(batch_size)
        even = even_share(batch_size, len(self.devices))
        waits = is_emulated(self.devices[0]) and not any(o.is_even for o in self.options.values())
        value = even if self.wanted is None or waits else self.wanted
        return split_batch(batch_size, len(self.devices), value)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Record the call of a model, and return its chunk sizes."""
        self._begin()
        if torch.is_grad_enabled():
            self._adds[batch_size] = self._adds.get(batch_size, False) or has_gradients(module)
            self._search.smallest = smallest_chunk(module)
            if torch.is_autocast_enabled(self.devices[0].type):
                self.precision = str(torch.get_autocast_dtype(self.devices[0].type))
        return self.split(batch_size)

    # The iterations.

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Observe the training loop that runs inside a ``with`` block."""
        with (
            register_module_forward_pre_hook(self._note_call),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
            mock.patch.object(torch.autograd, "backward", self._noting(torch.autograd.backward)),
        ):
            try:
                yield
            finally:
                if self._is_complete or not self.options:
                    self._end_iteration()

    def _noting(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def noted(*args: Any, **kwargs: Any) -> None:
            backward(*args, **kwargs)
            self._has_gone_back = True

        return noted

    @functools.cached_property
    def _has_no_optimizer(self) -> bool:
        # Not isinstance, which asks the object: torch's deprecated ones warn.
        return not any(issubclass(type(item), torch.optim.Optimizer) for item in gc.get_objects())

    @property
    def _is_complete(self) -> bool:
        """Whether the iteration ends with the next forward pass."""
        return self._has_stepped or (self._has_gone_back and self._has_no_optimizer)

    def _note_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._begin()
        if isinstance(module, nn.DataParallel) and not self.is_splitting:
            self.model = module

    def _begin(self) -> None:
        """Begin an iteration, unless one is under way, and end the one before."""
        if self._is_complete:
            self._end_iteration()
        # Each other optimizer may end its step, and the script print what it did in its last.
        is_waiting = bool(self._pending) and self.num_iterations == self.num_steps
        if self.num_steps is not None and self.num_iterations >= self.num_steps and not is_waiting:
            raise StepsDone
        if self._peaks is None and torch.is_grad_enabled():
            self._peaks, self._started = Peaks(self.devices), time.perf_counter()

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self.num_parameters = sum(p.numel() for p in _parameters(optimizer))
        elif optimizer is not self._optimizer:
            self._others.add(id(optimizer))

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._pending.discard(id(optimizer))
        if optimizer is self._optimizer and self._peaks is not None:
            self._has_stepped = True
            self._pending = set(self._others)
            self._seconds, self._uses = self._measured()

    def _measured(self) -> tuple[float, tuple[dict[str, int], ...]]:
        """Return the seconds until now, and the bytes by use of each device at its peak."""
        for device in self.devices:
            torch.get_device_module(device).synchronize(device)
        seconds = time.perf_counter() - self._started
        parameters = functools.partial(_parameters, self._optimizer)
        # What memory_breakdown asks of a model, where the script wraps none.
        counted: Any = SimpleNamespace(
            devices=self.devices, parameters=parameters, buffers=tuple, chunk_sizes=None
        )
        if isinstance(self.model, BalancedDataParallel) and self.model.devices == self.devices:
            counted = self.model
        return seconds, tuple(memory_breakdown(counted, self._optimizer).values())

    def _end_iteration(self) -> None:
        """Record an iteration; if it is not finished, it is the only one."""
        is_finished = self._is_complete
        if self._peaks is None:
            return
        if not self._has_stepped:
            self._seconds, self._uses = self._measured()
        elif is_emulated(self.devices[0]):  # the uses are those of the peak, which may be later
            _, self._uses = self._measured()
        peaks = tuple(self._peaks.of(device)[0] for device in self.devices)
        size, accumulates = max(self._adds.items(), default=(0, False))
        self._end_calls()
        self.num_iterations += is_finished
        self._record(size, accumulates, peaks)

    def _record(self, size: int, accumulates: bool, peaks: tuple[int, ...]) -> None:
        model = self.model if isinstance(self.model, BalancedDataParallel) else None
        chunk_sizes = self.split(size) if self.is_splitting else (0,) * len(self.devices)
        if not self.is_splitting and model is not None and model.devices == self.devices:
            chunk_sizes = model.chunk_sizes or chunk_sizes
        is_even = chunk_sizes[0] >= even_share(sum(chunk_sizes), len(chunk_sizes))
        measured = Option(
            gather=model is None or model.gathers_outputs,
            spread=model is not None and model.spread,
            gpu0_bsz=None if is_even else chunk_sizes[0],
            device_weights=None,
            chunk_sizes=chunk_sizes,
            peak_bytes=peaks,
            uses=self._uses,
            seconds=self._seconds,
        )
        if self.num_iterations < 2:  # there was no optimizer state
            self.last = measured
            return
        if (size, accumulates) < self._largest:  # it takes less than others
            return
        if (size, accumulates) > self._largest:  # begin again with the even split
            self._largest = size, accumulates
            self.options.clear()
            self._use(self.devices)
        known = self.options.pop(chunk_sizes, measured)  # the latest one is the last one
        self.last = max(measured, known, key=lambda option: max(option.peak_bytes))
        self.options[chunk_sizes] = self.last
        if is_even or self._search.search is not None:
            self._search.tell(chunk_sizes, peaks, accumulates)


def _parameters(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    groups = [] if optimizer is None else optimizer.param_groups
    return chain.from_iterable(group["params"] for group in groups)
