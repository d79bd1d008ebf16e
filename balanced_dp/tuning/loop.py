"""Measure each iteration of a user's training loop, and search for the best split of its batches.

A split is the chunk size (the number of samples) of each device.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import get_worker_info

from ..emulation.machine import is_emulated
from ..memory.breakdown import memory_breakdown
from ..memory.peaks import Peaks
from ..memory.units import format_bytes
from ..parallel.auto import AutoSplit, SplitPolicy
from ..parallel.data_parallel import BalancedDataParallel
from ..search import VARIES, LoopSearch
from ..split import split_batch
from .options import Option, arguments_of

_MANY = 10
"""An iteration waits for other optimizers during at most this many steps of the first optimizer.

The first optimizer is the one that stepped first in the training loop. An iteration ends with a
step of the first optimizer. Before this step, all other optimizers of the previous iteration must
have stepped again. If they have not done so after ``_MANY`` steps of the first optimizer, its next
step ends the iteration anyway. See ``Loop``.
"""


class Loop(AutoSplit):
    """Measures each iteration of a training loop, and splits the batches of the loop's models.

    The script that contains the loop needs no changes. An iteration begins with a forward pass in
    which gradients are enabled. It ends with a step of the first optimizer, which is the optimizer
    that stepped first in the loop. Before this step, all other optimizers that stepped in the
    previous iteration must have stepped again. If they have not done so after 10 steps of the first
    optimizer, its 11th step ends the iteration anyway. So if a GAN takes three steps of its
    discriminator for each step of its generator, each iteration after the first few contains all
    four steps.

    The measurement of the first iteration of the loop is used only if no other iteration follows,
    because the first iteration begins without optimizer state. Models and optimizers are referenced
    weakly. If the first optimizer is deleted, the next optimizer that steps takes its place.

    Args:
        gpu0_bsz: the maximum number of samples on device 0, as an integer; ``"auto"`` to search for
            the best value; None for the even split. On emulated devices, the even split is
            measured, too, for comparison. With ``"auto"``, the even split comes first. With an
            integer, the two splits take turns: 2 iterations with ``gpu0_bsz``, 3 with the even
            split, 4 with ``gpu0_bsz``, and so on. They take turns because the script's use of
            memory may change while it runs. If all turns were equally long, an evaluation in every
            n-th iteration, for example, might always happen with the same split.
        devices: the devices of the loop.
        budgets: the number of bytes that may be used on each device; None means no limit.
        num_steps: after this many iterations, the next forward pass with gradients ends the script
            with exit code 0; None means never.

    Attributes:
        highest: the measurement with the highest peak among all iterations so far; None before the
            first measurement. If no iteration ended, a single measurement covers everything from
            the first forward pass in which gradients are enabled to the end of the training loop.
        num_parameters: the number of elements of all parameters of the first optimizer.
        precision: the dtype of autocast as text; None if autocast was not enabled.
    """

    def __init__(
        self,
        gpu0_bsz: int | Literal["auto"] | None,
        devices: Sequence[torch.device],
        budgets: Sequence[int] | None = None,
        num_steps: int | None = None,
    ) -> None:
        super().__init__(devices)
        self.wanted = gpu0_bsz
        self.budgets = budgets
        self.num_steps = num_steps
        self.highest: Option | None = None
        self._model: Callable[[], BalancedDataParallel[Any] | None] = lambda: None
        self.num_parameters = 0
        self.precision: str | None = None
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None
        self._steps: list[int] = []
        """For each step since the previous iteration ended, the ``id`` of its optimizer."""
        self._needed = set[int]()
        """The ``id`` of each optimizer that stepped in the previous iteration."""
        self._stepped = set[int]()
        """The ``id`` of each optimizer that has stepped in the loop so far.

        An optimizer is added at the end of the iteration in which it first stepped. The first
        optimizer is added at its first step. If the first optimizer is deleted and another
        optimizer takes its place, the set is reset to contain only the other optimizer.
        """
        self._begin_search()

    def __deepcopy__(self, memo: object) -> Loop:
        """Return this object itself: a copy of a model belongs to the same loop as the model."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this object as a ``SplitPolicy`` with the current ``gpu0_bsz``.

        A ``SplitPolicy`` is a fixed rule that splits each batch. So a model that is saved contains
        this rule, not the measurements of the loop.
        """
        return SplitPolicy, (self.gpu0_bsz, self.devices)

    def _begin_search(self) -> None:
        self._ranges: dict[tuple[Any, ...], tuple[int, int]] = {}
        """A dict from each kind of iteration to the lowest and the highest peak of its iterations.

        The kind of an iteration is its chunk sizes, and whether it added gradients to existing
        gradients (gradient accumulation). The peak of an iteration is the highest peak of any
        device, in bytes.
        """
        self.search = LoopSearch(
            self.budgets or [1] * len(self.devices),
            is_careful=not is_emulated(self.devices[0]),
            compares=self.wanted == "auto",
        )

    @property
    def options(self) -> list[Option]:
        """The measurement of each split that was tried with the largest batch so far.

        A split is the chunk size (the number of samples) of each device. Calls that split no input
        are left out. If a split was measured more than once, the list contains the measurement with
        the highest peak. If ``gpu0_bsz`` is ``"auto"``, only the latest measurements of each split
        count: equally many for each split, at most 3. If all measurements counted, the splits that
        were measured most often would tend to have the highest peaks.
        """
        return [option for _, option in self.search.highest.values() if option.batch_size]

    @property
    def model(self) -> BalancedDataParallel[Any] | None:
        """The last model whose batches this object splits; None if no such model exists."""
        model = self._model()
        return model if model is not None and model._policy is self else None

    def adopt(self, model: BalancedDataParallel[Any]) -> None:
        """Let this object split the batches of ``model``, if ``model`` has the loop's devices.

        A model is ignored if it has fewer than two devices, the same device twice, or a device that
        the loop does not have. The devices of the first model that is not ignored become the
        devices of the loop, in the order in which the model has them. If a later model has only
        some of the loop's devices, or has them in another order, its batches are split evenly.
        """
        if not 1 < len(model.devices) == len(set(self.devices).intersection(model.devices)):
            return
        if self.model is None and not self.search.highest:
            if self.budgets is not None:
                budget_of = dict(zip(self.devices, self.budgets, strict=True))
                self.budgets = [budget_of[device] for device in model.devices]
            self.devices, self._peaks = model.devices, None
            self._begin_search()
        if model.devices == self.devices:
            self._model = weakref.ref(model)
            model._policy = self
        else:
            model._policy = SplitPolicy(None, model.devices)

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return how many samples each device gets if the next batch has ``batch_size`` samples."""
        emulates = is_emulated(self.devices[0])
        if self.wanted == "auto" and (not emulates or any(o.is_even for o in self.options)):
            return super().split(batch_size)
        turn = (math.isqrt(8 * self.num_iterations + 9) - 3) // 2  # turns of 2, 3, 4 ... iterations
        is_even = emulates and turn % 2
        value = self.wanted if isinstance(self.wanted, int) and not is_even else batch_size
        return split_batch(batch_size, len(self.devices), value)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Measure the training loop that runs inside a ``with`` block."""
        with register_module_forward_pre_hook(self._note_call):
            try:
                yield
            finally:
                if self.highest is None and self._peaks is not None:
                    self.highest = self._measured(self._peaks)
                self._peaks = None

    def _note_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # Modules that run in a DataLoader's workers, such as transforms, begin no iteration.
        if torch.is_grad_enabled() and get_worker_info() is None:
            self.begin()
            if torch.is_autocast_enabled(self.devices[0].type):
                self.precision = str(torch.get_autocast_dtype(self.devices[0].type))

    def begin(self) -> None:
        """Begin an iteration unless an iteration is under way.

        Raises:
            SystemExit: ``num_steps`` iterations have ended.
        """
        if self._peaks is None:
            if self.num_steps is not None and self.num_iterations >= self.num_steps:
                raise SystemExit
            self._started = time.perf_counter()
            super().begin()
            self._peaks = Peaks(self.devices)  # the report needs these even when the search is over

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that ``optimizer`` has taken a step.

        If the step ends an iteration, record the measurement of this iteration, too.
        """
        if self._optimizer() is None:
            self._optimizer, self._needed = weakref.ref(optimizer), set()
            self._stepped = {id(optimizer)}
            self.num_parameters = sum(p.numel() for p in self._parameters())
        self._note_failure()
        self._steps.append(id(optimizer))
        is_whole = self._needed.issubset(self._steps) or self._steps.count(id(optimizer)) > _MANY
        if optimizer is not self._optimizer() or self._peaks is None or not is_whole:
            return
        self._needed, self._steps = {*self._steps}, []
        measured, self._peaks = self._measured(self._peaks), None
        is_settled = self._note_rule()
        if not self._needed <= self._stepped:
            # An optimizer has stepped for the first time. Up to now it had no state, so the peaks
            # that were measured do not include its state, and the search starts again.
            is_settled, self._stepped = False, self._stepped | self._needed
            self._begin_search()
        self.num_iterations += 1
        if self.model is not None:
            peaks, accumulates = measured.peak_bytes, self._batch[1]
            self.search.tell(measured.chunk_sizes, peaks, accumulates, is_settled, measured)
            kind, peak = (measured.chunk_sizes, accumulates), max(peaks)
            low, high = self._ranges.get(kind, (peak, peak))
            if is_settled:
                self._ranges[kind] = min(low, peak), max(high, peak)
        if self.highest is not None and self.num_iterations > 2:
            measured = max(self.highest, measured, key=lambda option: max(option.peak_bytes))
        self.highest = measured

    def notes(self, *, has_failed: bool = False) -> Iterator[str]:
        """Yield sentences about anything unusual in the measurements, such as an early end.

        Args:
            has_failed: whether an error has ended the training loop.
        """
        num_taken, search = self.num_iterations, self.search.search
        if was_ended := self.num_steps is not None and num_taken >= self.num_steps:
            steps = f"{num_taken} training step{'s' * (num_taken > 1)}"
            yield f"The script was ended after {steps} (--steps)."
        elif self.highest is not None and not num_taken:
            yield "No torch.optim.Optimizer took a step: these are the peaks of the whole run."
        if self.wanted == "auto" and self.options and not self.search.is_over:
            fact = f"The search for gpu0_bsz did not end in {num_taken} steps; options may change"
            more = f"raise --steps to {max(14, 2 * num_taken)}"
            advice = f": {more if was_ended else 'only steps of the largest batch count'}"
            yield f"{fact}{'' if has_failed else advice}."
        fit = [option.fits(self.budgets) for option in self.options if self.budgets]
        if self.wanted != "auto" and fit and not any(fit):
            yield "Other values of gpu0_bsz were not measured: try --gpu0-bsz auto."
        compared = {(split, self.search.accumulates) for split in self.search.highest}
        ranges = [self._ranges[kind] for kind in compared & self._ranges.keys()]
        low, high = min(ranges, key=lambda r: r[0] / r[1], default=(1, 1))
        if high > low * (1 + VARIES):
            between = f"between {format_bytes(low)} and {format_bytes(high)}"
            why = f"Steps with the same split peaked {between}, so options may need more than shown"
            yield f"{why}. Run more steps, or measure one value: --gpu0-bsz."
        if isinstance(self.wanted, int) and {option.gpu0_bsz for option in self.options} == {None}:
            if self.wanted >= search.even:
                even = f"below {search.even}, the even share"
                yield f"gpu0_bsz={self.wanted} has no effect: it must be {even}."
            else:
                yield f"gpu0_bsz={self.wanted} was not measured with the largest batch."
        if self.wanted == "auto" and search.smallest > 1 and search.best in (0, 2):
            yield "gpu0_bsz=1 was not tried: BatchNorm would get a chunk of one sample."

    def _parameters(self) -> Iterator[torch.Tensor]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return chain.from_iterable(group["params"] for group in groups)

    def _measured(self, peaks: Peaks) -> Option:
        """Return the measurement of the current iteration from its beginning until now."""
        for device in self.devices:
            torch.get_device_module(device).synchronize(device)
        seconds = time.perf_counter() - self._started
        model = self.model
        # If the script wraps no model, a namespace stands in for the model in memory_breakdown.
        counted: Any = model or SimpleNamespace(
            devices=self.devices, parameters=self._parameters, buffers=tuple
        )
        chunk_sizes = self.split(self._batch[0]) if model else (0,) * len(self.devices)
        return Option(
            gather=model is None or model.gathers_outputs,
            spread=model is not None and model.spread,
            **arguments_of(chunk_sizes),
            chunk_sizes=chunk_sizes,
            peak_bytes=peaks.allocated,
            uses=tuple(memory_breakdown(counted, self._optimizer()).values()),
            seconds=seconds,
        )
