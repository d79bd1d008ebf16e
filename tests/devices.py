"""The kinds of devices that tests run on, and a function that opens devices of a kind."""

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
"""The kinds whose devices are distinct, so that each device has memory of its own."""


def kinds_of_splits(splits: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return pairs of a kind of devices and a split, to parametrize tests that depend on the split.

    The kind ``"cpu"`` is paired with every split. Each other kind is paired with one split: the
    first other kind with the first split, the second with the second, and so on.
    """
    others = [kind for kind in KINDS if kind != "cpu"]
    return [("cpu", split) for split in splits] + list(zip(others, cycle(splits), strict=False))


@contextmanager
def open_devices(kind: str, num_devices: int) -> Iterator[list[torch.device]]:
    """Yield a list of ``num_devices`` devices of a kind.

    If the kind has fewer devices, some of them are repeated. The replicas on a repeated device are
    separate, but share its memory.
    """
    if kind == "emulated":
        with emulate_devices(num_devices) as devices:
            yield list(devices)
    elif kind == "stand-in":
        with cuda_stand_in.opened() as stand_in:
            stand_in.nccl.refuses_threads = False  # True only in tests with the fixture stand_in
            yield [stand_in.devices[i % len(stand_in.devices)] for i in range(num_devices)]
    elif kind == "cuda":
        count = torch.cuda.device_count()
        yield [torch.device("cuda", i % count) for i in range(num_devices)]
    else:
        device = torch.device("cuda:0" if kind == "cuda-repeated" else "cpu")
        yield [device] * num_devices
