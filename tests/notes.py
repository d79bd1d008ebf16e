"""What was added to an exception."""

from __future__ import annotations


def notes_of(error: BaseException) -> list[str]:
    """The notes, which Python 3.10 has as further lines of the message."""
    return getattr(error, "__notes__", str(*error.args[:1]).splitlines()[1:])
