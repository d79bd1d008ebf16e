"""Measure training steps of two ranks with and without ``scale_loss``.

``test_ranks.py`` runs this script by torchrun.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from balanced_dp.distributed import count_all_ranks, scale_loss, split_ranks
from balanced_dp.tuning.models import TokenTransformer

ROUNDS = 120


def in_turns(steps: dict[str, Callable[[], Any]], reset: Callable[[], Any]) -> list[list[float]]:
    """Return a list for each of ``steps``, with the seconds that the step took in each round.

    In each round, every step runs once, in a random order. ``reset`` is called before each step and
    is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    chance = random.Random(0)  # the same on all ranks
    for _ in range(2 + ROUNDS):
        for name in chance.sample(list(steps), len(steps)):
            reset()
            dist.barrier()
            started = time.perf_counter()
            steps[name]()
            dist.barrier()
            times[name].append(time.perf_counter() - started)
    return [measured[2:] for measured in times.values()]


def measured() -> list[dict[str, Any]]:
    """Return the rows of the table, one for each kind of step but the plain one.

    A row has the median time of the step, and the median ratio to the time of a plain step.
    """
    sizes = split_ranks(16, rank0_bsz=4)
    own = sizes[dist.get_rank()]
    torch.manual_seed(0)
    module = TokenTransformer(2000, 64, causal=True, width=256, num_heads=4, num_layers=4)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    tokens = torch.randint(2000, (own, 65))

    def loss() -> Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def counted_ahead() -> None:
        total = count_all_ranks(own)
        scale_loss(loss(), own, total=total).backward()

    steps = {
        "plain": lambda: loss().backward(),
        "plain again": lambda: loss().backward(),
        "scale_loss": lambda: scale_loss(loss(), own).backward(),
        "counted ahead": counted_ahead,
    }
    plain, *others = in_turns(steps, model.zero_grad)
    rows = []
    for name, seconds in zip(list(steps)[1:], others, strict=True):
        ratios = [a / b for a, b in zip(seconds, plain, strict=True)]
        rows.append(
            {
                "step": name,
                "ms": 1e3 * statistics.median(seconds),
                "ratio to plain": statistics.median(ratios),
            }
        )
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measured()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(rows))
    dist.barrier()
    gc.collect()  # models must not outlive their group: gloo's threads end before Python does
    dist.destroy_process_group()
