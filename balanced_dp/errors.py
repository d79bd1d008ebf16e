"""The errors and warnings of balanced_dp.

Every error derives from ``BalancedDataParallelError`` and from a builtin error. For example, both
``except BalancedDataParallelError`` and ``except ValueError`` catch an ``ArgumentError``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType


class BalancedDataParallelError(Exception):
    """Base class of the errors of balanced_dp."""


class ArgumentError(BalancedDataParallelError, ValueError):
    """An argument has an invalid value, is missing, or conflicts with another argument.

    The message names the argument.
    """


class ArgumentTypeError(BalancedDataParallelError, TypeError):
    """An argument has the wrong type; the message names the argument and says what it must be."""


class ScatterError(BalancedDataParallelError, ValueError):
    """An input of the model cannot be split over the devices.

    The message gives the dotted path of the input in the arguments, such as ``batch.mask``. If the
    shape of a tensor is the reason, the message also gives the shape.
    """


class GatherError(BalancedDataParallelError, TypeError):
    """The replicas' outputs cannot be joined into the output of the whole batch.

    The message gives the dotted path of the part of the output that cannot be joined, such as
    ``logits.0``.
    """


class EmulationError(BalancedDataParallelError, RuntimeError):
    """An emulated device does not exist, or does not support an operation or a kind of tensor.

    The error is also raised if ``emulate_devices`` is called inside another ``emulate_devices``
    block, or if a script spawns processes.
    """


class SymbolicValueError(EmulationError):
    """A tensor's value was read, but ``emulate_devices(symbolic=True)`` computes no values."""


class ProbeError(BalancedDataParallelError, RuntimeError):
    """The memory of a device cannot be measured; the message says why."""


class InfeasiblePlanError(BalancedDataParallelError, ValueError):
    """The batch does not fit with any measured split; the message says how much memory is lacking.

    A split is the number of samples of each device.
    """


class ReportError(BalancedDataParallelError, ValueError):
    """This version of balanced_dp cannot read a file as a ``Report``; the message says why."""


class BalanceWarning(UserWarning):
    """An argument or a call has no effect, or a result might differ from that of the whole batch.

    The warning is issued in these cases:

    - ``gpu0_bsz`` is at or above the even share (the batch size divided by the number of devices,
      rounded up), so it has no effect.
    - ``torch.save(object, path)`` writes no file inside ``emulate_devices(symbolic=True)``, where
      tensors have no values.
    - An output, such as a loss, might differ from the one that would be computed from the whole
      batch at once.
    - An input might not be split as intended. For example, a list with one item for each sample is
      passed whole to each device.
    """


listeners: list[Callable[[str], object]] = []
"""Functions that get the message of each ``BalanceWarning``, even if the program ignores warnings.

``balanced-dp run`` adds such a function, to repeat the warnings below the output of a script.
"""


def warn(message: str) -> None:
    """Issue a ``BalanceWarning`` for the line of the program that called into balanced_dp.

    The warning names the innermost line of the call stack that is outside torch, contextlib and
    balanced_dp.
    """
    for listen in listeners:
        listen(message)
    level, _ = calling_frame()
    warnings.warn(message, BalanceWarning, stacklevel=level)


def calling_frame() -> tuple[int, FrameType]:
    """Return ``(level, frame)`` of the innermost call outside torch, contextlib and balanced_dp.

    If the function that calls ``calling_frame`` passes ``stacklevel=level`` to ``warnings.warn``,
    the warning names the current line of ``frame``.
    """
    internal = ("torch", "contextlib", __package__)
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").split(".")[0] in internal and frame.f_back:
        level, frame = level + 1, frame.f_back
    return level, frame


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` to ``error``, so that a traceback shows it below the error's message.

    In Python 3.10, exceptions have no notes. There, ``note`` becomes part of the message.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}",)
