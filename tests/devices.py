"""The kinds of devices that tests run on, and a way to open some of a kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch

from balanced_dp import emulate_devices

from . import cuda_stand_in

KINDS = ["emulated", "cpu"]
if cuda_stand_in.WHY_NOT is None:
    KINDS.append("stand-in")
if torch.cuda.is_available():
    KINDS.append("cuda-repeated")
if torch.cuda.device_count() > 1:
    KINDS.append("cuda")

DISTINCT = [kind for kind in KINDS if kind in ("emulated", "stand-in", "cuda")]
"""Those in which each device has memory of its own."""


def kinds_of_splits(splits: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return every split with a repeated CPU, and the other kinds with one of the splits each.

    For what depends on the split; a kind of distinct devices has the first one and the next kinds
    those that follow.
    """
    others = [kind for kind in KINDS if kind != "cpu"]
    return [("cpu", split) for split in splits] + list(zip(others, cycle(splits), strict=False))


@contextmanager
def open_devices(kind: str, num_devices: int) -> Iterator[list[torch.device]]:
    """Give devices of a kind; a repeated one holds real replicas that share it."""
    if kind == "emulated":
        with emulate_devices(num_devices) as devices:
            yield list(devices)
    elif kind == "stand-in":
        with cuda_stand_in.opened() as stand_in:
            stand_in.nccl.refuses_threads = False  # test_on_stand_in.py asks for that
            yield [stand_in.devices[i % len(stand_in.devices)] for i in range(num_devices)]
    elif kind == "cuda":
        count = torch.cuda.device_count()
        yield [torch.device("cuda", i % count) for i in range(num_devices)]
    else:
        device = torch.device("cuda:0" if kind == "cuda-repeated" else "cpu")
        yield [device] * num_devices
