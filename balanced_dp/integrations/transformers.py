"""A ``Trainer`` of Hugging Face's transformers that gives device 0 a smaller chunk.

On several GPUs without a distributed launcher, ``Trainer`` wraps the model in ``nn.DataParallel``.
This one wraps it in ``BalancedDataParallel``; nothing else changes in a script.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn

try:
    from accelerate.utils import convert_to_fp32  # first: transformers' error does not name it
    from transformers import Cache, Trainer, TrainerCallback
    from transformers.training_args import ParallelMode
    from transformers.utils.generic import ModelOutput
except ImportError as error:
    raise ImportError(
        f"balanced_dp.integrations.transformers needs {error.name}, which is part of the extra "
        "'hf': pip install '.[hf]' in a clone"
    ) from error

from ..devices import Device, default_device_type, resolve_devices
from ..emulation.machine import has_machine
from ..errors import ArgumentError
from ..memory.logger import MemoryLogger
from ..parallel.auto import STATE_KEY
from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.losses.join import ChunkLosses

OPTIONS = ("broadcast", "device_weights", "loss_weight", "scalar_outputs", "split", "spread")
"""Arguments that a ``BalancedTrainer`` passes on to ``BalancedDataParallel``."""


class _TrainerParallel(BalancedDataParallel[nn.Module]):
    """A ``BalancedDataParallel`` that gathers only the outputs that ``Trainer`` needs."""

    gathers_loss_only = False
    """Whether only the loss is gathered."""

    def gather(
        self,
        outputs: Sequence[Any],
        output_device: int | torch.device,
        losses: ChunkLosses | None = None,
    ) -> Any:
        """Gather the outputs; with autocast, convert them to float32 as accelerate does."""
        selected = [_select(output, self.gathers_loss_only) for output in outputs]
        gathered = super().gather(selected, output_device, losses)
        is_autocast = torch.is_autocast_enabled(self.devices[0].type)
        return convert_to_fp32(gathered) if is_autocast else gathered


def _select(output: Any, loss_only: bool) -> Any:
    """Return the loss of an output, or all but its key-value caches, which the Trainer ignores."""
    if isinstance(output, tuple) and loss_only:
        return output[:1]
    if not isinstance(output, Mapping):
        return output
    loss_only = loss_only and "loss" in output
    cls = type(output) if isinstance(output, ModelOutput) else dict
    names = ["loss"] if loss_only else [n for n, v in output.items() if not isinstance(v, Cache)]
    return cls(**{name: output[name] for name in names})


class BalancedTrainer(Trainer):
    """A ``Trainer`` that splits each batch unevenly over the devices.

    As with ``Trainer``, a batch has ``per_device_train_batch_size`` samples times the number of
    devices; at most ``gpu0_bsz`` of them are on the first device. Loss and gradients are those of
    the whole batch on one device, as with any ``BalancedDataParallel``. In training, only the loss
    is gathered if ``compute_loss`` is ``Trainer``'s and does not need the logits. Replicas run with
    the Trainer's autocast.

    For a subclass of ``Trainer``, write ``class MyBalancedTrainer(BalancedTrainer, MyTrainer)``. It
    takes the arguments of both.

    To ``Trainer``, the devices are a single one: ``trainer.args`` has ``n_gpu`` 1 and the batch
    size of all devices. The class behaves as ``Trainer`` with one device, in a process of a
    distributed launch, and with a model that is quantized or spread over several devices
    (``device_map``).

    Args:
        *args: arguments of ``Trainer``.
        gpu0_bsz: maximum chunk size of the first device, ``"auto"`` or None, as for
            ``BalancedDataParallel``.
        device_ids: the devices, as for ``BalancedDataParallel``; None means those that
            ``Trainer`` would use. The model is moved to the first one.
        **kwargs: arguments of ``Trainer``, and ``broadcast``, ``device_weights``, ``loss_weight``,
            ``scalar_outputs``, ``split`` and ``spread`` of ``BalancedDataParallel``.

    Raises:
        ArgumentError, ArgumentTypeError: the devices or the split are invalid.
    """

    model: Any

    def __init__(
        self,
        *args: Any,
        gpu0_bsz: int | Literal["auto"] | None,
        device_ids: Sequence[Device] | None = None,
        **kwargs: Any,
    ) -> None:
        self._split = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        self._split["gpu0_bsz"] = gpu0_bsz
        self._parallel: _TrainerParallel | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(_KeepSplit(self))
        self._devices = self._choose_devices(device_ids)
        if self._devices:
            self._use_devices()

    def _choose_devices(self, device_ids: Sequence[Device] | None) -> list[torch.device]:
        """Return the devices, or an empty list to behave as ``Trainer``."""
        if self.is_model_parallel or self.args.parallel_mode == ParallelMode.DISTRIBUTED:
            if device_ids is not None:
                raise ArgumentError(
                    "leave device_ids out in a distributed launch, and with a model that is spread "
                    "over devices"
                )
            return []
        if device_ids is None and self.args.n_gpu < 2 and not has_machine():
            return []
        return resolve_devices(device_ids, default_device_type())

    def _use_devices(self) -> None:
        """Show ``Trainer`` a single device with the whole batch, so that it corrects nothing."""
        self.args = copy.copy(self.args)  # the caller may pass them to another Trainer
        self.args.per_device_train_batch_size *= len(self._devices)
        self.args.per_device_eval_batch_size *= len(self._devices)
        self.args._n_gpu = 1
        self.args.__dict__["_setup_devices"] = self._devices[0]
        self._train_batch_size = self.args.train_batch_size
        if self.place_model_on_device:
            self._move_model_to_device(self.model, self._devices[0])

    @property
    def parallel_model(self) -> BalancedDataParallel[nn.Module] | None:
        """The wrapped model, None before it is first called or if it is not wrapped."""
        return self._parallel

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model to call; training and evaluation share one wrapper."""
        if self._parallel is not None and model is self._parallel.module:
            return self._parallel
        wrapped: nn.Module = super()._wrap_model(model, *args, **kwargs)
        is_bare = self.accelerator.unwrap_model(model, keep_torch_compile=False) is model is wrapped
        is_quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        if len(self._devices) < 2 or not is_bare or is_quantized:
            return wrapped
        self._parallel = _TrainerParallel(module=model, device_ids=self._devices, **self._split)
        return self._parallel

    def compute_loss(  # type: ignore[override]  # Trainer's names each argument
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the loss of the whole batch, as ``Trainer.compute_loss``."""
        loss_only = not return_outputs and self._is_from_trainer("compute_loss")
        with self._gathering(loss_only):
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Return loss, logits and labels, as ``Trainer.prediction_step``."""
        is_plain = self._is_from_trainer("prediction_step") and self._is_from_trainer(
            "compute_loss"
        )
        with self._gathering(prediction_loss_only and is_plain):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``Trainer.evaluation_loop`` with replicas shared by all batches."""
        parallel = self._parallel
        with nullcontext() if parallel is None else parallel.shared_weights():
            return super().evaluation_loop(*args, **kwargs)

    def _is_from_trainer(self, name: str) -> bool:
        """Return whether no other class than this one overrides the method of ``Trainer``."""
        defining = {cls for cls in type(self).__mro__ if name in vars(cls)}
        return defining == {BalancedTrainer, Trainer}

    def _gathering(self, loss_only: bool) -> AbstractContextManager[object]:
        """Gather the loss only, unless the Trainer computes it from the gathered logits."""
        needs_logits = self.label_smoother is not None or self.compute_loss_func is not None
        if self._parallel is None or needs_logits or not loss_only:
            return nullcontext()
        return mock.patch.object(self._parallel, "gathers_loss_only", True)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Return a context manager for autocast in the precision of the Trainer's arguments."""
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = dtypes.get(self.accelerator.mixed_precision)
        if self._parallel is None or dtype is None:
            return super().autocast_smart_context_manager(cache_enabled)
        return torch.autocast(self.args.device.type, dtype, cache_enabled=cache_enabled)


class _KeepSplit(TrainerCallback):
    """Stores what ``gpu0_bsz="auto"`` has found in the state of the Trainer, and starts with it."""

    def __init__(self, trainer: BalancedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parallel, stored = self._trainer.parallel_model, state.stateful_callbacks.get(STATE_KEY)
        if parallel and stored:
            parallel._policy.load_state_dict(stored["attributes"], parallel.module)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parallel = self._trainer.parallel_model
        if parallel and (found := parallel._policy.state_dict()):
            state.stateful_callbacks[STATE_KEY] = {"attributes": found}


class MemoryCallback(TrainerCallback):
    """A callback that logs the peak memory of each device whenever the Trainer logs.

    The values are those of ``MemoryLogger``: ``memory/cuda:0 (gpu:3)/peak_MiB`` is the maximum
    memory occupied by tensors since the last record, one value for each device, and
    ``memory/imbalance`` is (max - min) / max of them.

    Args:
        trainer: a ``BalancedTrainer``.

    Raises:
        ProbeError: when training begins, if the devices do not count their memory.

    Examples:
        ``trainer.add_callback(MemoryCallback(trainer))``
    """

    def __init__(self, trainer: BalancedTrainer) -> None:
        self._trainer: Any = trainer
        self._logger: MemoryLogger | None = None
        self._values: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create the logger if the model is wrapped."""
        parallel = self._trainer.parallel_model
        self._logger = None if parallel is None else MemoryLogger(parallel, self._store, every=1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the peaks if the Trainer logs after this step."""
        if self._logger is not None and control.should_log:
            self._logger.step()
            self._trainer.log(dict(self._values))
            control.should_log = True  # log() has reset it

    on_epoch_end = on_step_end

    def _store(self, tag: str, value: float, step: int) -> None:
        self._values[tag] = value
