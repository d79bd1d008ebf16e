"""Is run by torchrun for ``test_ranks.py``: steps of ranks, of which rank 0 writes the times.

Arguments: which part, and the JSON file. One process that trains alone is rank 0; the others wait.
"""

from __future__ import annotations

import copy
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
from stock_on_cpu import stock_on_cpu, stock_steps
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from balanced_dp import BalancedCriterion, BalancedDataParallel
from balanced_dp.distributed import count_all_ranks, scale_loss, split_ranks
from balanced_dp.tuning.models import TokenTransformer
from balanced_dp.tuning.workload import find_workload

Step = Callable[[], Any]


def in_turns(steps: dict[str, Step], rounds: int, reset: Step) -> dict[str, list[float]]:
    """Returns the seconds of each step: all take turns, in an order that chance changes."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    chance = random.Random(0)  # the same on all ranks
    for index in range(rounds + 2):
        for name in chance.sample(list(steps), len(steps)):
            reset()
            dist.barrier()
            started = time.perf_counter()
            steps[name]()
            dist.barrier()
            if index >= 2:
                times[name].append(time.perf_counter() - started)
    return times


ROUNDS = 120


def scaling() -> list[dict[str, Any]]:
    """Steps with ``scale_loss`` next to steps without, of the same model."""
    rank = dist.get_rank()
    sizes = split_ranks(16, rank0_bsz=4)
    torch.manual_seed(0)
    module = TokenTransformer(2000, 64, causal=True, width=256, num_heads=4, num_layers=4)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    tokens = torch.randint(2000, (sizes[rank], 65))

    def loss() -> Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def ahead() -> None:
        total = count_all_ranks(sizes[rank])
        scale_loss(loss(), sizes[rank], total=total).backward()

    steps: dict[str, Step] = {
        "plain": lambda: loss().backward(),
        "plain again": lambda: loss().backward(),
        "scale_loss": lambda: scale_loss(loss(), sizes[rank]).backward(),
        "counted ahead": ahead,
    }
    times = in_turns(steps, ROUNDS, model.zero_grad)
    plain = [(a + b) / 2 for a, b in zip(times["plain"], times["plain again"], strict=True)]
    rows = []
    for side in list(steps)[1:]:
        ratios = [a / b for a, b in zip(times[side], plain, strict=True)]
        if side == "plain again":
            ratios = [a / b for a, b in zip(times[side], times["plain"], strict=True)]
        low, high = interval(ratios)
        rows.append(
            {
                "step": side,
                "ms": 1e3 * statistics.median(times[side]),
                "ratio to plain": statistics.median(ratios),
                "95 % interval": f"{low:.3f} to {high:.3f}",
            }
        )
    return rows


def interval(ratios: list[float]) -> tuple[float, float]:
    """Returns the middle 95 % of the median, of rounds drawn again."""
    chance = random.Random(0)
    found = [statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(1000)]
    cuts = statistics.quantiles(found, n=40)
    return cuts[0], cuts[-1]


def engines() -> list[dict[str, Any]]:
    """The same batch by each engine; two threads or two processes on two cores."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = TokenTransformer(2000, 64, causal=True, width=256, num_heads=4, num_layers=4)
    modules = {name: copy.deepcopy(module) for name in ("stock", "gathered", "loss", "ddp", "fsdp")}
    tokens = torch.randint(2000, (16, 65))
    x, y = tokens[:, :-1], tokens[:, 1:]
    sizes = split_ranks(16, world_size, rank0_bsz=7)
    start = sum(sizes[:rank])
    own_x, own_y = (part[start : start + sizes[rank]] for part in (x, y))
    criterion = nn.CrossEntropyLoss()

    def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return criterion(logits.flatten(0, 1), targets.flatten())

    def alone(forward: Callable[[], Tensor]) -> Step:
        return lambda: forward().backward() if rank == 0 else None

    def on_cpus(name: str, **options: Any) -> BalancedDataParallel:
        model = BalancedDataParallel(7, modules[name], ["cpu"] * 2, **options)
        model.device_ids[1:] = [torch.device("cpu", 1)]  # differs in name, and is copied to
        return model

    stock = stock_steps(modules["stock"], 2)

    def stock_step() -> None:
        with stock_on_cpu():
            token_loss(stock(x), y).backward()

    gathered, ungathered = on_cpus("gathered"), on_cpus("loss", gather=False)
    on_device = BalancedCriterion(token_loss)
    ddp = DistributedDataParallel(modules["ddp"], gradient_as_bucket_view=True)
    for layer in modules["fsdp"].layers:
        fully_shard(layer)
    sharded = fully_shard(modules["fsdp"])

    def ranks(model: nn.Module) -> Step:
        return lambda: scale_loss(token_loss(model(own_x), own_y), sizes[rank]).backward()

    steps = {
        "nn.DataParallel's own steps": lambda: stock_step() if rank == 0 else None,
        "BalancedDataParallel": alone(lambda: token_loss(gathered(x), y)),
        "BalancedDataParallel, loss on each device": alone(lambda: on_device(ungathered(x), y)),
        "DistributedDataParallel, scale_loss": ranks(ddp),
        "fully_shard, scale_loss": ranks(sharded),
    }
    times = in_turns(steps, 20, lambda: [m.zero_grad() for m in modules.values()])
    first = statistics.median(times["BalancedDataParallel"])
    for model in (gathered, ungathered):
        model.close()
    return [
        {
            "engine": name,
            "ms a step": 1e3 * statistics.median(found),
            "next to BalancedDataParallel": statistics.median(found) / first,
        }
        for name, found in times.items()
    ]


def state() -> list[dict[str, Any]]:
    """What each rank keeps between steps, of GPT-2 small and AdamW."""
    workload = find_workload("gpt2-small")
    rows = []
    for name in ("DistributedDataParallel", "fully_shard"):
        with torch.device("cpu"):
            module = workload.model()
        if name == "fully_shard":
            for layer in module.layers:
                fully_shard(layer)
            model = fully_shard(module)
        else:
            model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        optimizer = workload.make_optimizer(model.parameters())
        tokens = torch.randint(50257, (1, 17))
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        parameters = list(model.parameters())
        kept = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters],
            "optimizer state": [
                value for entry in optimizer.state.values() for value in entry.values()
            ],
        }
        sizes = {what: sum(map(local_bytes, tensors)) for what, tensors in kept.items()}
        rows.append({"engine": name, **{f"{k}, MiB": v / 2**20 for k, v in sizes.items()}})
        rows[-1]["all, MiB"] = sum(sizes.values()) / 2**20
    return rows


def local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def main(what: str, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = {"scaling": scaling, "engines": engines, "state": state}[what]()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.barrier()
    gc.collect()  # no model outlives its group, so that gloo's threads end while Python runs
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
