"""Options and arguments that several commands of ``balanced-dp`` share, and their parsers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ..errors import ArgumentError
from ..memory.units import parse_bytes

TARGET = Argument(help="A built-in workload, or package.module:function, or file.py:function.")
NumDevices = Annotated[int | None, Option("--devices", min=2, help="Default: all GPUs, or 4.")]
Emulate = Annotated[bool, Option("--emulate", help="Emulate devices even if there are GPUs.")]
Memory = Annotated[
    str | None, Option(help="Capacity of each device, or a list: 24GiB,11GiB. 1GB is 1GiB.")
]
Reserve = Annotated[str | None, Option(help="Memory of each GPU to keep free; default: 1GiB.")]
GOAL = Option("--for", help="Goal; default: speed, or headroom if no capacity is known.")
JsonFile = Annotated[Path | None, Option("--json", metavar="FILE", help="Write JSON; - is stdout.")]
Html = Annotated[Path | None, Option(metavar="FILE", help="Write an HTML page; - is stdout.")]
Markdown = Annotated[Path | None, Option(metavar="FILE", help="Write Markdown; - is stdout.")]


def parse_capacities(
    memory: str | None, num_devices: int | None, emulate: bool
) -> list[int] | None:
    """Return the capacity of each device in bytes; None if ``memory`` is None.

    Args:
        memory: the value of ``--memory``: one size for all devices, or a list with a size for each
            device, separated by commas.
        num_devices: the value of ``--devices``, or None for the default: all GPUs if there are two
            or more, otherwise four emulated devices. A single size in ``memory`` is repeated for
            each of these devices.
        emulate: whether to emulate devices even if there are GPUs.

    Raises:
        ArgumentError: If a size cannot be parsed, or the number of sizes in a list is not
            ``num_devices``.
    """
    from ..emulation.fallback import accelerators

    if memory is None:
        return None
    sizes = memory.split(",")
    if len(sizes) > 1 and num_devices not in (None, len(sizes)):
        fact = f"--memory has {len(sizes)} sizes, but --devices is {num_devices}"
        raise ArgumentError(f"{fact}; leave --devices out, or give one size for all devices")
    if len(sizes) == 1:
        sizes *= num_devices or len(accelerators(emulate=emulate)) or 4
    return [parse_bytes(size, "--memory") for size in sizes]


def parse_reserve(reserve: str | None) -> int | None:
    """Return the value of ``--reserve`` in bytes; None if ``reserve`` is None."""
    return None if reserve is None else parse_bytes(reserve, "--reserve")


def parse_gpu0_bsz(value: str) -> int | Literal["auto"] | None:
    """Return the value of ``--gpu0-bsz``: ``"auto"``, an integer, or None for ``"even"``."""
    if value == "auto":
        return "auto"
    if value != "even" and not value.isdecimal():
        raise ArgumentError(f"--gpu0-bsz must be 0 or more, auto or even, got {value!r}")
    return None if value == "even" else int(value)


def parse_sweep(sweep: str | None) -> range:
    """Return the values of ``gpu0_bsz`` that ``--sweep FIRST:LAST`` names, LAST included.

    If ``sweep`` is None, return no values.
    """
    if sweep is None:
        return range(0)
    first, _, last = sweep.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ArgumentError(f"--sweep must be FIRST:LAST, the lower first: 0:8, not {sweep!r}")
    return range(int(first), int(last) + 1)


STDOUT = Path("-")
"""The file name that stands for stdout."""


def check_outputs(*outputs: Path | None) -> None:
    """Check that the outputs of a command go to different places, and that their folders exist.

    None stands for an output that the user did not ask for.

    Raises:
        ArgumentError: If two outputs go to the same place (a file or stdout), or a path is a
            folder, or the folder of a path does not exist.
    """
    places = [path if path == STDOUT else path.resolve() for path in outputs if path is not None]
    for place in places:
        if places.count(place) > 1:
            raise ArgumentError(f"{place} is named twice; name two different files")
        if place != STDOUT and (place.is_dir() or not place.parent.is_dir()):
            why = "it is a folder" if place.is_dir() else f"there is no folder {place.parent}"
            raise ArgumentError(f"{place} cannot be written: {why}")
