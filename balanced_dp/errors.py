"""The errors and warnings of balanced_dp.

Every error derives from ``BalancedDataParallelError`` and from a builtin error, so that both
``except BalancedDataParallelError`` and ``except ValueError`` work.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType


class BalancedDataParallelError(Exception):
    """Base class of the errors of balanced_dp."""


class ArgumentError(BalancedDataParallelError, ValueError):
    """An argument has an invalid value; the message names the argument and the value."""


class ArgumentTypeError(BalancedDataParallelError, TypeError):
    """An argument has the wrong type; the message names the argument and the value."""


class ScatterError(BalancedDataParallelError, ValueError):
    """An input cannot be split into chunks; the message names its path and its shape."""


class GatherError(BalancedDataParallelError, TypeError):
    """The replicas' outputs cannot be gathered; the message names the path of the output."""


class EmulationError(BalancedDataParallelError, RuntimeError):
    """An emulated device does not exist, or does not support the operation."""


class SymbolicValueError(EmulationError):
    """A value was read that ``emulate_devices(symbolic=True)`` does not compute."""


class ProbeError(BalancedDataParallelError, RuntimeError):
    """Memory cannot be measured; the message says why."""


class InfeasiblePlanError(BalancedDataParallelError, ValueError):
    """No ``gpu0_bsz`` makes the batch fit; the message says how much each device lacks."""


class ReportError(BalancedDataParallelError, ValueError):
    """A file is not a report that this version can read; the message says why."""


class BalanceWarning(UserWarning):
    """A split or save has no effect, or a result may differ from the whole batch's."""


def warn(message: str) -> None:
    """Issue a ``BalanceWarning`` for the innermost line outside of torch and balanced_dp."""
    level, _ = calling_frame()
    warnings.warn(message, BalanceWarning, stacklevel=level)


def calling_frame() -> tuple[int, FrameType]:
    """Return the stack level and the frame of the innermost call outside torch and balanced_dp."""
    internal = ("torch", "contextlib", __package__)
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").split(".")[0] in internal and frame.f_back:
        level, frame = level + 1, frame.f_back
    return level, frame


def add_note(error: BaseException, note: str) -> None:
    """Add ``note`` to the traceback of ``error``."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}",)
