"""Script that four processes run, to compare training on two and on four ranks with one process.

Rank 0 writes a JSON object by the names of the cases. The value of a case is the largest difference
between training on the ranks and training in one process with the whole batch, or the exception
that was raised.
"""

from __future__ import annotations

import copy
import datetime
import importlib.util
import itertools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from balanced_dp.distributed import BalancedBatchSampler, count_all_ranks, scale_loss, split_ranks
from tests.modules import Lambda

if torch.__version__ >= "2.10":  # earlier ones have no fully_shard for the CPU
    from torch.distributed.fsdp import FSDPModule, fully_shard
else:
    FSDPModule = ()

NUM_RANKS = 4
IGNORED = -100
# The rows of three batches on each rank, or of three micro-batches of one.
SHARES = {2: ((2, 7), (5, 0), (0, 4)), 4: ((2, 4, 0, 3), (0, 1, 5, 0), (1, 3, 1, 2))}

Group = dist.ProcessGroup
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], tuple[Tensor, "int | Tensor"]]


def rows(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return mse_loss(output, target), len(target)


def tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
    return loss, (target != IGNORED).sum()


def masked_mean(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Return the mean of the losses of the targets that count, and how many these are.

    If no target counts, the mean and its gradients are NaN.
    """
    mask = (target != IGNORED).to(output.dtype)
    each = cross_entropy(output.transpose(1, 2), target.clamp(min=0), reduction="none")
    return (each * mask).sum() / mask.sum(), int(mask.sum())


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def tagger(sparse: bool = False) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6, sparse=sparse), nn.Linear(6, 5))


def partly() -> nn.Module:
    """Return a module that does not use all of its parameters."""
    unused = nn.Linear(5, 5)
    return Lambda(lambda self, x: self.used(x), used=tagger(), unused=unused)


def twice() -> nn.Module:
    """Return a module that runs a layer in two reentrant checkpoints; DDP needs static_graph."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x)

    return Lambda(forward, layer=nn.Linear(6, 6), head=nn.Linear(6, 3))


def numbers(count: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 3, generator=generator)


def token_labels(count: int) -> Batch:
    """Return inputs and labels such that on some ranks all labels of a batch are ignored."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (count, 4), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = IGNORED
    labels[:2] = labels[7:9] = IGNORED
    return torch.randint(11, (count, 4), generator=generator), labels


def replicated(net: nn.Module, group: Group, **arguments: bool) -> nn.Module:
    return DistributedDataParallel(net, process_group=group, **arguments)


def sharded(net: nn.Module, group: Group) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def accelerated(net: nn.Module, group: Group) -> nn.Module:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(SHARES[NUM_RANKS]))
    assert accelerator.num_processes == NUM_RANKS
    model = accelerator.prepare(net)
    model.accelerator = accelerator
    return model


def backward(model: nn.Module, loss: Tensor) -> None:
    """Call ``backward`` on a loss, by way of accelerate if the model uses accelerate.

    accelerate divides each loss by the number of micro-batches, so the loss is multiplied by it.
    """
    if accelerator := getattr(model, "accelerator", None):
        accelerator.backward(loss * accelerator.gradient_accumulation_steps)
    else:
        loss.backward()


def gradient_reduction(model: nn.Module, is_last: bool):
    """Return a context for the passes of a micro-batch, which decides if gradients are reduced.

    They are reduced over the ranks if ``is_last`` is True, and otherwise only accumulated.
    """
    if accelerator := getattr(model, "accelerator", None):
        return accelerator.accumulate(model)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    elif isinstance(model, DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()


def difference_from_one_process(
    make: Callable[[], nn.Module],
    data: Callable[[int], Batch],
    loss_of: Loss,
    wrap: Callable[[nn.Module, Group], nn.Module],
    accumulate: bool,
    group: Group,
) -> float:
    """Train on the ranks of ``group`` and in one process, and return the largest difference.

    Losses, gradients and parameters are compared.
    """
    rank, shares = dist.get_rank(group), SHARES[dist.get_world_size(group)]
    torch.manual_seed(0)
    reference = make()
    model = wrap(copy.deepcopy(reference), group)
    pieces = split_into_micro_batches(data, shares)
    steps = [pieces] if accumulate else [[piece] for piece in pieces]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]
    differences = []
    for micro_batches in steps:
        own = [of_ranks[rank] for of_ranks in micro_batches]
        total = None
        if accumulate:
            total = count_all_ranks(sum(count_of(loss_of, y) for _, y in own), group)
        mean = torch.zeros(())
        for index, (x, y) in enumerate(own):
            with gradient_reduction(model, index == len(own) - 1):
                loss = scale_loss(*loss_of(model(x), y), total=total, group=group)
                backward(model, loss)
            mean += loss.detach() / len(shares[0])
        dist.all_reduce(mean, group=group)
        x, y = map(torch.cat, zip(*itertools.chain(*micro_batches), strict=True))
        expected, _ = loss_of(reference(x), y)
        expected.backward()
        pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
        differences.append(mean - expected.detach())
        assert [p.grad is None for p, _ in pairs] == [q.grad is None for _, q in pairs]
        differences += [(whole(p.grad) - q.grad).to_dense() for p, q in pairs if q.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        differences += [whole(p).detach() - q.detach() for p, q in pairs]
    return float(torch.stack([difference.abs().max() for difference in differences]).max())


def split_into_micro_batches(data: Callable[[int], Batch], shares: tuple[tuple[int, ...], ...]):
    """Return a list of micro-batches, each of which is a list with the batch of each rank."""
    sizes = list(itertools.chain(*shares))
    parts = zip(*(part.split(sizes) for part in data(sum(sizes))), strict=True)
    return [list(itertools.islice(parts, len(share))) for share in shares]


def count_of(loss_of: Loss, target: Tensor) -> int:
    return len(target) if loss_of is rows else int((target != IGNORED).sum())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def defaults_from_the_process_group(group: Group) -> float:
    sizes = split_ranks(9, rank0_bsz=1)
    assert len(sizes) == dist.get_world_size()
    sampler = BalancedBatchSampler(range(9), 9, sizes, shuffle=False)
    assert (sampler.rank, sampler.world_size) == (dist.get_rank(), dist.get_world_size())
    start = sum(sizes[: dist.get_rank()])
    assert list(sampler) == [list(range(start, start + sizes[dist.get_rank()]))]
    return 0.0


LOSSES = {
    "rows": (regression, numbers, rows),
    "tokens": (tagger, token_labels, tokens),
    "masked": (tagger, token_labels, masked_mean),
}
WRAPPERS = {"ddp": replicated}
if FSDPModule:
    WRAPPERS["fully_shard"] = sharded
MORE = {
    "static graph": (twice, numbers, rows, partial(replicated, static_graph=True), False),
    "unused": (
        *(partly, token_labels, masked_mean),
        *(partial(replicated, find_unused_parameters=True), False),
    ),
    "sparse": (partial(tagger, sparse=True), token_labels, masked_mean, replicated, False),
}
if importlib.util.find_spec("accelerate"):
    MORE["accelerate"] = (*LOSSES["tokens"], accelerated, True)
CASES: dict[str, Callable[[Group], float]] = {
    **{
        f"{loss}, {wrapper}{', accumulated' * adds_up}": partial(
            difference_from_one_process, *LOSSES[loss], WRAPPERS[wrapper], adds_up
        )
        for loss, wrapper, adds_up in itertools.product(LOSSES, WRAPPERS, (False, True))
    },
    **{name: partial(difference_from_one_process, *parts) for name, parts in MORE.items()},
    "defaults": defaults_from_the_process_group,
}
ON_TWO = {"rows, ddp", "tokens, ddp, accumulated"}
"""The names of the cases that also run on a group of two ranks."""


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    groups = {size: dist.new_group(range(size)) for size in SHARES}
    results: dict[str, float | str] = {}
    for name, size in itertools.product(CASES, SHARES):
        if size < NUM_RANKS and name not in ON_TWO:
            continue
        off: float | str = 0.0
        try:
            if dist.get_rank() < size:
                off = CASES[name](groups[size])
        except Exception:
            off = traceback.format_exc()
        everywhere: list = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, off)
        said = [f"rank {i}: {text}" for i, text in enumerate(everywhere) if isinstance(text, str)]
        # Not Python's max(), which ignores NaN.
        results[f"{name}, {size} ranks"] = "\n".join(said) or float(torch.tensor(everywhere).max())
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    os._exit(0)  # torch 2.5 may hang where a group ends: gloo's thread waits for Python's lock


if __name__ == "__main__":
    main()
