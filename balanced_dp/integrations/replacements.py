"""``nn.DataParallel`` and ``Trainer`` of a script that is not changed, replaced by ours."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from ..devices import Device
from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.functional import evaluate_once
from ..tuning.loop_recorder import LoopRecorder

_STEPS = {"forward", "scatter", "replicate", "parallel_apply", "gather"}
_LIBRARIES = tuple(
    f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


@dataclass(frozen=True, slots=True)
class WrappedAt:
    """Where a script wraps a model: the file and the line of the call."""

    filename: str
    line_number: int


@contextmanager
def replaced_data_parallel(recorder: LoopRecorder) -> Iterator[list[WrappedAt]]:
    """Replace ``nn.DataParallel``, ``data_parallel`` and ``Trainer`` inside a ``with`` block.

    The class keeps the arguments of ``nn.DataParallel``, and ``isinstance`` says the same as
    before. ``recorder`` splits the batches of its instances. A subclass with steps of its own, such
    as ``forward`` or ``scatter``, stays a subclass of torch's class.

    Yields:
        A list of the calls with which the script wraps models; it grows with them.
    """
    calls: list[WrappedAt] = []
    data_parallel = _data_parallel_class(recorder, calls)

    function = functools.partial(evaluate_once, data_parallel)
    file = sys.modules["torch.nn.parallel.data_parallel"]  # torch.nn.parallel hides it
    finder = _TrainerFinder(recorder)
    with ExitStack() as stack:
        for module in (nn, nn.parallel, file):
            stack.enter_context(mock.patch.object(module, "DataParallel", data_parallel))
        for module in (nn.parallel, file):
            stack.enter_context(mock.patch.object(module, "data_parallel", function))
        stack.enter_context(mock.patch.object(sys, "meta_path", [finder, *sys.meta_path]))
        yield calls


def _data_parallel_class(recorder: LoopRecorder, calls: list[WrappedAt]) -> Any:
    torch_class: Any = nn.DataParallel
    recorder_of_block = weakref.ref(recorder)  # Python 3.13 without its lock never frees a class

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
            if output_device == -1:  # torch's name for the CPU
                output_device = "cpu"
            super().__init__(0, module, device_ids, output_device, dim)
            current = recorder_of_block()
            if current is not None:
                current.adopt(self)
            place = _call_of_script()
            if place is not None and place not in calls:
                calls.append(place)

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
    """Return where the innermost frame that is not of a library calls."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame and WrappedAt(frame.f_code.co_filename, frame.f_lineno)


class _TrainerFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces ``Trainer`` by a ``BalancedTrainer`` where a script imports transformers."""

    def __init__(self, recorder: LoopRecorder) -> None:
        self.recorder = recorder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find transformers.trainer as usual, to be loaded by this object."""
        if name != "transformers.trainer":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            self._loader: Any = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Leave it to the usual loader."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then replace the class."""
        self._loader.exec_module(module)
        from .transformers import BalancedTrainerMixin  # imports the class that is replaced

        recorder, original = self.recorder, module.Trainer

        # mypy knows neither this base class nor the attributes of a module that is being loaded.
        class Trainer(BalancedTrainerMixin, original):  # type: ignore[misc, valid-type]
            __doc__ = original.__doc__

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, gpu0_bsz=0, **kwargs)

            def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
                wrapped = super()._wrap_model(model, *args, **kwargs)
                if isinstance(wrapped, BalancedDataParallel):
                    recorder.adopt(wrapped)
                return wrapped

        module.Trainer = Trainer  # type: ignore[attr-defined]
