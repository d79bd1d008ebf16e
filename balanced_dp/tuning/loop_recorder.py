"""Measure the iterations of somebody's training loop, and let a search split its batches."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any
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
from ..parallel.auto import SplitPolicy
from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.nested import tensors
from .measurement import StepRecorder
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
        search: what splits the batches, and gets what each iteration took.
        name: the name of the loop in reports.
        num_steps: the number of iterations after which the next forward pass raises ``StepsDone``;
            None means never.

    Attributes:
        num_iterations: the number of iterations that have ended.
        returns_loss: whether a 0-dim tensor, such as a loss, is among the outputs of the model.
        returns_rows: whether others are.
    """

    def __init__(
        self,
        search: SplitSearch,
        name: str = "training loop",
        num_steps: int | None = None,
    ) -> None:
        self.search = search
        self.name = name
        self.num_steps = num_steps
        self.num_iterations = 0
        self.returns_loss = self.returns_rows = False
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._others: set[int] = set()
        self._pending: set[int] = set()
        self._next_blocks: tuple[int, ...] = ()
        # Of the iteration that is under way:
        self._step: StepRecorder | None = None
        self._has_gone_back = False
        self._has_stepped = False
        self._replica_sizes: dict[torch.device, int] = {}
        self._replicated: type[nn.Module] | None = None

    @property
    def devices(self) -> Sequence[torch.device]:
        """The devices of the loop: those of the first model that is split."""
        return self.search.devices

    @property
    def is_splitting(self) -> bool:
        """Whether a model of the script is split by the search."""
        model = self._model
        return isinstance(model, BalancedDataParallel) and model._policy is self.search

    @property
    def is_balanced(self) -> bool:
        """Whether the script has a ``BalancedDataParallel`` that is left as it is."""
        return isinstance(self._model, BalancedDataParallel) and not self.is_splitting

    @property
    def is_spread(self) -> bool:
        """Whether the parameters of the script's model are spread over the devices."""
        return isinstance(self._model, BalancedDataParallel) and self._model.spread

    def adopt(self, model: BalancedDataParallel[Any]) -> None:
        """Split the batches of a model.

        The devices of the first one become those of the loop. A model on others, or on these in
        another order, gets even chunks. One that repeats a device is left as it is.
        """
        known = set(self.devices)
        if not 1 < len(model.devices) == len(known.intersection(model.devices)):
            return
        if self._model is None:
            self.search.use(model.devices)
        if model.devices == self.devices:
            self._model = model
            model._policy = self.search
        else:
            model._policy = SplitPolicy(None, model.devices, spread=True)

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
            self.search.num_parameters = sum(p.numel() for p in _parameters(optimizer))
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
        self._replica_sizes = {}

    def _end_loop(self) -> None:
        """Record the last iteration; if it is not finished, only if it is the only one."""
        if self._is_complete or not self.search.measurements:
            self._end_iteration(self._is_complete)

    @property
    def _counted(self) -> Any:
        """The model, or what ``memory_breakdown`` asks of one, where the script wraps none."""
        if isinstance(self._model, BalancedDataParallel):
            return self._model
        parameters = functools.partial(_parameters, self._optimizer)
        return SimpleNamespace(devices=self.devices, parameters=parameters, buffers=tuple)

    def _record(self, step: StepRecorder) -> None:
        sizes = self.search.chunk_sizes
        if isinstance(self._model, BalancedDataParallel) and self._model.devices == self.devices:
            sizes = sizes or self._model.chunk_sizes or ()
        sizes = sizes or tuple(self._replica_sizes.get(device, 0) for device in self.devices)
        measured = step.measurement(self.name, sizes[0], sizes)
        model = nn.Module() if self._model is None else self._model
        replica_bytes = sum(t.nbytes for t in chain(model.parameters(), model.buffers()))
        self.search.observe(measured, _empty_bytes(step), replica_bytes)


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
