"""Read the notes that were added to an exception."""

from __future__ import annotations


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception. In Python 3.10, they are further lines of the message."""
    return getattr(error, "__notes__", str(*error.args[:1]).splitlines()[1:])
