"""Measure what training steps of a workload take of each device."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..devices import is_out_of_memory
from ..errors import ArgumentError, BalanceWarning
from ..parallel.auto import SplitPolicy, smallest_chunk
from ..parallel.criterion import BalancedCriterion
from ..parallel.data_parallel import BalancedDataParallel
from .measurement import Measurement, StepRecorder
from .workloads import Workload


def measure_step(
    workload: Workload,
    batch_size: int,
    gpu0_bsz: int | None,
    devices: Sequence[torch.device],
    device_weights: Sequence[float] | None = None,
    *,
    gather: bool = True,
    spread: bool = False,
) -> Measurement:
    """Train for two steps and return what the second one took.

    If memory runs out, the measurement says so, and what was allocated is freed.

    Args:
        workload: the workload to train; its model is newly made.
        batch_size: samples in the whole batch.
        gpu0_bsz: the most samples of device 0.
        devices: real or emulated devices.
        device_weights: the weight of each device, as in ``BalancedDataParallel``.
        gather: whether to gather outputs and compute their loss on device 0. Otherwise each device
            computes the loss of its chunk.
        spread: whether to spread parameters, gradients and optimizer state over all devices.

    Raises:
        ArgumentError, ArgumentTypeError: If there is no such split.
    """
    with step_meter(workload, devices, gather, spread) as meter:
        return meter.measure(batch_size, gpu0_bsz, device_weights)


@contextmanager
def step_meter(
    workload: Workload,
    devices: Sequence[torch.device],
    gather: bool = True,
    spread: bool = False,
) -> Iterator[StepMeter]:
    """Yield a ``StepMeter``, and free what it holds at the end."""
    meter = StepMeter(workload, devices, gather, spread)
    gc.freeze()  # garbage is collected after each measurement: exclude what was there before
    try:
        yield meter
    finally:
        gc.unfreeze()
        meter.close()


class StepMeter:
    """Measure training steps at several splits, with one model and one optimizer.

    Arguments are those of ``measure_step``.
    """

    def __init__(
        self, workload: Workload, devices: Sequence[torch.device], gather: bool, spread: bool
    ) -> None:
        self.workload = workload
        self.devices = list(devices)
        self.gather = gather
        self.spread = spread
        self._has_state = False

    @functools.cached_property
    def _trained(self) -> tuple[nn.Module, BalancedCriterion, torch.optim.Optimizer]:
        with torch.device(self.devices[0]):
            module = self.workload.new_model()
        module = module.to(self.devices[0])
        criterion = BalancedCriterion(copy.deepcopy(self.workload.loss)).to(self.devices[0])
        return module, criterion, self.workload.make_optimizer(module.parameters())

    def close(self) -> None:
        """Free the model and the optimizer's state; the next measurement makes them again."""
        vars(self).pop("_trained", None)
        self._has_state = False

    @property
    def smallest_chunk(self) -> int:
        """Return the smallest chunk that a replica trains on."""
        return smallest_chunk(self._trained[0])

    @property
    def precision(self) -> str | None:
        """Return the dtype of autocast as text."""
        return None if self.workload.precision is None else str(self.workload.precision)

    @property
    def num_parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(p.numel() for p in self._trained[0].parameters() if p.requires_grad)

    def measure(
        self,
        batch_size: int,
        gpu0_bsz: int | None,
        device_weights: Sequence[float] | None = None,
        *,
        num_steps: int | None = None,
        on_loss: Callable[[torch.Tensor], object] = lambda loss: None,
    ) -> Measurement:
        """Train, and return what the last step took, as ``measure_step``.

        By default one step is measured, after another one if there is no optimizer state yet.
        ``on_loss`` is called with the loss of each step.
        """
        model = None
        for _ in range(num_steps or 2 - self._has_state):
            step = StepRecorder(self.devices)
            try:
                if model is None:
                    model = BalancedDataParallel(
                        gpu0_bsz,
                        self._trained[0],
                        self.devices,
                        gather=self.gather,
                        device_weights=device_weights,
                        spread=self.spread,
                    )
                on_loss(self._train(step, model, batch_size))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                step.out_of_memory = str(error)
                step.end_phase()
                break
            self._has_state = True
        if self._has_state:
            self._trained[2].zero_grad()
        else:  # the optimizer's state may be incomplete
            self.close()
        gc.collect()  # an exception may have left cycles
        torch.get_device_module(self.devices[0]).empty_cache()
        chunk_sizes = SplitPolicy(gpu0_bsz, self.devices, device_weights).split(batch_size)
        return step.measurement(self.workload.name, gpu0_bsz, chunk_sizes)

    def _train(
        self, step: StepRecorder, model: BalancedDataParallel[nn.Module], batch_size: int
    ) -> torch.Tensor:
        """Train for one step and return the loss."""
        args, kwargs, target = self.workload.new_batch(batch_size)
        _, criterion, optimizer = self._trained
        optimizer.zero_grad()
        step.begin_phase()
        precision = self.workload.precision
        autocast = torch.autocast(self.devices[0].type, precision, enabled=precision is not None)
        with warnings.catch_warnings(), autocast:
            warnings.simplefilter("ignore", BalanceWarning)  # the even split is measured as well
            output = model(*args, **kwargs)
            if model.chunk_sizes and sum(model.chunk_sizes) != batch_size:
                raise ArgumentError(
                    f"make_batch({batch_size}) of {self.workload.name} returned "
                    f"{sum(model.chunk_sizes)} samples"
                )
            if self.gather:
                target = tree_map_only(torch.Tensor, lambda t: t.to(self.devices[0]), target)
            loss: torch.Tensor = criterion(output, target)
            if loss.dim():
                raise ArgumentError(
                    f"the loss of {self.workload.name} must be 0-dim, as the mean or the sum of "
                    f"all samples is, but has the shape {tuple(loss.shape)}"
                )
        loss.backward()
        step.end_phase(model, optimizer)
        optimizer.step()
        step.end_phase(model, optimizer)
        return loss
