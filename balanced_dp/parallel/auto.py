"""Choose how many samples of a batch each device gets.

``SplitPolicy`` splits by numbers that the user gives. ``AutoSplit`` searches for the best split
while a training loop runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..emulation.machine import is_emulated
from ..errors import ArgumentError, ArgumentTypeError, warn
from ..memory.out_of_memory import num_ooms, which_ran_out
from ..memory.peaks import Peaks, capacities_of
from ..search import LoopSearch
from ..split import even_share, split_batch, split_by_weights

_LARGE = 2**20
"""The size of an imaginary batch, whose split shows whether the devices' shares have changed.

The batch is so large that rounding hides almost no change.
"""

STATE_KEY = "auto_split"
"""The key under which a state dict's metadata holds the split found by ``gpu0_bsz="auto"``."""


class SplitPolicy:
    """A fixed rule for splitting each batch over the devices.

    Args:
        gpu0_bsz: the most samples for the first device, or None for no limit.
        devices: the devices over which each batch is split.
        device_weights: one number for each device. If given, batches are split in proportion to
            these numbers.

    Raises:
        ArgumentError: ``gpu0_bsz`` is negative, or ``device_weights`` are invalid. They must be one
            finite number of at least 0 for each device, and not all 0.
        ArgumentTypeError: ``gpu0_bsz`` is neither an integer nor None.
    """

    def __init__(
        self,
        gpu0_bsz: int | None,
        devices: Sequence[torch.device],
        device_weights: Sequence[float] | None = None,
    ) -> None:
        self.devices = devices
        self.gpu0_bsz = gpu0_bsz
        self.device_weights = None if device_weights is None else tuple(device_weights)
        self._is_first = True
        if device_weights is not None and len(device_weights) != len(devices):
            fact = f"device_weights must be {len(devices)} numbers, one for each device"
            raise ArgumentError(f"{fact}, got {len(device_weights)}")
        self.split(0)  # raises an error if an argument is out of range

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return each device's number of samples for a batch of ``batch_size`` samples.

        Raises:
            ArgumentError: ``gpu0_bsz`` leaves samples for the other devices, but their
                ``device_weights`` are all 0.
        """
        if self.device_weights is not None:
            return split_by_weights(batch_size, self.device_weights, self.gpu0_bsz)
        limit = batch_size if self.gpu0_bsz is None else self.gpu0_bsz
        return split_batch(batch_size, len(self.devices), limit)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Return how many samples each device gets in the call of the model that begins now.

        Args:
            module: the module that the call runs; this class does not use it.
            batch_size: the number of samples in the batch of the call.

        Warns:
            BalanceWarning: ``gpu0_bsz`` is at or above the even share (batch size / number of
                devices, rounded up), so that it has no effect. Only the first batch with more than
                one sample is checked. With ``device_weights``, no batch is checked.
        """
        chunk_sizes, even = self.split(batch_size), even_share(batch_size, len(self.devices))
        has_no_effect = batch_size > 1 and even <= (self.gpu0_bsz or 0)
        if self._is_first and not self.device_weights and has_no_effect:
            fact = f"has no effect: this batch of {batch_size} is split evenly into {chunk_sizes}"
            remedy = f"choose gpu0_bsz below {even}, unless later batches are larger"
            warn(f"gpu0_bsz={self.gpu0_bsz} {fact}; {remedy}")
        self._is_first &= batch_size < 2
        return chunk_sizes

    def remedy(self, batch_size: int) -> str:
        """Return the advice to add to an out-of-memory error."""
        return "use smaller batches, or fewer samples on the full device (gpu0_bsz, device_weights)"

    def state_dict(self) -> dict[str, Any] | None:
        """Return None, because a fixed rule has nothing to save in a checkpoint."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing, because a fixed rule does not depend on the state of an earlier run."""


def smallest_chunk(module: nn.Module) -> int:
    """Return the smallest number of samples that a replica of ``module`` can train on.

    This number is 2 if a batch norm of ``module`` computes its statistics from the replica's
    samples, and 1 otherwise. For a single sample with one value in each channel, a batch norm
    raises an error. For a single image, there may be no error, but the statistics of one image are
    not those of a batch.
    """
    norms = (child for child in module.modules() if isinstance(child, _BatchNorm))
    return 1 + any(norm.training or norm.running_mean is None for norm in norms)


class AutoSplit:
    """The rule of ``gpu0_bsz="auto"``: search for the best split while a training loop runs.

    This class has the methods and attributes of ``SplitPolicy``.

    A split is the number of samples that each device gets. The fullest device is the device whose
    peak memory is the largest fraction of the device's total memory. The best split is the one
    whose fullest device is least full. The search compares the peak memory of training iterations
    with different splits.

    An iteration begins with a forward pass with gradients enabled, and ends with the step of a
    ``torch.optim.Optimizer`` that trains the model. With gradient accumulation, an iteration
    contains several calls of the model. The search ignores the very first iteration, which creates
    the optimizer's state, and the first iteration after each change of the split.

    Attributes:
        search: the ``LoopSearch`` that chooses the splits.
        batch_size: the number of samples in the largest training batch so far. It is 0 before the
            first training batch, unless a loaded checkpoint has set it.
        num_iterations: the number of training iterations that have ended with an optimizer step.
        last_split: how many samples each device got in the last call; empty before the first call.

    Raises:
        ArgumentError: a device has no memory statistics, or ``devices`` contains a device twice.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        counted = {d for d in devices if hasattr(torch.get_device_module(d), "memory_stats")}
        if len(counted) < len(devices):
            fact = f"needs distinct devices that count their memory, got {[*map(str, devices)]}"
            remedy = "give a number, or try it inside emulate_devices"
            raise ArgumentError(f"gpu0_bsz='auto' {fact}; {remedy}")
        self.devices, self.device_weights = devices, None
        self.search = LoopSearch(capacities_of(devices), is_careful=not is_emulated(devices[0]))
        self.batch_size = 0
        self.num_iterations = 0
        self.last_split: tuple[int, ...] = ()
        self._num_ooms = num_ooms(devices)
        self._ids: set[int] = set()
        """The ``id`` of each parameter of the model."""
        self._rule: tuple[int, ...] | None = None
        """The previous iteration's split of a batch of ``_LARGE`` samples; None at first."""
        self._peaks: Peaks | None = None
        """The peak memory of the devices in the current iteration; None between iterations."""

    @property
    def gpu0_bsz(self) -> int | None:
        """The first device's number of samples if the batch size is ``self.batch_size``.

        It is None if ``self.batch_size`` is 0.
        """
        return self.split(self.batch_size)[0] if self.batch_size else None

    def split(self, batch_size: int) -> tuple[int, ...]:
        """Return each device's number of samples for a batch of ``batch_size`` samples.

        Memory may run out outside of the model's calls, for example in the backward pass. This
        method checks whether this has happened in the current training iteration. If so, it ends
        the iteration, and may change how batches are split.
        """
        self._note_failure()
        return self.search.split(batch_size)

    def begin(self) -> None:
        """Begin a training iteration, unless one is running already.

        Unless the search for the best split is over, peak memory is measured in the iteration.
        """
        if self._peaks is None:
            _watching[id(self)] = self
            _register_hook(_note_step)
            watched = () if self.search.is_over else self.devices
            self._num_ooms = num_ooms(watched) or self._num_ooms
            # The size of the iteration's largest batch, and whether a parameter already had a
            # gradient when the forward pass of this batch began, as in gradient accumulation.
            self._batch = (0, False)
            self._peaks = Peaks(watched)

    def begin_call(self, module: nn.Module, batch_size: int) -> tuple[int, ...]:
        """Record that a call of the model begins; return how many samples each device gets.

        Args:
            module: the module that the call runs.
            batch_size: the number of samples in the batch of the call.
        """
        search = self.search.search
        # The maximum, because several models may share this object: see ``Loop`` in tuning/loop.py.
        search.smallest = max(search.smallest, smallest_chunk(module))
        chunk_sizes = self.last_split = self.split(batch_size)
        if batch_size and torch.is_grad_enabled():
            if self._peaks is None:
                # A batch that is larger than all earlier ones begins the search again.
                self.search.is_over &= batch_size <= self.batch_size
            self.begin()
            self._ids = set(map(id, module.parameters()))
            adds = any(parameter.grad is not None for parameter in module.parameters())
            self._batch = max(self._batch, (batch_size, adds))
            self.batch_size = max(batch_size, self.batch_size)
        return chunk_sizes

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the training iteration if ``optimizer``, which has just stepped, trains the model."""
        is_ours = any(id(p) in self._ids for g in optimizer.param_groups for p in g["params"])
        if self._peaks is not None and is_ours:
            peaks, self._peaks = self._peaks.allocated, None
            found = self.search.split(self._batch[0]), peaks, self._batch[1], self._note_rule()
            if not self.search.is_over:
                self.search.tell(*found)
            self.num_iterations += 1

    def _note_rule(self) -> bool:
        """Record this iteration's split; return whether the previous iteration had the same split.

        If the previous iteration split batches differently, the caller ignores the peak memory of
        this iteration. This peak may be too high: the loop may still have held outputs of the
        previous iteration, and libraries such as cuDNN may have tried out kernels for the new chunk
        sizes, which takes memory, too.
        """
        before, self._rule = self._rule, self.split(_LARGE)
        return before == self._rule

    def _note_failure(self, has_failed: bool = False) -> bool:
        """End the iteration if memory ran out; return whether batches are now split differently.

        If memory runs out in evaluation, nothing changes.

        Args:
            has_failed: whether the caller knows that memory ran out. If False, the counters of the
                devices' allocators show whether memory ran out.
        """
        before, is_training = self._num_ooms, self._peaks is not None and torch.is_grad_enabled()
        if is_training or has_failed:
            self._num_ooms = num_ooms(self.devices)
        has_failed |= self._num_ooms != before
        if not is_training or not has_failed or not self._batch[0]:
            return False
        self._peaks = None
        return self.search.ran_out(self._batch[0], which_ran_out(self.devices, before))

    def remedy(self, batch_size: int) -> str:
        """Adapt the split of batches after memory ran out; return advice to add to the error."""
        if self._note_failure(has_failed=True):
            return f"gpu0_bsz='auto' changes to {self.split(batch_size)[0]} now; repeat the step"
        return "gpu0_bsz='auto' keeps its split; lower the batch size"

    def state_dict(self) -> dict[str, Any] | None:
        """Return the split found so far, as a dictionary for ``load_state_dict`` of a later run.

        The values of the dictionary are numbers and lists. Before the first training batch, the
        result is None, unless ``load_state_dict`` has loaded a state.
        """
        return self.search.state_dict(self.batch_size) if self.batch_size else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start with the split in the ``state_dict()`` of an earlier run.

        Do nothing if an iteration of this run has already ended with an optimizer step.
        """
        if not self.num_iterations:
            self.search.load_state_dict(state)
            self.batch_size = state["batch_size"]


def split_policy(
    gpu0_bsz: int | Literal["auto"] | None,
    devices: Sequence[torch.device],
    device_weights: Sequence[float] | None,
) -> SplitPolicy | AutoSplit:
    """Return the ``SplitPolicy`` or ``AutoSplit`` for these arguments of ``BalancedDataParallel``.

    The result is an ``AutoSplit`` if ``gpu0_bsz`` is ``"auto"`` and there are several devices, and
    a ``SplitPolicy`` otherwise.

    Args:
        gpu0_bsz: the most samples for the first device, None for no limit, or ``"auto"``.
        devices: the devices that share a batch.
        device_weights: one number for each device, or None. With a single device, the numbers are
            ignored.

    Raises:
        ArgumentError: an argument is out of its range, or ``device_weights`` are not one number for
            each device. With ``"auto"`` and several devices, the error is also raised if a device
            has no memory statistics or is given twice.
        ArgumentTypeError: an argument has a wrong type, or ``device_weights`` is given together
            with ``"auto"``.
    """
    if gpu0_bsz == "auto" and device_weights is None:
        return AutoSplit(devices) if len(devices) > 1 else SplitPolicy(None, devices)
    if isinstance(gpu0_bsz, str):
        fact = "gpu0_bsz must be an integer, None, or 'auto' without device_weights"
        raise ArgumentTypeError(f"{fact}, got {gpu0_bsz!r}")
    # A single device gets the whole batch, so device_weights do not matter. The weights may be
    # meant for several GPUs, for example if a script for GPUs is tried out on the CPU.
    return SplitPolicy(gpu0_bsz, devices, device_weights if len(devices) > 1 else None)


_watching: weakref.WeakValueDictionary[int, AutoSplit] = weakref.WeakValueDictionary()
_register_hook = functools.cache(register_optimizer_step_post_hook)  # registers each hook once


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for split in filter(None, [reference() for reference in _watching.valuerefs()]):
        split.note_step(optimizer)
