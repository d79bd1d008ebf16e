"""The errors and warnings of balanced_dp.

Every error derives from ``BalancedDataParallelError`` and from the builtin that fits it, so
that both ``except BalancedDataParallelError`` and ``except ValueError`` work.
"""

from __future__ import annotations

import sys
import warnings


class BalancedDataParallelError(Exception):
    """Base of all errors that balanced_dp raises itself."""


class ArgumentError(BalancedDataParallelError, ValueError):
    """An argument has a value that cannot be used; the message names it and what was passed."""


class ArgumentTypeError(BalancedDataParallelError, TypeError):
    """An argument has the wrong type; the message names it and what was passed."""


class ScatterError(BalancedDataParallelError, ValueError):
    """An input cannot be cut into chunks; the message names its path and its shape."""


class GatherError(BalancedDataParallelError, TypeError):
    """The replicas' outputs cannot be joined into one; the message names the path."""


class EmulationError(BalancedDataParallelError, RuntimeError):
    """Emulated devices are used where there are none, or for what they cannot do."""


class SymbolicValueError(EmulationError):
    """A value was read that ``emulate_devices(symbolic=True)`` does not compute."""


class ProbeError(BalancedDataParallelError, RuntimeError):
    """Memory cannot be measured: there is nothing to ask, or it is not clear whom."""


class InfeasiblePlanError(BalancedDataParallelError, ValueError):
    """No ``gpu0_bsz`` makes the batch fit; the message says what each device lacks."""


class DistributedError(BalancedDataParallelError, RuntimeError):
    """A rank timed out or reported no count; the message says which."""


class ReportError(BalancedDataParallelError, ValueError):
    """A file is not a report that this version reads; the message says what it is instead."""


class BalanceWarning(UserWarning):
    """The split balances nothing, or a result need not be that of the whole batch."""


class ImbalanceWarning(UserWarning):
    """The devices were filled unequally in a measured step; the message says what to change."""


def warn(message: str) -> None:
    """Gives a ``BalanceWarning`` for the user's line that led here: not torch's, nor ours."""
    internal = ("torch", "contextlib", __package__)
    level, frame = 2, sys._getframe(1)
    while frame.f_globals.get("__name__", "").split(".")[0] in internal and frame.f_back:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, BalanceWarning, stacklevel=level)
