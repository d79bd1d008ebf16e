"""Measure the iterations of somebody's training loop, and split its batches."""

from __future__ import annotations

import functools
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from ..devices import is_emulated
from ..emulation.ledger import OF_THE_BATCH, Label
from ..emulation.machine import current_machine
from ..emulation.tensor import set_label
from ..parallel.auto_split import has_gradients, smallest_chunk
from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.nested import tensors
from ..parallel.split_policy import SplitPolicy
from ..planning.memory_model import fit
from ..split import even_share, split_batch
from .measurement import Measurement, StepRecorder, fittable
from .report_types import Provenance, Report
from .reports import report_of_measurements
from .split_search import SplitSearch


class StepsDone(SystemExit):
    """Ends the script after as many iterations as were asked for; the exit code is 0."""


class LoopRecorder:
    """Measures each iteration of a training loop that knows nothing of it.

    An iteration lasts from the first forward pass with gradients to the first forward pass after
    an optimizer's step: that of the optimizer which steps first, if there are several, or a
    backward pass if there is none. The first iteration is not counted, unless it is the only one:
    there was no optimizer state at its peak.

    Args:
        devices: the devices of the loop.
        capacities: capacity of each device in bytes, or None if they do not matter: then the even
            split of the loop's batch fills the devices.
        gpu0_bsz: ``"auto"`` to search for the best value; None for the even split; or a value. On
            emulated devices, the even split and half of it are measured before a given value.
        name: the name of the loop in reports.
        reserve: bytes of each capacity to keep free.
        num_steps: the number of iterations after which the next forward pass raises ``StepsDone``;
            None means never.

    Attributes:
        measurements: what was measured, by batch size and chunk size of the first device.
        num_iterations: the number of iterations that have ended.
        returns_loss: whether a 0-dim tensor, such as a loss, is among the outputs of the model.
        returns_rows: whether others are.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        capacities: Sequence[int] | None = None,
        gpu0_bsz: int | Literal["auto"] | None = "auto",
        *,
        name: str = "training loop",
        reserve: int = 0,
        num_steps: int | None = None,
    ) -> None:
        self.name = name
        self.devices = list(devices)
        self.capacities = capacities
        self.reserve = reserve
        self.gpu0_bsz = gpu0_bsz
        self.num_steps = num_steps
        self.measurements: dict[tuple[int, int], Measurement] = {}
        self.num_iterations = 0
        self.returns_loss = self.returns_rows = False
        self.num_parameters = 0
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._others: set[int] = set()
        self._pending: set[int] = set()
        self._next_blocks: tuple[int, ...] = ()
        self._accumulating: set[int] = set()
        self._empty_bytes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._precision: str | None = None
        # Of the iteration that is under way:
        self._step: StepRecorder | None = None
        self._has_gone_back = False
        self._has_stepped = False
        self._added_sizes: set[int] = set()
        self._chunk_sizes: tuple[int, ...] = ()
        self._replica_sizes: dict[torch.device, int] = {}
        self._replicated: type[nn.Module] | None = None

    @property
    def is_splitting(self) -> bool:
        """Whether a model of the script is split by this object."""
        model = self._model
        return isinstance(model, BalancedDataParallel) and isinstance(model._policy, _RecordedSplit)

    @property
    def is_balanced(self) -> bool:
        """Whether the script has a ``BalancedDataParallel`` that is left as it is."""
        return isinstance(self._model, BalancedDataParallel) and not self.is_splitting

    @property
    def is_spread(self) -> bool:
        """Whether the parameters of the script's model are spread over the devices."""
        return isinstance(self._model, BalancedDataParallel) and self._model.spread

    def __deepcopy__(self, memo: object) -> LoopRecorder:
        """Return this object: copies of a model are part of the same loop."""
        return self

    # The split.

    def adopt(self, model: BalancedDataParallel[Any]) -> None:
        """Split the batches of a model.

        The devices of the first one become those of the loop. A model on others, or on these in
        another order, gets even chunks. One that repeats a device is left as it is.
        """
        known = set(self.devices)
        if not 1 < len(model.devices) == len(known.intersection(model.devices)):
            return
        if self._model is None:
            if self.capacities is not None:
                of_device = dict(zip(self.devices, self.capacities, strict=True))
                self.capacities = [of_device[device] for device in model.devices]
            self.devices = model.devices
        if model.devices == self.devices:
            self._model = model
            model._policy = _RecordedSplit(self)
        else:
            model._policy = SplitPolicy(None, model.devices, spread=True)

    @functools.cached_property
    def _search(self) -> SplitSearch:
        budgets = [1] * len(self.devices)
        if self.capacities is not None:
            budgets = [capacity - self.reserve for capacity in self.capacities]
        return SplitSearch(self.gpu0_bsz, budgets, is_free=is_emulated(self.devices[0]))

    @property
    def is_searching(self) -> bool:
        """Whether the search for the best value is not over."""
        return self.is_splitting and not self._search.is_over

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return the chunk sizes for a batch."""
        gpu0_bsz = self._search.gpu0_bsz(batch_size)
        return split_batch(batch_size, len(self.devices), gpu0_bsz)

    def begin_call(self, module: nn.Module, batch_size: int) -> None:
        """Record the call of a model; its largest batch makes the peak."""
        if not torch.is_grad_enabled():
            return
        if has_gradients(module):
            self._added_sizes.add(batch_size)
        if batch_size < sum(self._chunk_sizes):
            return
        self._search.smallest = smallest_chunk(module)
        self._chunk_sizes = self.split(batch_size)
        if torch.is_autocast_enabled(self.devices[0].type):
            self._precision = str(torch.get_autocast_dtype(self.devices[0].type))

    # The iterations.

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the training loop that runs inside a ``with`` block."""
        with (
            register_module_forward_pre_hook(self._begin_iteration),
            register_module_forward_hook(self._note_output),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
            mock.patch.object(torch.autograd, "backward", self._noting(torch.autograd.backward)),
        ):
            try:
                yield
            finally:
                self._end_loop()

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

    def _begin_iteration(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_complete:
            self._end_iteration()
        if self._is_done():
            raise StepsDone  # here, so that the script can print what it did in its last step
        if self._step is None and torch.is_grad_enabled():
            self._set_apart_what_is_kept(args)
            self._step = StepRecorder(self.devices)
        if isinstance(module, nn.DataParallel) and not self.is_splitting:
            self._model = module
        is_replica = getattr(module, "_is_replica", False)
        if is_replica and torch.is_grad_enabled() and not self.is_splitting:
            self._note_replica(module, args)

    def _set_apart_what_is_kept(self, args: tuple[Any, ...]) -> None:
        """Label what the script keeps on emulated devices since before its loop, as a data set."""
        if not is_emulated(self.devices[0]) or self.num_iterations > 1:
            return
        if not self.num_iterations:
            self._next_blocks = current_machine().next_blocks()
            return
        current_machine().label_older(self._next_blocks)
        for tensor in tensors(args):
            if not tensor._is_view():  # all iterations have the same batch, which is no data set
                set_label(tensor, Label.INPUT, over={Label.OTHER})

    def _is_done(self) -> bool:
        """Return whether there were enough iterations; each other optimizer may end its step."""
        if self.num_steps is None or self.num_iterations < self.num_steps:
            return False
        return not self._pending or self.num_iterations > self.num_steps

    def _note_replica(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the chunk of a replica of nn.DataParallel, or of a script's own class."""
        self._replicated = self._replicated or type(module)  # a replica is called before its parts
        if type(module) is not self._replicated:
            return
        dim = self._model.dim if isinstance(self._model, nn.DataParallel) else 0
        for tensor in tensors(args):
            if tensor.device in self.devices and tensor.dim() > dim:
                self._replica_sizes[tensor.device] = tensor.size(dim)
                return

    def _note_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is self._model and torch.is_grad_enabled():
            dims = [leaf.dim() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self.returns_loss, self.returns_rows = 0 in dims, any(dims)

    def _begin_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
            self.num_parameters = sum(p.numel() for p in _parameters(optimizer))
        elif optimizer is not self._optimizer:
            self._others.add(id(optimizer))
        elif self._has_stepped:  # its closure runs the model
            self._end_iteration()
        if optimizer is self._optimizer and self._step is not None:
            self._step.end_phase(self._counted, optimizer)

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._pending.discard(id(optimizer))
        if optimizer is self._optimizer:
            self._has_stepped = True
            self._pending = set(self._others)

    def _end_iteration(self, is_finished: bool = True) -> None:
        step, self._step = self._step, None
        self._has_gone_back = self._has_stepped = False
        if step is None:
            return
        step.end_phase(self._counted, self._optimizer)
        self.num_iterations += is_finished
        self._record(step)
        self._added_sizes, self._chunk_sizes, self._replica_sizes = set(), (), {}

    def _end_loop(self) -> None:
        """Record the last iteration; if it is not finished, only if it is the only one."""
        if self._is_complete or not self.measurements:
            self._end_iteration(self._is_complete)

    @property
    def _counted(self) -> Any:
        """The model, or what ``memory_breakdown`` asks of one, where the script wraps none."""
        if isinstance(self._model, BalancedDataParallel):
            return self._model
        parameters = functools.partial(_parameters, self._optimizer)
        return SimpleNamespace(devices=self.devices, parameters=parameters, buffers=tuple)

    def _record(self, step: StepRecorder) -> None:
        sizes = self._chunk_sizes
        if isinstance(self._model, BalancedDataParallel) and self._model.devices == self.devices:
            sizes = sizes or self._model.chunk_sizes or ()
        sizes = sizes or tuple(self._replica_sizes.get(device, 0) for device in self.devices)
        key = sum(sizes), sizes[0]
        measured = step.measurement(self.name, sizes[0], sizes)
        if self.num_iterations == 2:  # the first one had no optimizer state
            self.measurements.clear()
        if not self._has_all_gradients(measured.batch_size):
            return
        known = self.measurements.pop(key, measured)  # the latest one is the last one
        self.measurements[key] = max(measured, known, key=lambda m: max(m.peak_bytes))
        if self.measurements[key] is measured:
            self._empty_bytes[key] = _empty_bytes(step)
        model = nn.Module() if self._model is None else self._model
        replica_bytes = sum(t.nbytes for t in chain(model.parameters(), model.buffers()))
        self._search.observe(measured, _empty_bytes(step), replica_bytes)

    def _has_all_gradients(self, batch_size: int) -> bool:
        """Return whether the peak has the gradients that those of other iterations have.

        If gradients accumulate, the second batch adds to them, unless the data ends before.
        """
        accumulates = batch_size in self._added_sizes
        if accumulates and batch_size not in self._accumulating:
            self._accumulating.add(batch_size)
            others = {k: v for k, v in self.measurements.items() if k[0] != batch_size}
            if len(others) < len(self.measurements):
                self.measurements = others
                del self._search
        return accumulates or batch_size not in self._accumulating

    # The result.

    @property
    def last(self) -> Measurement | None:
        """The last measurement of the largest batch."""
        latest_first = reversed(self.measurements.values())
        return max(latest_first, key=lambda measured: measured.batch_size, default=None)

    @property
    def asked(self) -> Measurement | None:
        """The measurement of the largest batch with the given value, or else the last one."""
        last = self.last
        if last is None or not isinstance(self.gpu0_bsz, int):
            return last
        value = min(self.gpu0_bsz, even_share(last.batch_size, len(self.devices)))
        return self.measurements.get((last.batch_size, value), last)

    def report(self) -> Report | None:
        """Return the report on the batch size with the most splits; None if it has one only."""
        counts = Counter(size for size, _ in self.measurements)
        batch_size = max(counts, key=lambda size: (counts[size], size), default=0)
        even = even_share(batch_size, len(self.devices))
        if counts[batch_size] < 2 or (batch_size, even) not in self.measurements:
            return None
        measured = [m for m in self.measurements.values() if m.batch_size == batch_size]
        capacities = self.capacities
        if capacities is None:
            peak = max(self.measurements[batch_size, even].peak_bytes)
            capacities = [math.ceil(peak / 2**20) * 2**20] * len(self.devices)
        empty_bytes = [self._empty_bytes[m.batch_size, m.chunk_sizes[0]] for m in measured]
        names = (torch.get_device_module(d).get_device_name(d) for d in self.devices)
        return report_of_measurements(
            measured,
            Provenance.of_this_process(names),
            capacities,
            self.reserve,
            batch_size=batch_size,
            model=fit(fittable(measured), empty_bytes),
            num_parameters=self.num_parameters,
            precision=self._precision,
        )


class _RecordedSplit(SplitPolicy):
    """The chunk sizes that a ``LoopRecorder`` chooses."""

    def __init__(self, recorder: LoopRecorder) -> None:
        self._recorder = recorder
        self._largest = 0
        super().__init__(None, recorder.devices, spread=True)

    @property
    def gpu0_bsz(self) -> int | None:
        return self.split(self._largest)[0] if self._largest else None

    def split(self, batch_size: int) -> tuple[int, ...]:
        return self._recorder.split(batch_size)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        self._recorder.begin_call(module, batch_size)
        self._largest = max(self._largest, batch_size)
        return self.split(batch_size)


def _empty_bytes(step: StepRecorder) -> tuple[int, ...]:
    """Return what the first device would hold with an empty batch, at the peak of each phase.

    In the backward pass, all that is not persistent grows with the batch. In the optimizer's step,
    so does what is left of the batch, where it is known; the rest is the optimizer's own.
    """
    backward, at_step = (*(uses[0] for uses in step.uses), {})[:2]
    return (
        sum(size for use, size in backward.items() if use in _FIXED),
        sum(size for use, size in at_step.items() if use not in OF_THE_BATCH),
    )


_FIXED = ("parameter", "buffer", "gradient", "optimizer state", "other")


def _parameters(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    groups = [] if optimizer is None else optimizer.param_groups
    return chain.from_iterable(group["params"] for group in groups)
