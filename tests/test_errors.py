"""Test that invalid arguments raise errors, and the messages of these errors.

``tests/parallel`` tests the arguments of ``BalancedDataParallel``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    MemoryLogger,
    ProbeError,
    emulate_devices,
    memory_breakdown,
    split_batch,
    split_by_weights,
    training_devices,
)
from balanced_dp.distributed import BalancedBatchSampler, scale_loss, split_ranks
from balanced_dp.memory.units import parse_bytes

VALUE, TYPE = ArgumentError, ArgumentTypeError
NO_SIZES = "|GiB|1.GiB|.5GiB|1GBB|1 i|1EB|-1|1e3|1_000|1 2|0x10|inf|nan|\u0661GiB|1GiB1|1,5GiB"
UNITS = "a number of bytes, or a size in B, KiB, MiB, GiB or TiB, such as '11GiB'"

ranks = partial(split_ranks, 32)


def sampler(**changed: Any) -> BalancedBatchSampler:
    options = {"batch_size": 4, "chunk_sizes": (1, 3), "rank": 0, "world_size": 2, **changed}
    return BalancedBatchSampler(range(10), **options)


def opened(context: Callable[..., Any], *args: Any, **options: Any) -> None:
    with context(*args, **options):
        pass


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: split_batch(-1, 2, 2), VALUE, "batch_size must be at least 0, got -1"),
    (lambda: split_batch(8, 0, 2), VALUE, "num_devices must be at least 1, got 0"),
    (lambda: split_batch(8, 2, -3), VALUE, "gpu0_bsz must be at least 0, got -3"),
    (lambda: split_batch("2", 2, 2), TYPE, "batch_size must be an integer, got '2'"),
    (lambda: split_batch(8, True, 2), TYPE, "num_devices must be an integer, got True"),
    *(
        (partial(split_by_weights, 8, weights), VALUE, f"at least 0, not all 0, got {weights}")
        for weights in ([0, 0], [], [1, -1], [1, math.nan], [1, math.inf], [1, "two"], 5, None)
    ),
    (lambda: split_by_weights(8, [1, 0], 3), VALUE, "gpu0_bsz=3 leaves 5 samples to dev"),
    (lambda: split_by_weights(8, [1, 1], -1), VALUE, "gpu0_bsz must be at least 0, got -1"),
    (lambda: ranks(world_size=2), VALUE, "give rank0_bsz or weights"),
    (
        lambda: ranks(weights=[1, 2], world_size=3),
        VALUE,
        "world_size=3, but weights are given for 2",
    ),
    (lambda: ranks(world_size=4, rank0_bsz=-1), VALUE, "rank0_bsz must be at least 0, got -1"),
    (lambda: ranks(rank0_bsz=2), ValueError, "call init_process_group"),
    (lambda: scale_loss(torch.ones(()), 2), ValueError, "call init_process_group"),
    (lambda: sampler(world_size=None, rank=None), ValueError, "call init_process_group"),
    (lambda: sampler(rank=-1), VALUE, "rank must be from 0 to 1, got -1"),
    (lambda: sampler(batch_size=0), VALUE, "batch_size must be at least 1, got 0"),
    (lambda: sampler(chunk_sizes=(5, -1)), VALUE, "a chunk size must be at least 0, got -1"),
    (lambda: sampler(chunk_sizes=(4,)), VALUE, "2 sizes, one for each rank, with"),
    (lambda: sampler(chunk_sizes=(1, 2)), VALUE, "sum batch_size=4, got 2 sizes with the sum 3"),
    *(
        (partial(opened, devices, number), error, f"num_devices must be {message}, got {number!r}")
        for devices in (emulate_devices, training_devices)
        for number, error, message in (
            *((number, VALUE, "at least 1") for number in (0, -1)),
            *((number, TYPE, "an integer") for number in (True, 2.0, "2")),
        )
    ),
    (lambda: opened(emulate_devices, 129), VALUE, "at most 128, the limit of torch, got 129"),
    (lambda: opened(emulate_devices, 2, memory=[1, 2, 3]), VALUE, "of the 2 devices, got 3 sizes"),
    *(
        (partial(parse_bytes, x, "reserve"), VALUE, f"reserve must be {UNITS}, got {x!r}")
        for x in (*NO_SIZES.split("|"), True, None, -1)
    ),
    (lambda: MemoryLogger(None, print, 0), VALUE, "every must be at least 1, got 0"),
    (lambda: MemoryLogger(None, "runs"), TYPE, "writer must have add_scalar"),
    (lambda: memory_breakdown(nn.Linear(2, 2)), ProbeError, "model counts its memory: ['cpu']"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
