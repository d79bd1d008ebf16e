"""Train a workload for a few steps, and measure the memory of each device.

A workload is a model with its batches, its loss and its optimizer.
"""

from __future__ import annotations

import copy
import functools
import gc
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..errors import ArgumentError, BalanceWarning
from ..memory.breakdown import memory_breakdown
from ..memory.out_of_memory import is_out_of_memory, num_ooms, which_ran_out
from ..memory.peaks import Peaks
from ..parallel.auto import SplitPolicy, smallest_chunk
from ..parallel.criterion import BalancedCriterion
from ..parallel.data_parallel import BalancedDataParallel
from ..search import Split
from .options import Option, arguments_of
from .workload import Batch, Workload


def measure_step(
    workload: Workload,
    batch_size: int,
    gpu0_bsz: int | None,
    devices: Sequence[torch.device],
    **options: Any,
) -> Option:
    """Train a new model of ``workload`` for a few steps, and return the last step's measurement.

    Args:
        workload: the workload to train.
        batch_size: the number of samples in the whole batch.
        gpu0_bsz: the most samples that device 0 gets; None means the even split.
        devices: real or emulated devices.
        **options: keyword arguments of ``StepMeter.measure``. By default there are two steps.
    """
    with StepMeter(workload, devices) as meter:
        return meter.measure(SplitPolicy(gpu0_bsz, devices).split(batch_size), **options)


class StepMeter:
    """Measure training steps of one model and one optimizer with several splits of the batch.

    A split is the number of samples of each device. This class is a context manager. At the end of
    the ``with`` block, the model and the optimizer are freed. Inside the ``with`` block, Python's
    garbage collector runs only between measurements. So all measurements begin without garbage, and
    none is interrupted by the collector.

    Args:
        workload: the workload to train. If ``workload.model`` is a module, a copy of it is trained.
        devices: real or emulated devices.
    """

    def __init__(self, workload: Workload, devices: Sequence[torch.device]) -> None:
        self.workload = workload
        self.devices = list(devices)
        self._spread = False
        self._has_state = False

    def __enter__(self) -> StepMeter:
        self._collects = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()
        gc.unfreeze()
        self._free()

    @functools.cached_property
    def _trained(self) -> tuple[nn.Module, BalancedCriterion, torch.optim.Optimizer]:
        with torch.device(self.devices[0]):
            module = self.workload.new_model()
        module = module.to(self.devices[0])
        criterion = BalancedCriterion(copy.deepcopy(self.workload.loss)).to(self.devices[0])
        return module, criterion, self.workload.make_optimizer(module.parameters())

    def _free(self) -> None:
        """Free the model and the optimizer's state; the next measurement creates them again."""
        vars(self).pop("_trained", None)
        self._has_state = False

    @property
    def smallest_chunk(self) -> int:
        """The fewest samples that a model's replica can train on, such as 2 with batch norm."""
        return smallest_chunk(self._trained[0])

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters that require gradients."""
        return sum(p.numel() for p in self._trained[0].parameters() if p.requires_grad)

    def measure(
        self,
        chunk_sizes: Split,
        *,
        gather: bool = True,
        spread: bool = False,
        num_steps: int | None = None,
        on_loss: Callable[[torch.Tensor], object] = lambda loss: None,
    ) -> Option:
        """Train for a few steps, and return the measurement of the last step.

        If memory runs out, no exception is raised. Instead, the returned option contains the
        error's message as ``out_of_memory``, and the memory of the step is freed.

        Args:
            chunk_sizes: the number of samples of each device.
            gather: whether to gather outputs and compute their loss on device 0. Otherwise each
                device computes the loss of its own samples.
            spread: whether to spread parameters, gradients and optimizer state over all devices. If
                ``spread`` is not the same as in the previous measurement, a new model is created.
            num_steps: the number of training steps. None means one step, or two steps if the
                optimizer has no state yet.
            on_loss: a function that is called with the loss of each step.
        """
        if spread != self._spread:
            self._free()
            self._spread = spread
            gc.collect()
        gc.freeze()  # so that the collector visits only objects of this measurement
        arguments = {"gather": gather, "spread": spread, **arguments_of(chunk_sizes)}
        out_of_memory, index, peaks, seconds = None, None, Peaks(self.devices), 0.0
        breakdown: dict[str, dict[str, int]] = {}
        before, model = num_ooms(self.devices), None
        try:
            model = BalancedDataParallel(
                module=self._trained[0], device_ids=self.devices, **arguments
            )
            for _ in range(num_steps or 2 - self._has_state):
                batch = self.workload.new_batch(sum(chunk_sizes))
                self._trained[2].zero_grad()
                peaks, start = Peaks(self.devices), time.perf_counter()
                on_loss(self._train(model, sum(chunk_sizes), batch))
                for device in self.devices:
                    torch.get_device_module(device).synchronize(device)
                self._has_state = True
            seconds = time.perf_counter() - start
            breakdown = memory_breakdown(model, self._trained[2])
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            out_of_memory, index = str(error), which_ran_out(self.devices, before)
        if self._has_state:
            self._trained[2].zero_grad()
        else:  # the optimizer's state may be incomplete
            self._free()
        model = None
        gc.collect()  # an exception may have left reference cycles
        torch.get_device_module(self.devices[0]).empty_cache()
        return Option(
            **arguments,
            chunk_sizes=chunk_sizes,
            peak_bytes=tuple(peaks.of(device)[0] for device in self.devices),  # devices may repeat
            uses=tuple(breakdown.get(str(device), {}) for device in self.devices),
            seconds=seconds,
            out_of_memory=out_of_memory,
            ran_out=index,
        )

    def _train(
        self, model: BalancedDataParallel[nn.Module], batch_size: int, batch: Batch
    ) -> torch.Tensor:
        """Train ``model`` for one step on ``batch``, and return the loss."""
        args, kwargs, target = batch
        _, criterion, optimizer = self._trained
        precision = self.workload.precision
        autocast = torch.autocast(self.devices[0].type, precision, enabled=precision is not None)
        with warnings.catch_warnings(), autocast:
            warnings.simplefilter("ignore", BalanceWarning)  # an even split is no mistake here
            output = model(*args, **kwargs)
            if model.chunk_sizes and sum(model.chunk_sizes) != batch_size:
                raise ArgumentError(
                    f"make_batch({batch_size}) of {self.workload.name} returned "
                    f"{sum(model.chunk_sizes)} samples; it must return {batch_size}"
                )
            if model.gathers_outputs:
                target = tree_map_only(torch.Tensor, lambda t: t.to(self.devices[0]), target)
            loss: torch.Tensor = criterion(output, target)
            if loss.dim():
                raise ArgumentError(
                    f"the loss of {self.workload.name} must be 0-dim, such as the mean or the sum "
                    f"over all samples, but has the shape {tuple(loss.shape)}"
                )
        loss.backward()
        optimizer.step()
        return loss
