"""Conversion between numbers of bytes and text such as ``"11GiB"``."""

from __future__ import annotations

import re
from fractions import Fraction

from ..errors import ArgumentError

_PREFIXES = "BKMGT"
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT](?:I?B)?|B)?\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(size: int | str, argument: str = "memory") -> int:
    """Return the number of bytes of a size such as ``"11GiB"``.

    Args:
        size: an integer in bytes, or text such as ``"11GiB"``, ``"512 MiB"``, ``"1.5g"`` or
            ``"4096"`` (bytes). Units are binary, as the sizes of GPUs are: ``"11G"``, ``"11GB"``
            and ``"11GiB"`` are all 11 * 1024**3 bytes.
        argument: the name of the argument in error messages, such as ``--memory``.

    Raises:
        ArgumentError: ``size`` cannot be parsed, or is text such as ``"11"``: a number below 1024
            without a unit, which is probably a mistake. ``"0"`` and the int 11 are allowed.
    """
    match = _TEXT.fullmatch(str(size))
    if match is None:
        raise ArgumentError(
            f"{argument} must be a number of bytes, or a size in B, KiB, MiB, GiB or TiB, such as "
            f"'11GiB', got {size!r}"
        )
    factor = 1 << 10 * _PREFIXES.index((match[2] or "B")[0].upper())
    number = Fraction(match[1]) * factor
    if not isinstance(size, int) and not match[2] and 0 < number < 1024:
        raise ArgumentError(
            f"{argument} is {size!r}, which is {match[1]} bytes; did you mean {match[1]}GiB?"
        )
    return round(number)


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text, such as ``"3.34 MiB"``.

    The unit is the largest binary unit that is not larger than the number.

    Examples:
        >>> format_bytes(11 * 2**30), format_bytes(3_500_000), format_bytes(512)
        ('11.00 GiB', '3.34 MiB', '512 B')
    """
    factor, unit = byte_scale(num_bytes)
    return f"{num_bytes / factor:.2f} {unit}" if factor > 1 else f"{num_bytes:.0f} B"


def byte_scale(largest: float) -> tuple[int, str]:
    """Choose a binary unit for a number of bytes; return the unit's size in bytes and its name.

    The unit is the largest one that is not larger than ``largest`` bytes. For example,
    ``byte_scale(3000)`` is ``(1024, "KiB")``. If ``largest`` is below 1024, the unit is the byte.
    """
    power = max((n for n in range(1, 5) if abs(largest) >= 1 << 10 * n), default=0)
    return 1 << 10 * power, f"{_PREFIXES[power]}iB" if power else "B"
