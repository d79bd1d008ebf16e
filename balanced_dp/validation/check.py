"""The outcome of a check, and the report of all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ..tuning.report_types import Provenance

SCHEMA = 1
"""The version of a report's fields."""

MAX_NOTE = 160
"""The most characters of an error in a note."""

Part = Literal["gradients", "peaks", "seconds", "communicators"]
PARTS: tuple[Part, ...] = get_args(Part)
"""The parts in the order of the report."""

Kind = Literal["devices", "one device", "emulated"]


@dataclass(frozen=True, slots=True)
class Check:
    """Record what was checked, and how it turned out.

    Attributes:
        part: the part of the validation.
        what: what was checked.
        outcome: ``"-"`` if it cannot be checked on these devices.
        value: the number that decides, except for NVML's peaks. Of gradients, the relative
            difference; of peaks, the signed difference of the prediction in percent of what was
            measured; of seconds, the ratio of ours to theirs; of communicators, bytes.
        note: more numbers, or why the outcome is not ``"ok"``.
    """

    part: Part
    what: str
    outcome: Literal["ok", "not ok", "-"]
    value: float | None = None
    note: str = ""


def guarded(part: Part, what: str, checks: Iterator[Check]) -> Iterator[Check]:
    """Yield checks; if they end with an error, yield that as the last one."""
    try:
        yield from checks
    except Exception as error:
        yield failed(part, what, error)


def judged(part: Part, what: str, value: float, note: str, is_within: bool, allowed: str) -> Check:
    """Return the check of a number that is within its limit or not; if not, the note says it."""
    if is_within:
        return Check(part, what, "ok", value, note)
    return Check(part, what, "not ok", value, f"{note}; allowed: {allowed}")


def failed(part: Part, what: str, error: Exception) -> Check:
    """Return the check that ended with an error."""
    note = textwrap.shorten(f"{type(error).__name__}: {error}", MAX_NOTE, placeholder=" ...")
    return Check(part, what, "not ok", note=note)


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Combine all checks with the devices that they ran on.

    Attributes:
        schema: the version of these fields.
        provenance: when, where and with which versions.
        kind: distinct accelerators, one that all replicas share, or emulated devices.
        description: the devices in words.
        workload: what was trained for memory and time.
        batch_size: samples in its batches.
        checks: the checks in order.
    """

    schema: int
    provenance: Provenance
    kind: Kind
    description: str
    workload: str
    batch_size: int
    checks: tuple[Check, ...]

    @property
    def gradients_are_right(self) -> bool:
        """Return whether no gradient and no output differs from that of one device."""
        return all(c.outcome == "ok" for c in self.checks if c.part == "gradients")
