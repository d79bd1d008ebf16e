"""Replace the classes that wrap a script's model, while ``balanced-dp run`` runs the script."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import nn

from ..errors import calling_frame
from ..parallel.data_parallel import BalancedDataParallel
from ..parallel.functional import balanced_data_parallel
from ..tuning.loop import Loop

_TORCHS: Any = nn.DataParallel


WrappedAt = tuple[str, int]
"""The file and the line in which a script wraps a model."""


@contextmanager
def replaced_data_parallel(loop: Loop) -> Iterator[list[WrappedAt]]:
    """Make a script use ``BalancedDataParallel`` and ``BalancedTrainer`` inside a ``with`` block.

    ``BalancedDataParallel`` takes the place of ``nn.DataParallel`` and of the function
    ``nn.parallel.data_parallel``. ``BalancedTrainer`` takes the place of the ``Trainer`` of
    transformers. Inside the block, ``nn.DataParallel`` is a subclass of ``BalancedDataParallel``
    with the arguments of torch's class. Instances of torch's class, too, still count as instances
    of ``nn.DataParallel``. If a script's subclass of ``nn.DataParallel`` overrides a method such as
    ``forward`` or ``scatter``, torch's class becomes the base of the subclass, because the method
    was written for torch's class. ``Trainer`` is replaced if its first import is inside the block,
    and it stays replaced after the block.

    Args:
        loop: the object that splits the batches and measures the script. If a
            ``BalancedDataParallel`` is created in the block without ``device_weights``, it is
            passed to ``loop.adopt``, even if the script itself creates it. An instance with
            ``device_weights`` is not passed, and splits its batches itself.

    Yields:
        A list of the places at which the script wraps a model. When the script wraps a model at a
        new place, the place is appended. Places at which a Trainer wraps a model, or at which a
        model is wrapped with ``device_weights``, are not in the list.
    """
    calls: list[WrappedAt] = []
    initialize = BalancedDataParallel.__init__

    @functools.wraps(initialize)
    def initialize_recorded(self: BalancedDataParallel[Any], *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if self.device_weights is None:
            loop.adopt(self)
            _, frame = calling_frame()
            call = (frame.f_code.co_filename, frame.f_lineno)
            # If a Trainer wraps the model, no line of the script does.
            if type(self).__module__ != f"{__package__}.transformers" and call not in calls:
                calls.append(call)

    function = functools.partial(balanced_data_parallel, None)
    # The attribute data_parallel of torch.nn.parallel is a function, not the module of that name,
    # so the module is looked up in sys.modules.
    file = sys.modules["torch.nn.parallel.data_parallel"]
    with ExitStack() as stack:
        for owner, name, ours in (
            (BalancedDataParallel, "__init__", initialize_recorded),
            *((module, "DataParallel", DataParallel) for module in (nn, nn.parallel, file)),
            *((module, "data_parallel", function) for module in (nn.parallel, file)),
            (sys, "meta_path", [SimpleNamespace(find_spec=_find_trainer), *sys.meta_path]),
        ):
            stack.enter_context(mock.patch.object(owner, name, ours))
        yield calls


class _Meta(type):
    """A metaclass that lets instances of torch's class count as instances of our ``DataParallel``.

    So ``isinstance(model, nn.DataParallel)`` has the same result as without the replacement.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(_TORCHS if cls is DataParallel else cls, instance)


class DataParallel(BalancedDataParallel[Any], metaclass=_Meta):
    """The replacement of ``nn.DataParallel``, with the same arguments, so without ``gpu0_bsz``."""

    __module__ = "torch.nn.parallel.data_parallel"  # where pickle looks for it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(None, *args, **kwargs)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if {"forward", "scatter", "replicate", "parallel_apply", "gather"} & set(vars(cls)):
            cls.__bases__ = tuple(_TORCHS if b is DataParallel else b for b in cls.__bases__)


def _find_trainer(name: str, path: Any, target: Any = None) -> Any:
    """Return an import spec of ``transformers.trainer`` that patches ``Trainer``.

    For any other module, return None. This function is the ``find_spec`` of a finder in
    ``sys.meta_path``. An import with this spec executes the module, and then replaces
    ``Trainer.__new__``. Let C be the class that the script calls: ``Trainer`` or a subclass of it.
    If C is ``BalancedTrainer`` or a subclass of it, the replacement of ``__new__`` returns an
    instance of C. Otherwise, it returns an instance of a class that it creates, with the name of C
    and the bases ``BalancedTrainer`` and C.
    """
    spec: Any = PathFinder.find_spec(name, path, target) if name == "transformers.trainer" else None
    if spec is None:
        return None
    execute = spec.loader.exec_module

    def execute_and_replace(module: Any) -> None:
        execute(module)
        # This import needs transformers.trainer, so it cannot be at the top of this file.
        from .transformers import BalancedTrainer

        initialize = functools.partialmethod(BalancedTrainer.__init__, gpu0_bsz=None)

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            if not issubclass(cls, BalancedTrainer):
                cls = type(cls.__name__, (BalancedTrainer, cls), {"__init__": initialize})
            return object.__new__(cls)

        module.Trainer.__new__ = new

    spec.loader.exec_module = execute_and_replace
    return spec
