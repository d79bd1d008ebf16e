"""A ``Trainer`` of Hugging Face's transformers that gives device 0 a smaller share.

``Trainer`` wraps the model in ``nn.DataParallel`` where it sees several GPUs and no launcher. Here
it takes ``BalancedDataParallel`` instead; nothing else in a script changes.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn

try:
    for package in ("transformers", "accelerate"):  # without it, Trainer's own error has no name
        importlib.import_module(package)
    from transformers import Trainer, TrainerCallback
    from transformers.training_args import ParallelMode

    from .trainer_parallel import TrainerParallel
except ImportError as error:  # the library itself needs none of these
    raise ImportError(
        f"balanced_dp.integrations.transformers needs {error.name}, which is part of the extra "
        "'hf': pip install 'balanced-dp[hf]'"
    ) from error

from ..devices import Device, default_device_type, resolve_devices
from ..emulation.machine import has_machine
from ..errors import ArgumentError
from ..memory.logger import MemoryLogger
from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.gather import ScalarOutputs


class BalancedTrainerMixin:
    """Makes a ``Trainer`` class of anybody's split each batch unevenly over the devices.

    ``class MyBalancedTrainer(BalancedTrainerMixin, MyTrainer): ...`` takes the arguments of
    ``MyTrainer`` and those below. A batch has ``per_device_train_batch_size`` samples for each
    device, as ``Trainer`` has it; at most ``gpu0_bsz`` of them go to the first. Loss and gradients
    are those of the whole batch on one device, as of any ``BalancedDataParallel``. In training
    nothing but the loss is gathered, if ``compute_loss`` is ``Trainer``'s own and needs nothing
    else. Autocast reaches the replicas.

    With one device, a model that is spread over several (``device_map``), a quantised one, or in a
    process of a distributed launch, it is the bare ``Trainer``.

    Args:
        gpu0_bsz: the most samples of a batch that the first device gets, or ``"auto"``, as of
            ``BalancedDataParallel``.
        device_ids: the devices, as of ``BalancedDataParallel``; None means those that
            ``Trainer`` would use. The model goes to the first one.
        device_weights: a share for each device, as of ``BalancedDataParallel``.
        broadcast: inputs that go whole to each device, as of ``BalancedDataParallel``.
        split: lists with an entry for each sample, as of ``BalancedDataParallel``.
        loss_weight: what the loss of a chunk weighs, as of ``BalancedDataParallel``.
        scalar_outputs: how losses join, as of ``BalancedDataParallel``.

    Raises:
        ArgumentError, ArgumentTypeError: the devices or the split cannot be used.
    """

    # Of the Trainer. It is beside this class and not above it, so that mypy does not know the
    # methods that super() finds, which the ignored "misc" errors below are.
    args: Any
    model: Any
    accelerator: Any
    label_smoother: Any
    compute_loss_func: Any
    label_names: list[str]

    def __init__(
        self,
        *args: Any,
        gpu0_bsz: int | Literal["auto"] | None,
        device_ids: Sequence[Device] | None = None,
        device_weights: Sequence[float] | None = None,
        broadcast: Iterable[str] = (),
        split: Iterable[str] = (),
        loss_weight: Callable[..., Any] | str | None = None,
        scalar_outputs: ScalarOutputs = "auto",
        **kwargs: Any,
    ) -> None:
        self._split: dict[str, Any] = {
            "gpu0_bsz": gpu0_bsz,
            "device_weights": device_weights,
            "broadcast": broadcast,
            "split": split,
            "loss_weight": loss_weight,
            "scalar_outputs": scalar_outputs,
        }
        self._parallel: TrainerParallel | None = None
        super().__init__(*args, **kwargs)
        self._devices = self._choose_devices(device_ids)
        if self._devices:
            self._use_devices()

    def _choose_devices(self, device_ids: Sequence[Device] | None) -> list[torch.device]:
        """Returns the devices to use, none for those that the Trainer has chosen."""
        trainer: Any = self
        if trainer.is_model_parallel or self.args.parallel_mode == ParallelMode.DISTRIBUTED:
            if device_ids is not None:
                raise ArgumentError(
                    "device_ids are for one process that holds the whole model on each device, but "
                    "this one is part of a distributed launch, or its model is spread over devices"
                )
            return []
        if device_ids is None and self.args.n_gpu < 2 and not has_machine():
            return []
        return resolve_devices(device_ids, default_device_type())

    def _use_devices(self) -> None:
        trainer: Any = self
        self.args = copy.copy(self.args)  # the caller may use them for another Trainer
        self.args._n_gpu = len(self._devices)
        trainer._train_batch_size = self.args.train_batch_size
        if self.args.device != self._devices[0]:
            self.args.__dict__["_setup_devices"] = self._devices[0]
            if trainer.place_model_on_device:
                trainer._move_model_to_device(self.model, self._devices[0])
        # Once, for arguments that cannot be used to say so here.
        BalancedDataParallel(
            module=nn.Identity(),
            device_ids=self._devices,
            **{**self._split, "broadcast": (), "split": ()},
        )

    @property
    def parallel_model(self) -> BalancedDataParallel[nn.Module] | None:
        """The wrapped model, None until it is first called and where nothing is wrapped."""
        return self._parallel

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns what training and evaluation call: the same wrapper for both."""
        if self._parallel is not None and model in (self._parallel, self._parallel.module):
            return self._parallel
        trainer: Any = super()
        with self._with_one_gpu():  # an nn.DataParallel would move the model to a GPU that is alone
            wrapped: nn.Module = trainer._wrap_model(model, *args, **kwargs)
        is_bare = self.accelerator.unwrap_model(model, keep_torch_compile=False) is model is wrapped
        is_quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        if self.args.n_gpu < 2 or not is_bare or is_quantized:
            return wrapped
        self._parallel = TrainerParallel(module=model, device_ids=self._devices, **self._split)
        return self._parallel

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        with self._with_one_gpu():  # else a copy for each device, or the number divided by them
            # The mixin stands before a Trainer, which has what super() is asked for in this class.
            return super()._get_num_items_in_batch(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Returns the loss of the whole batch, as ``Trainer.compute_loss``."""
        is_enough = not return_outputs and self._is_trainers("compute_loss")
        with self._with_one_gpu(), self._gathering(loss_only=is_enough):
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, **kwargs
            )

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Returns loss, logits and labels, as ``Trainer.prediction_step``."""
        is_enough = (
            prediction_loss_only
            and self._is_trainers("prediction_step")
            and self._is_trainers("compute_loss")
            and type(self).compute_loss is BalancedTrainerMixin.compute_loss
        )
        with self._gathering(loss_only=is_enough):
            return super().prediction_step(  # type: ignore[misc]
                model, inputs, prediction_loss_only, *args, **kwargs
            )

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what ``Trainer.evaluation_loop`` does; batches share a copy of the weights."""
        parallel = self._parallel
        with nullcontext() if parallel is None else parallel.shared_weights():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _is_trainers(self, name: str) -> bool:
        """Returns whether the method below this class is that of ``Trainer``, which is known."""
        method: Any = getattr(super(), name)
        return method.__func__ is getattr(Trainer, name)

    def _with_one_gpu(self) -> AbstractContextManager[object]:
        """Set ``n_gpu`` to 1, so that the Trainer does not correct for an even split."""
        return mock.patch.object(self.args, "_n_gpu", 1)

    def _gathering(self, loss_only: bool) -> AbstractContextManager[object]:
        """Leaves outputs but the loss where they are, unless the loss is made of them here."""
        needs_logits = self.label_smoother is not None or self.compute_loss_func is not None
        if self._parallel is None or needs_logits or not loss_only:
            return nullcontext()
        return mock.patch.object(self._parallel, "gathers_loss_only", True)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Returns autocast in the precision that was asked for, where the model is wrapped."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.accelerator.mixed_precision
        )
        if self._parallel is None or dtype is None:
            return super().autocast_smart_context_manager(cache_enabled)  # type: ignore[misc]
        return torch.autocast(self.args.device.type, dtype, cache_enabled=cache_enabled)


# compute_loss passes on what it does not know by name, and Trainer's names all.
class BalancedTrainer(BalancedTrainerMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with a smaller share of each batch for the first device.

    Args:
        *args: those of ``transformers.Trainer``.
        **kwargs: those of ``transformers.Trainer``, and ``gpu0_bsz``, ``device_ids``,
            ``device_weights``, ``broadcast``, ``loss_weight`` and ``scalar_outputs``, as of
            ``BalancedTrainerMixin``, which says what differs.

    Raises:
        ArgumentError, ArgumentTypeError: the devices or the split cannot be used.
    """


class MemoryCallback(TrainerCallback):
    """Logs what each device held at most, where and whenever the Trainer logs.

    ``memory/cuda:0 (gpu:3)/peak_MiB`` is the most that tensors held since the last record, one for
    each device, and ``memory/imbalance`` is (max - min) / max of them: ``MemoryLogger``'s.

    Args:
        trainer: a ``BalancedTrainer``, or any that has a ``BalancedTrainerMixin``.

    Raises:
        ProbeError: when training begins, if the devices do not count their memory.

    Examples:
        ``trainer.add_callback(MemoryCallback(trainer))``
    """

    def __init__(self, trainer: BalancedTrainerMixin) -> None:
        self._trainer: Any = trainer
        self._logger: MemoryLogger | None = None
        self._figures: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to watch the devices, if the model is on several."""
        parallel = self._trainer.parallel_model
        self._logger = None if parallel is None else MemoryLogger(parallel, self._keep, every=1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Logs the peaks if it is time to log."""
        if self._logger is not None and control.should_log:
            self._logger.step()
            self._trainer.log(dict(self._figures))
            control.should_log = True  # which that has reset

    on_epoch_end = on_step_end

    def _keep(self, tag: str, value: float, step: int) -> None:
        self._figures[tag] = value
