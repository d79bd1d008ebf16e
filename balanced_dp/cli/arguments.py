"""The arguments that several commands take, and what their text means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import ArgumentError
from ..units import parse_bytes

Target = Annotated[
    str,
    typer.Argument(help="A built-in workload, or package.module:function, or file.py:function."),
]
BatchSize = Annotated[int | None, typer.Option(help="Samples in a batch; default: the workload's.")]
NumDevices = Annotated[
    int | None,
    typer.Option("--devices", min=1, help="Number of devices; default: all GPUs, or 4 emulated."),
]
Emulate = Annotated[bool, typer.Option("--emulate", help="Emulate devices even if there are GPUs.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write JSON to FILE, or with - to stdout."),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a self-contained HTML page to FILE; - is stdout."),
]
Spread = Annotated[
    bool,
    typer.Option(
        "--spread",
        help="Only with spread=True: parameters, gradients and optimizer state on all devices.",
    ),
]
CAPACITY = "Capacity of all devices, such as 11GiB, or of each: 24GiB,11GiB. GB means GiB."
"""The help of ``--memory``."""
Reserve = Annotated[
    str | None,
    typer.Option(
        help="Memory to keep free for CUDA's context and workspaces. Default: 512MiB if the "
        "capacity is known."
    ),
]
Numeric = Annotated[
    bool,
    typer.Option(
        "--numeric",
        help="Emulate values, not shapes only: slower, for models that read values.",
    ),
]


def _parse_goal(goal: str | None) -> str | None:
    if goal is not None:
        from ..tuning.options import check_goal  # torch takes seconds to import

        check_goal(goal, "--for")
    return goal


For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="speed|headroom|batch",
        callback=_parse_goal,
        help="What the best option has: the most speed, the most free memory, or the largest "
        "batch. Default: speed, or headroom if no capacity is given.",
    ),
]
LossOnDevice = Annotated[
    bool,
    typer.Option(
        "--loss-on-device",
        help="Only with the loss on each device: gather=False and BalancedCriterion.",
    ),
]


def parse_capacities(memory: str, num_devices: int | None, default: int) -> list[int]:
    """Return the capacity of each device; ``default`` is their number if none is given."""
    sizes = memory.split(",")
    if len(sizes) > 1 and num_devices not in (None, len(sizes)):
        raise ArgumentError(f"--memory gives {len(sizes)} devices, but --devices is {num_devices}")
    if len(sizes) == 1:
        sizes *= default if num_devices is None else num_devices
    return [parse_bytes(size, "--memory") for size in sizes]


def parse_gpu0_bsz(value: str) -> int | Literal["auto"] | None:
    """Return the value of ``gpu0_bsz``; None means the even split."""
    if value == "auto":
        return "auto"
    if value != "even" and not value.isdecimal():
        raise ArgumentError(f"--gpu0-bsz must be a number, auto or even, got {value!r}")
    return None if value == "even" else int(value)


def parse_sweep(sweep: str | None) -> range:
    """Return the values of ``gpu0_bsz`` to measure."""
    if sweep is None:
        return range(0)
    first, _, last = sweep.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ArgumentError(f"--sweep must be FIRST:LAST such as 0:8, got {sweep!r}")
    return range(int(first), int(last) + 1)


STDOUT = Path("-")
"""The name of a file that means stdout."""


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Raise ArgumentError if two outputs go to one place, or a folder is missing.

    Args:
        outputs: the files by option, None for those that were not given. Other names are for what
            else uses stdout or must not be overwritten.
    """
    places: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        if path != STDOUT and path.is_dir():
            raise ArgumentError(f"{path} is a folder; name a file")
        if not path.absolute().parent.is_dir():
            raise ArgumentError(f"{path}: there is no folder {path.absolute().parent}")
        place = path if path == STDOUT else path.resolve()
        other = places.setdefault(place, option)
        if other != option:
            name = "stdout" if path == STDOUT else path
            raise ArgumentError(f"{other} and {option} are both {name}; name another file for one")
