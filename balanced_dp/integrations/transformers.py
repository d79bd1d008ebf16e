"""A ``Trainer`` of Hugging Face's transformers that gives the first device fewer samples.

On several GPUs without a distributed launcher, ``Trainer`` wraps the model in ``nn.DataParallel``.
``BalancedTrainer`` wraps the model in ``BalancedDataParallel`` instead. The rest of a script need
not be changed.
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
    from accelerate.utils import convert_to_fp32  # first, so that an error names accelerate
    from transformers import Cache, Trainer, TrainerCallback, TrainingArguments
    from transformers.training_args import ParallelMode
    from transformers.utils.generic import ModelOutput
except ImportError as error:
    raise ImportError(f"{__name__} needs {error.name}: pip install '.[hf]' in a clone") from error

from ..devices import Device, resolve_devices
from ..emulation.machine import has_machine
from ..errors import ArgumentError
from ..memory.peaks import MemoryLogger
from ..parallel.auto import STATE_KEY
from ..parallel.data_parallel import BalancedDataParallel

OPTIONS = ("broadcast", "device_weights", "loss_weight", "scalar_outputs", "split", "spread")
"""Arguments that a ``BalancedTrainer`` passes on to ``BalancedDataParallel``."""

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The autocast dtype for the values "bf16" and "fp16" of accelerate's ``mixed_precision``."""


class _TrainerParallel(BalancedDataParallel[nn.Module]):
    """A ``BalancedDataParallel`` that gathers only the outputs that ``Trainer`` needs."""

    gathers_loss_only = False
    """Whether ``gather`` joins only the loss, and leaves out the other outputs.

    If an output contains no loss, only its key-value caches are left out.
    """

    autocast_dtype: torch.dtype | None = None
    """The dtype of autocast, or None to leave autocast as it is."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model under autocast, and return its outputs converted to float32.

        This is what Accelerate does with models that it prepares. If ``autocast_dtype`` is None,
        run the model as ``BalancedDataParallel`` does, and convert nothing.
        """
        if self.autocast_dtype is None:
            return super().forward(*inputs, **kwargs)
        with torch.autocast(self.devices[0].type, self.autocast_dtype):
            return convert_to_fp32(super().forward(*inputs, **kwargs))

    def gather(self, outputs: Sequence[Any], output_device: int | torch.device) -> Any:
        """Return the outputs that ``Trainer`` needs, joined on ``output_device``."""
        return super().gather([*map(self._select, outputs)], output_device)

    def _select(self, output: Any) -> Any:
        """Return the part of a replica's output that ``Trainer`` needs.

        If ``gathers_loss_only`` is True, the part is the loss: the entry "loss" of a mapping, or
        the first item of a tuple. In all other cases, the part is the whole output, but without
        the key-value caches of a mapping, because ``Trainer`` ignores them.
        """
        if isinstance(output, Mapping):
            names = [name for name in output if not isinstance(output[name], Cache)]
            names = ["loss"] if self.gathers_loss_only and "loss" in output else names
            cls = type(output) if isinstance(output, ModelOutput) else dict
            return cls(**{name: output[name] for name in names})
        return output[:1] if self.gathers_loss_only and isinstance(output, tuple) else output


class BalancedTrainer(Trainer):
    """A ``Trainer`` that splits each batch unevenly over the devices.

    As with ``Trainer``, the number of samples in a batch is ``per_device_train_batch_size`` times
    the number of devices. At most ``gpu0_bsz`` of the samples are on the first device. Loss and
    gradients are those of the whole batch on one device, as with any ``BalancedDataParallel``. In
    training, and in an evaluation that needs only the loss, only the loss of each device is
    gathered. The other outputs are gathered, too, in these cases:

    - A subclass overrides ``compute_loss``.
    - In an evaluation: a subclass overrides ``prediction_step``.
    - ``Trainer`` computes the loss from the outputs, with a ``compute_loss_func`` or a
      ``label_smoothing_factor``.

    If the Trainer uses the mixed precision ``"bf16"`` or ``"fp16"``, the replicas run under
    autocast.

    For a subclass ``MyTrainer`` of ``Trainer``, write ``class MyBalancedTrainer(BalancedTrainer,
    MyTrainer)``. ``MyBalancedTrainer`` takes the arguments of both of its bases.

    The code of ``Trainer`` sees a single device: in ``trainer.args``, ``n_gpu`` is 1, and
    ``per_device_train_batch_size`` and ``per_device_eval_batch_size`` are the given values times
    the number of devices.

    The class behaves as ``Trainer`` in these cases:

    - There is only one device.
    - The launch is distributed.
    - The model is compiled, quantized or spread over several devices (``device_map``).

    Args:
        *args: arguments of ``Trainer``.
        gpu0_bsz: the most samples of a batch that the first device gets, or ``"auto"`` or None, as
            for ``BalancedDataParallel``.
        device_ids: the devices, as for ``BalancedDataParallel``; None means the devices that
            ``Trainer`` would use. The model is moved to the first device.
        **kwargs: arguments of ``Trainer``, and ``broadcast``, ``device_weights``, ``loss_weight``,
            ``scalar_outputs``, ``split`` and ``spread`` of ``BalancedDataParallel``.

    Attributes:
        parallel_model: the ``BalancedDataParallel`` that wraps the model. It is None before
            ``Trainer`` first wraps its model, and always None if the class behaves as ``Trainer``.

    Raises:
        ArgumentError, ArgumentTypeError: ``device_ids`` or an argument of ``BalancedDataParallel``
            is invalid, or ``device_ids`` is given in a distributed launch or with a ``device_map``.
            The constructor checks ``device_ids``. All other arguments of ``BalancedDataParallel``
            are checked when ``Trainer`` first wraps its model, for example when training begins.
    """

    model: Any

    def __init__(
        self,
        *args: Any,
        gpu0_bsz: int | Literal["auto"] | None,
        device_ids: Sequence[Device] | None = None,
        **kwargs: Any,
    ) -> None:
        self._wrapping: dict[str, Any] = {"gpu0_bsz": gpu0_bsz, "device_ids": []}
        self._wrapping |= {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        self.parallel_model: _TrainerParallel | None = None
        # Trainers of TRL refuse several GPUs, because nn.DataParallel cannot run their models. So a
        # trainer sees a single GPU while it is created.
        with mock.patch.object(TrainingArguments, "n_gpu", 1):
            super().__init__(*args, **kwargs)
        self.add_callback(_KeepSplit(self))
        if not self.is_model_parallel and self.args.parallel_mode != ParallelMode.DISTRIBUTED:
            if device_ids is not None or self.args.n_gpu > 1 or has_machine():
                self._use(resolve_devices(device_ids))
        elif device_ids is not None:
            raise ArgumentError("omit device_ids in a distributed launch or with a device_map")

    def _use(self, devices: list[torch.device]) -> None:
        """Let ``Trainer`` see a single device that gets the whole batch.

        If ``args.n_gpu`` were above 1, ``Trainer`` would rescale losses for ``nn.DataParallel``.

        Args:
            devices: the devices over which each batch is split.
        """
        self._wrapping["device_ids"] = devices
        self.args = copy.copy(self.args)  # the caller may pass them to another Trainer
        self.args.per_device_train_batch_size *= len(devices)
        self.args.per_device_eval_batch_size *= len(devices)
        self.args._n_gpu = 1
        self.args.__dict__["_setup_devices"] = devices[0]
        self._train_batch_size = self.args.train_batch_size
        if self.place_model_on_device:
            self._move_model_to_device(self.model, devices[0])

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the model that ``Trainer`` calls, wrapped in ``BalancedDataParallel`` if possible.

        Training and evaluation use the same wrapper.
        """
        if self.parallel_model is not None and model is self.parallel_model.module:
            return self.parallel_model
        wrapped: nn.Module = super()._wrap_model(model, *args, **kwargs)
        is_bare = self.accelerator.unwrap_model(model, keep_torch_compile=False) is model is wrapped
        is_quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        if len(self._wrapping["device_ids"]) < 2 or not is_bare or is_quantized:
            return wrapped
        self.parallel_model = _TrainerParallel(module=model, **self._wrapping)
        self.parallel_model.autocast_dtype = AUTOCAST_DTYPES.get(self.accelerator.mixed_precision)
        return self.parallel_model

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the whole batch, as ``Trainer.compute_loss`` does."""
        returns_outputs = args[0] if args else kwargs.get("return_outputs")
        with self._gathering(not returns_outputs, {"compute_loss"}):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``Trainer.evaluation_loop``, with weights copied to the devices only once."""
        model = self._wrap_model(self.model, training=False)
        shared = model.shared_weights() if isinstance(model, _TrainerParallel) else nullcontext()
        loss_only = bool(kwargs.get("prediction_loss_only"))
        with self._gathering(loss_only, {"compute_loss", "prediction_step"}), shared:
            return super().evaluation_loop(*args, **kwargs)

    def _gathering(self, loss_only: bool, methods: set[str]) -> AbstractContextManager[object]:
        """Return a context manager that gathers only the loss, if no other output is needed.

        Other outputs are needed if ``loss_only`` is False, if a subclass overrides one of
        ``methods``, or if the user has given a ``compute_loss_func``.

        Args:
            loss_only: whether the caller needs only the loss.
            methods: the names of the ``Trainer`` methods that see the model's outputs.
        """
        owners = [cls for cls in type(self).__mro__ if methods & set(vars(cls))]
        is_plain = owners == [BalancedTrainer, Trainer] and self.compute_loss_func is None
        if self.parallel_model and loss_only and is_plain:
            return mock.patch.object(self.parallel_model, "gathers_loss_only", True)
        return nullcontext()


class _Callback(TrainerCallback):
    """A callback that reads the ``parallel_model`` of a ``BalancedTrainer``."""

    def __init__(self, trainer: BalancedTrainer) -> None:
        self._trainer: Any = trainer


class _KeepSplit(_Callback):
    """A callback that stores in the Trainer's state how far the search of ``"auto"`` has come.

    After each step, the callback saves all values that the search needs, such as ``gpu0_bsz`` and
    the size of the largest batch so far. When training begins, the callback loads these values from
    the Trainer's state.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parallel, stored = self._trainer.parallel_model, state.stateful_callbacks.get(STATE_KEY)
        if parallel and stored:
            parallel._policy.load_state_dict(stored["attributes"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parallel = self._trainer.parallel_model
        if parallel and (found := parallel._policy.state_dict()):
            state.stateful_callbacks[STATE_KEY] = {"attributes": found}


class MemoryCallback(_Callback):
    """A callback that logs the peak memory of each device whenever the Trainer logs.

    The values are those of ``MemoryLogger``. There is one peak for each device. For example,
    ``memory/cuda:0 (gpu:3)/peak_MiB`` is the maximum memory that tensors have occupied on
    ``cuda:0`` since the peaks were last logged. Here, ``gpu:3`` is the name of ``cuda:0`` in NVML.
    ``memory/imbalance`` is (max - min) / max of the peaks of all devices.

    Args:
        trainer: a ``BalancedTrainer``.

    Raises:
        ProbeError: torch has no memory statistics for a device of the model. This is raised when
            training begins.

    Examples:
        ``trainer.add_callback(MemoryCallback(trainer))``
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Create a ``MemoryLogger`` if the model is wrapped in ``BalancedDataParallel``."""
        self._values: dict[str, float] = {}
        parallel = self._trainer.parallel_model
        self._logger = parallel and MemoryLogger(parallel, self._store, every=1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the peak memory of each device if the Trainer logs after this step."""
        if self._logger and control.should_log:
            self._logger.step()
            self._trainer.log(dict(self._values))
            control.should_log = True  # log() has reset it

    on_epoch_end = on_step_end

    def _store(self, tag: str, value: float, step: int) -> None:
        self._values[tag] = value
