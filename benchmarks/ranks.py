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
from functools import partial
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
from balanced_dp.distributed import split_ranks, weight_gradients
from balanced_dp.models import TokenTransformer
from balanced_dp.workloads import find_workload

Step = Callable[[], Any]


class Parameters(nn.Module):
    """Parameters whose gradients take next to no work."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.all = nn.ParameterList(list(module.parameters()))

    def forward(self, x: Tensor) -> Tensor:
        return sum((parameter * x).sum() for parameter in reversed(list(self.all)))


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


SIDES = ("plain", "weighted", "plain again")
Times = dict[str, list[float]]


# What it is called, whether it is only gradients, whether those are views of buckets, and rounds.
COMPARISONS = {
    "views": ("GPT-2 small's gradients alone, as views of buckets", True, True, 16),
    "copies": ("GPT-2 small's gradients alone, copied from buckets", True, False, 16),
    "step": ("GPT-2 small's step, 1 and 3 samples of T=64", False, True, 3),
}


def hook(part: str) -> list[dict[str, Any]]:
    """A weighted step next to one of plain DistributedDataParallel.

    Models are made anew 8 times: where their memory lies is worth a percent.
    """
    what, is_bare, as_views, rounds = COMPARISONS[part]
    module = find_workload("gpt2-small").model()
    if is_bare:
        module = Parameters(module)
    chance = random.Random(0)  # the same on all ranks
    groups = []
    for _ in range(8):
        models = {
            side: DistributedDataParallel(copy.deepcopy(module), gradient_as_bucket_view=as_views)
            for side in chance.sample(SIDES, len(SIDES))
        }
        weight_gradients(models["weighted"])
        groups.append(hook_times(models, rounds))
        del models
        gc.collect()
    pooled = together(groups)
    medians = {side: statistics.median(pooled[side]) for side in SIDES}
    low, high = interval(groups)
    row = {
        "what": what,
        **{f"{side}, s": median for side, median in medians.items()},
        "ratio": overhead(pooled),
        "95 % interval": f"{low:.3f} to {high:.3f}",
        "plain again to plain": medians["plain again"] / medians["plain"],
        "rounds": len(groups) * rounds,
    }
    return [row]


def hook_times(models: dict[str, nn.Module], rounds: int) -> Times:
    rank = dist.get_rank()
    sizes = split_ranks(2 * dist.get_world_size(), rank0_bsz=1)
    tokens = torch.randint(50257, (sizes[rank], 65))

    def step(model: nn.Module) -> None:
        if hasattr(model, "local_weight"):
            model.local_weight(sizes[rank])
        if isinstance(model.module, Parameters):
            loss = model(torch.tensor(1.0))
        else:
            logits = model(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()

    return in_turns(
        {side: partial(step, model) for side, model in models.items()},
        rounds,
        lambda: [model.zero_grad() for model in models.values()],
    )


def together(groups: list[Times]) -> Times:
    return {side: [time for times in groups for time in times[side]] for side in SIDES}


def overhead(times: Times) -> float:
    plain = statistics.median(times["plain"] + times["plain again"])
    return statistics.median(times["weighted"]) / plain


def interval(groups: list[Times]) -> tuple[float, float]:
    """Returns the middle 95 % of the overhead, of models and their rounds drawn again."""
    chance = random.Random(0)
    rounds = len(groups[0]["plain"])
    found = []
    for _ in range(1000):
        drawn = []
        for times in chance.choices(groups, k=len(groups)):
            indices = chance.choices(range(rounds), k=rounds)
            drawn.append({side: [times[side][i] for i in indices] for side in SIDES})
        found.append(overhead(together(drawn)))
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
    ddp = weight_gradients(DistributedDataParallel(modules["ddp"], gradient_as_bucket_view=True))
    for layer in modules["fsdp"].layers:
        fully_shard(layer)
    sharded = weight_gradients(fully_shard(modules["fsdp"]))

    def ranks(model: nn.Module) -> Step:
        def step() -> None:
            model.local_weight(sizes[rank])
            token_loss(model(own_x), own_y).backward()

        return step

    steps = {
        "nn.DataParallel's own steps": lambda: stock_step() if rank == 0 else None,
        "BalancedDataParallel": alone(lambda: token_loss(gathered(x), y)),
        "BalancedDataParallel, loss on each device": alone(lambda: on_device(ungathered(x), y)),
        "DistributedDataParallel, weighted": ranks(ddp),
        "fully_shard, weighted": ranks(sharded),
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
    rows = {"engines": engines, "state": state}.get(what, partial(hook, what))()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(rows))
    dist.barrier()
    gc.collect()  # no model outlives its group, so that gloo's threads end while Python runs
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
