"""What wraps models in a script that is not changed, replaced by what a loop splits."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..devices import Device
from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.functional import balanced_data_parallel
from ..tuning.loop import Loop

_STEPS = {"forward", "scatter", "replicate", "parallel_apply", "gather"}
_LIBRARIES = tuple(
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
_TRAINER = str(Path(__file__).with_name("transformers.py"))


WrappedAt = tuple[str, int]
"""Where a script wraps a model: the file and the line of the call."""


@contextmanager
def replaced_data_parallel(loop: Loop) -> Iterator[list[WrappedAt]]:
    """Replace ``nn.DataParallel``, ``data_parallel`` and ``Trainer`` inside a ``with`` block.

    The class keeps the arguments of ``nn.DataParallel``, and ``isinstance`` says the same as
    before. A subclass with steps of its own, such as ``forward`` or ``scatter``, stays a subclass
    of torch's class. ``loop`` splits the batches of all instances of ``BalancedDataParallel``,
    the script's own included, unless they have ``device_weights``.

    Yields:
        A list of the calls with which the script wraps models; it grows with them.
    """
    calls: list[WrappedAt] = []
    initialize = BalancedDataParallel.__init__

    @functools.wraps(initialize)
    def initialize_recorded(self: BalancedDataParallel[Any], *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self.device_weights is not None:
            return
        place = _call_of_script()
        loop.adopt(self)
        if place is not None and place not in calls:
            calls.append(place)

    data_parallel = _data_parallel_class()
    function = functools.partial(balanced_data_parallel, None)
    file = sys.modules["torch.nn.parallel.data_parallel"]  # torch.nn.parallel hides it
    with ExitStack() as stack:
        for owner, name, ours in (
            (BalancedDataParallel, "__init__", initialize_recorded),
            *((module, "DataParallel", data_parallel) for module in (nn, nn.parallel, file)),
            *((module, "data_parallel", function) for module in (nn.parallel, file)),
            (sys, "meta_path", [_TrainerFinder(), *sys.meta_path]),
        ):
            stack.enter_context(mock.patch.object(owner, name, ours))
        yield calls


def _data_parallel_class() -> Any:
    torch_class: Any = nn.DataParallel

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            if cls is DataParallel:
                return isinstance(instance, torch_class)
            return super().__instancecheck__(instance)

    class DataParallel(BalancedDataParallel[Any], metaclass=Meta):
        def __init__(
            self,
            module: nn.Module,
            device_ids: Sequence[Device] | None = None,
            output_device: Device | None = None,
            dim: int = 0,
        ) -> None:
            super().__init__(None, module, device_ids, output_device, dim)

        def __init_subclass__(cls) -> None:
            super().__init_subclass__()
            if _STEPS & set(vars(cls)):
                cls.__bases__ = tuple(
                    torch_class if base is DataParallel else base for base in cls.__bases__
                )

    # Where pickle looks for it.
    DataParallel.__module__, DataParallel.__qualname__ = torch_class.__module__, "DataParallel"
    return DataParallel


def _call_of_script() -> WrappedAt | None:
    """Return where the innermost frame that is not of a library calls; None if a Trainer does."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code.co_filename == _TRAINER:
            return None
        frame = frame.f_back
    return frame and (frame.f_code.co_filename, frame.f_lineno)


class _TrainerFinder(importlib.abc.MetaPathFinder):
    """Replaces ``Trainer`` by a ``BalancedTrainer`` where a script imports transformers."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find transformers.trainer as usual; once it is executed, the class is replaced."""
        if name != "transformers.trainer":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(_execute_trainer, loader.exec_module)
        return spec


def _execute_trainer(execute: Callable[[ModuleType], None], module: Any) -> None:
    execute(module)
    from .transformers import BalancedTrainer  # imports the class that is replaced

    original = module.Trainer

    # mypy does not know the class of a module that is being loaded.
    class Trainer(BalancedTrainer, original):  # type: ignore[misc, valid-type]
        __doc__ = original.__doc__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, gpu0_bsz=None, **kwargs)

    module.Trainer = Trainer
