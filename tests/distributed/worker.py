"""Is run by torchrun: trains on several ranks and compares with one process on whole batches.

Rank 0 writes a JSON object: the name of each case, and how far it was off or what it raised.
"""

from __future__ import annotations

import copy
import datetime
import gc
import json
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from balanced_dp import BalancedDataParallel, DistributedError
from balanced_dp.distributed import (
    BalancedBatchSampler,
    EmptyBatches,
    convert,
    split_ranks,
    weight_gradients,
    weighted_buckets,
)

# Zero samples for one rank where there are three or four.
CHUNK_SIZES = {2: (2, 7), 3: (1, 0, 8), 4: (2, 4, 0, 3)}
BATCH_SIZE = 9
IGNORED = -100

CASES: dict[str, Callable[[], float]] = {}


def case(function: Callable[[], float]) -> Callable[[], float]:
    CASES[function.__name__] = function
    return function


class Branches(nn.Module):
    """Leaves one of two layers out, another one at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.layers[self.num_calls % 2](x)


class Twice(nn.Module):
    """Uses a layer twice, the way static_graph is needed for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def tagger() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5))


def regression_data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num_samples, 6, generator=generator),
        torch.randn(num_samples, 3, generator=generator),
    )


def tagging_data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (num_samples, 4), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = IGNORED
    labels[: num_samples // 2] = IGNORED
    labels[0, 0] = 1
    return TensorDataset(torch.randint(11, (num_samples, 4), generator=generator), labels)


def samples(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return mse_loss(output, target), len(target)


def tokens(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    loss = cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
    return loss, int((target != IGNORED).sum())


Loss = Callable[[Tensor, Tensor], tuple[Tensor, int]]


def batches(data: TensorDataset, rank: int, sizes: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """Two epochs of one rank's batches; the last ones are smaller."""
    sampler = BalancedBatchSampler(
        data, BATCH_SIZE, sizes, rank=rank, world_size=len(sizes), seed=3
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from DataLoader(data, batch_sampler=sampler, collate_fn=EmptyBatches(data))


def trained(
    model: nn.Module,
    own: Iterator[list[Tensor]],
    loss_of: Loss,
    accumulation: int = 1,
) -> tuple[list[float], list[Tensor]]:
    """Returns the losses and everything that gradients and weights were."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    tensors: list[Tensor] = []
    is_distributed = hasattr(model, "local_weight")
    for step, (x, target) in enumerate(own):
        is_last = (step + 1) % accumulation == 0
        is_ddp = isinstance(model, DistributedDataParallel)
        with model.no_sync() if is_ddp and not is_last else nullcontext():
            loss, n = loss_of(model(x), target)
            if is_distributed:
                model.local_weight(n)
            (loss / accumulation).backward()
        losses.append(mean_loss(loss, n) if is_distributed else loss.item())
        if is_last:
            tensors += [whole(p.grad) for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return losses, tensors + [whole(p) for p in model.parameters()]


def gradients(model: nn.Module) -> list[Tensor]:
    return [whole(parameter.grad) for parameter in model.parameters()]


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def mean_loss(loss: Tensor, n: int) -> float:
    total = torch.tensor([loss.item() * n if n else 0.0, n], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def compared(
    make: Callable[[], nn.Module],
    data: TensorDataset,
    loss_of: Loss,
    wrap: Callable[[nn.Module], nn.Module],
    accumulation: int = 1,
) -> float:
    """Returns how far ranks are off one process: in losses, gradients and weights."""
    torch.manual_seed(0)
    reference = make()
    model = wrap(copy.deepcopy(reference))
    world_size = dist.get_world_size()
    found = trained(
        model, batches(data, dist.get_rank(), CHUNK_SIZES[world_size]), loss_of, accumulation
    )
    expected = trained(reference, batches(data, 0, (BATCH_SIZE,)), loss_of, accumulation)
    return difference(found, expected)


def difference(
    found: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]
) -> float:
    tensors = [*found[1], torch.tensor(found[0])], [*expected[1], torch.tensor(expected[0])]
    return furthest(*tensors)


def furthest(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Returns the largest difference; not-a-number if there is any."""
    differences = [(a - b).to_dense().abs().max() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(differences).max())


def weighted(**arguments: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda net: weight_gradients(DistributedDataParallel(net, **arguments))


@case
def uneven_chunks() -> float:
    return compared(network, regression_data(27), samples, weighted())


@case
def ragged_epochs() -> float:
    return max(compared(network, regression_data(n), samples, weighted()) for n in (10, 22, 26))


@case
def token_means() -> float:
    return compared(tagger, tagging_data(31), tokens, weighted())


@case
def accumulation() -> float:
    return max(
        compared(network, regression_data(27), samples, weighted(), accumulation=3),
        compared(tagger, tagging_data(31), tokens, weighted(), accumulation=2),
    )


@case
def bucket_views() -> float:
    wrap = weighted(gradient_as_bucket_view=True)
    return max(
        compared(network, regression_data(26), samples, wrap),
        compared(tagger, tagging_data(31), tokens, wrap, accumulation=2),
    )


@case
def unused_parameters() -> float:
    return compared(Branches, regression_data(26), samples, weighted(find_unused_parameters=True))


class TwoOutputs(nn.Module):
    """The loss is that of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


@case
def unused_outputs() -> float:
    def first(outputs: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, int]:
        return samples(outputs[0], target)

    return compared(TwoOutputs, regression_data(26), first, weighted(find_unused_parameters=True))


@case
def static_graph() -> float:
    def with_input_gradients(data: TensorDataset) -> TensorDataset:
        x, y = data.tensors
        return TensorDataset(x.requires_grad_(), y)

    return compared(
        Twice, with_input_gradients(regression_data(26)), samples, weighted(static_graph=True)
    )


@case
def nothing_left_for_a_rank() -> float:
    """A loss that is NaN, with gradients that are NaN, where a rank counts nothing."""

    def masked(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        mask = (target != IGNORED).to(output.dtype)
        labels = target.clamp(min=0)
        each = cross_entropy(output.transpose(1, 2), labels, reduction="none")
        return (each * mask).sum() / mask.sum(), int(mask.sum())

    return max(
        compared(tagger, tagging_data(31), masked, weighted()),
        compared(tagger, tagging_data(31), masked, weighted(), accumulation=2),
    )


@case
def nothing_left_in_a_pass_that_accumulates() -> float:
    """Gradients that are NaN on one rank, before those of all are reduced."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference = network()
    model = weighted()(copy.deepcopy(reference))
    x, y = regression_data(2 * world_size).tensors
    own = slice(2 * rank, 2 * rank + 2)
    for is_last in (False, True):
        counts = is_last or rank > 0
        with nullcontext() if is_last else model.no_sync():
            model.local_weight(2 if counts else 0)
            error = mse_loss(model(x[own]), y[own], reduction="none")
            (error * counts).sum().div(6 * counts).backward()  # 0 / 0 where nothing counts
        start = 0 if is_last else 2
        mse_loss(reference(x[start:]), y[start:]).backward()
    return furthest(gradients(model), gradients(reference))


@case
def sparse_gradients() -> float:
    def sparse() -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 5))

    torch.manual_seed(0)
    reference = sparse()
    model = weight_gradients(DistributedDataParallel(copy.deepcopy(reference)))
    data = tagging_data(9)
    sizes = CHUNK_SIZES[dist.get_world_size()]
    x, y = next(batches(data, dist.get_rank(), sizes))
    loss, n = tokens(model(x), y)
    model.local_weight(n)
    loss.backward()
    x, y = next(batches(data, 0, (BATCH_SIZE,)))
    tokens(reference(x), y)[0].backward()
    return furthest(gradients(model), gradients(reference))


@case
def converted() -> float:
    def wrap(net: nn.Module) -> nn.Module:
        return convert(BalancedDataParallel(1, net, device_ids=["cpu"] * 4))

    return compared(network, regression_data(26), samples, wrap)


@case
def converted_keeps_what_there_is() -> float:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net[1].eval()
    balanced = BalancedDataParallel(1, net, device_ids=["cpu"] * 4)
    calls: list[str] = []
    handle = balanced.register_forward_hook(lambda *_: calls.append("wrapper"))
    net.register_forward_pre_hook(lambda *_: calls.append("module"))
    net[0].weight.register_hook(lambda gradient: calls.append("parameter"))
    parameters = list(balanced.parameters())
    before = copy.deepcopy(balanced.state_dict())
    ddp = convert(balanced, bucket_cap_mb=1)
    assert ddp.bucket_bytes_cap == 2**20 and ddp.gradient_as_bucket_view
    assert [m.training for m in (ddp, net, net[0], net[1])] == [True, True, True, False]
    assert all(a is b for a, b in zip(parameters, ddp.parameters(), strict=True))
    ddp.local_weight(4)
    ddp(torch.randn(4, 6)).sum().backward()
    assert sorted(calls) == ["module", "parameter", "wrapper"], calls
    handle.remove()
    with torch.no_grad():
        ddp(torch.randn(4, 6))
    assert calls.count("wrapper") == 1
    # Checkpoints, both ways.
    ddp.load_state_dict(before)
    other = BalancedDataParallel(1, copy.deepcopy(net), device_ids=["cpu"] * 4)
    other.load_state_dict(ddp.state_dict())
    balanced.eval()
    assert balanced(torch.randn(8, 6)).shape == (8, 3)  # the old wrapper still runs
    return 0.0


@case
def compression_in_place() -> float:
    """Before the weights and after; bf16 rounds to 8 bits, a wrong weight is off by a multiple."""

    def compress(state, bucket):  # under its own name, DDP refuses it on the CPU
        return bf16_compress_hook(None, bucket)

    def before(net: nn.Module) -> nn.Module:
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(None, compress)
        return weight_gradients(ddp)

    def after(net: nn.Module) -> nn.Module:
        ddp = weight_gradients(DistributedDataParallel(net))
        ddp.register_comm_hook(None, compress)
        return ddp

    def built_in(net: nn.Module) -> nn.Module:
        ddp = DistributedDataParallel(net)
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return weight_gradients(ddp)

    exact = compared(network, regression_data(26), samples, built_in)
    for wrap in (before, after):
        rounded = compared(network, regression_data(26), samples, wrap)
        assert 1e-6 < rounded < 0.05, rounded
    return max(exact, compared(tagger, tagging_data(31), tokens, built_in, accumulation=2))


@case
def sharded() -> float:
    def wrap(net: nn.Module) -> nn.Module:
        fully_shard(net[0])
        fully_shard(net)
        return weight_gradients(net)

    return max(
        compared(network, regression_data(26), samples, wrap),
        compared(tagger, tagging_data(31), tokens, wrap),
    )


@case
def sharded_accumulation() -> float:
    """Equal shares are exact; unlike ones are refused on every rank."""
    torch.manual_seed(0)
    reference = network()
    net = copy.deepcopy(reference)
    weight_gradients(fully_shard(net))
    rank, sizes = dist.get_rank(), CHUNK_SIZES[dist.get_world_size()]
    for is_last in (False, True):
        x, y = next(batches(regression_data(9), rank, sizes))
        net.set_requires_gradient_sync(is_last)
        net.local_weight(sizes[rank])
        mse_loss(net(x), y).backward()
        x, y = next(batches(regression_data(9), 0, (BATCH_SIZE,)))
        mse_loss(reference(x), y).backward()
    off = furthest(gradients(net), gradients(reference))
    check_unlike_shares_are_refused(net, net.set_requires_gradient_sync)
    return off


@case
def sharded_layers_that_accumulate_alone() -> float:
    """One layer adds up two passes while the rest reduces both."""
    torch.manual_seed(0)
    net = network()
    fully_shard(net[0])
    weight_gradients(fully_shard(net))
    check_unlike_shares_are_refused(
        net, lambda is_last: net[0].set_requires_gradient_sync(is_last, recurse=False)
    )
    return 0.0


def check_unlike_shares_are_refused(net: nn.Module, set_sync: Callable[[bool], None]) -> None:
    """Accumulates two passes, in which ranks have other shares; the second one reduces both."""
    rank = dist.get_rank()
    for is_last, n in ((False, rank + 1), (True, 2 * rank + 1)):
        set_sync(is_last)
        net.local_weight(n)
        try:
            mse_loss(net(torch.randn(2, 6)), torch.randn(2, 3)).backward()
        except DistributedError as error:
            assert is_last and "set_requires_gradient_sync(True)" in str(error)
        else:
            assert not is_last


@case
def sharded_layers_that_are_frozen_for_a_while() -> float:
    """What was told meanwhile is no part of what they reduce later, and is not kept for it."""
    torch.manual_seed(0)
    reference = network()
    net = copy.deepcopy(reference)
    for layer in net:
        fully_shard(layer)
    weight_gradients(fully_shard(net))  # which has no parameters of its own
    net[0].requires_grad_(False)
    rank = dist.get_rank()
    for number in range(4):
        net[0].requires_grad_(number == 3)
        sizes = split_ranks(9, rank0_bsz=number)
        start = sum(sizes[:rank])
        x, y = regression_data(9).tensors
        own = slice(start, start + sizes[rank])
        net.zero_grad()
        net.local_weight(sizes[rank])
        mse_loss(net(x[own]), y[own]).nan_to_num().backward()
    mse_loss(reference(x), y).backward()
    assert sum(len(shares) for _, shares in net.local_weight._followers) == 0
    return furthest(gradients(net), gradients(reference))


@case
def sharded_layers_of_one_group() -> float:
    """Layers that are reduced together, of which the last one is frozen, accumulate together."""
    torch.manual_seed(0)
    net = network()
    fully_shard([net[0], net[2]])
    weight_gradients(fully_shard(net))
    net[2].requires_grad_(False)
    check_unlike_shares_are_refused(net, net.set_requires_gradient_sync)
    return 0.0


@case
def replicas_of_shards() -> float:
    """Weighted where gradients are scattered, refused where they never are."""
    world_size = dist.get_world_size()
    unsharded = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("a", "b"))
    try:
        weight_gradients(fully_shard(network(), mesh=unsharded))
    except ValueError as error:
        assert "replicated over" in str(error)
    else:
        raise AssertionError("gradients that are not scattered")
    if world_size != 4:
        return 0.0
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

    def wrap(net: nn.Module) -> nn.Module:
        return weight_gradients(fully_shard(net, mesh=mesh))

    return compared(network, regression_data(26), samples, wrap)


@case
def gradients_that_are_averaged_past_the_weights() -> float:
    net = network()
    delayed = {
        "delay_all_reduce_named_params": [("2.bias", net[2].bias)],
        "param_to_hook_all_reduce": net[2].weight,
    }
    mixed = {"mixed_precision": _MixedPrecision(torch.float32, torch.float32, torch.float32)}
    dynamo_mode = torch._dynamo.config.optimize_ddp
    for arguments, mode, words in (
        (delayed, dynamo_mode, "delay_all_reduce_named_params"),
        (mixed, dynamo_mode, "use torch.autocast"),
        ({}, "python_reducer", "set another mode"),
    ):
        torch._dynamo.config.optimize_ddp = mode
        try:
            weighted(**arguments)(net)
        except ValueError as error:
            assert words in str(error)
        else:
            raise AssertionError(words)
        finally:
            torch._dynamo.config.optimize_ddp = dynamo_mode
    return 0.0


@case
def other_defaults() -> float:
    """Counts and orders stay on the CPU and exact, whatever the defaults are."""
    ddp = weight_gradients(DistributedDataParallel(network()))
    torch.set_default_device("meta")
    try:
        ddp.local_weight(2**40 + dist.get_rank())
        sampler = BalancedBatchSampler(range(9), 9, (9,), rank=0, world_size=1)
        assert sorted(next(iter(sampler))) == list(range(9))
    finally:
        torch.set_default_device(None)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    total = world_size * 2**40 + world_size * (world_size - 1) // 2
    return abs(ddp.local_weight.share.factor - (2**40 + rank) * world_size / total)


class Positions(nn.Module):
    """Has gradients that share memory: with one sample, that of a view is the one that flows on."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.positions = nn.Parameter(torch.randn(4, 6))
        self.bias = nn.Parameter(torch.randn(5))
        self.a, self.b = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[None]
        x = x @ (self.a.view(36) + self.b.view(36)).view(6, 6)
        return self.head(x) + self.bias.view(1, 1, -1)


@case
def gradients_that_share_memory() -> float:
    """A weight in place would reach those that still flow."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    reference = Positions()
    data = tagging_data(2 * world_size).tensors
    sizes = split_ranks(2 * world_size, rank0_bsz=1)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(model(tokens).flatten(0, 1), labels.clamp(0).flatten())

    loss(reference, *data).backward()
    off = 0.0
    for views in (False, True):  # not accumulated: torch itself adds to shared memory twice
        model = weighted(gradient_as_bucket_view=views)(copy.deepcopy(reference))
        own_loss = loss(model, *(part[own] for part in data))
        model.local_weight(sizes[rank])
        own_loss.backward()
        off = max(off, furthest(gradients(model), gradients(reference)))
    return off


class Complex(nn.Module):
    """Weights that are complex, of which torch keeps the gradients as real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) @ self.weight + self.bias).abs()


@case
def complex_parameters() -> float:
    return max(
        compared(Complex, regression_data(26), samples, weighted(gradient_as_bucket_view=as_views))
        for as_views in (False, True)
    )


class TwoTypes(nn.Module):
    """Gradients of two types are in buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).float()
        self.second = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.float()).double())


@case
def gradients_that_a_hook_replaces() -> float:
    """A copy is weighted like what was copied."""
    rank, sizes = dist.get_rank(), CHUNK_SIZES[dist.get_world_size()]
    start = sum(sizes[:rank])
    torch.manual_seed(0)
    reference = TwoTypes()
    model = weighted(static_graph=True)(copy.deepcopy(reference))
    x, y = regression_data(9).tensors
    own = slice(start, start + sizes[rank])
    mse_loss(reference(x), y).backward()
    off = 0.0
    for number in range(3):
        if number == 1:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(replace)
        model.zero_grad()
        model.local_weight(sizes[rank])
        mse_loss(model(x[own]), y[own]).backward()
        off = max(off, furthest(gradients(model), gradients(reference)))
    assert off < 1e-5, off  # half of them are of single precision
    return 0.0


def replace(parameter: Tensor) -> None:
    parameter.grad = parameter.grad.clone()


@case
def what_no_sync_leaves() -> float:
    """Weighted, not yet divided by the number of ranks; as for an average by hand."""
    rank, sizes = dist.get_rank(), CHUNK_SIZES[dist.get_world_size()]
    torch.manual_seed(0)
    reference = network()
    model = weighted()(copy.deepcopy(reference))
    x, y = next(batches(regression_data(9), 0, (BATCH_SIZE,)))
    mse_loss(reference(x), y).backward()
    x, y = next(batches(regression_data(9), rank, sizes))
    for number in range(4):
        model.zero_grad()
        model.local_weight(sizes[rank])
        with model.no_sync() if number == 3 else nullcontext():
            mse_loss(model(x), y).backward()
    found = gradients(model)
    for gradient in found:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return furthest(found, gradients(reference))


@case
def gradients_that_are_there_already() -> float:
    """Only what is new is weighted, whatever it adds up with and hooks do to it."""
    return max(
        furthest_of_passes(as_views, between, meddle)
        for as_views in (False, True)
        for between, meddle in (
            *(("none", meddle) for meddle in (None, "hook", "clone", "post")),
            ("zeros", None),
            ("kept", None),
        )
    )


@case
def what_a_backward_pass_leaves() -> float:
    """Plain tensors, also past the model; none weighted that is not in .grad."""
    rank, sizes = dist.get_rank(), CHUNK_SIZES[dist.get_world_size()]
    torch.manual_seed(0)
    reference = network()
    model = weighted(gradient_as_bucket_view=True)(copy.deepcopy(reference))
    x, y = (part[2 * rank : 2 * rank + 2] for part in regression_data(9).tensors)
    for _ in range(3):
        model.local_weight(sizes[rank])
        mse_loss(model(x), y).backward()
    model.zero_grad()
    mse_loss(reference(x), y).backward()
    mse_loss(model.module(x), y).backward()
    assert {type(parameter.grad) for parameter in model.parameters()} == {Tensor}
    factor = sizes[rank] * dist.get_world_size() / BATCH_SIZE
    off = furthest(gradients(model), [gradient * factor for gradient in gradients(reference)])
    for is_reduced in (False, True):  # .grad is there, and is not
        model.local_weight(sizes[rank])
        with nullcontext() if is_reduced else model.no_sync():
            loss = mse_loss(model(x), y)
            found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            before = [gradient.clone() for gradient in found]
            model.zero_grad(set_to_none=is_reduced)
            loss.backward()
        off = max(off, furthest(found, before), furthest(found, gradients(reference)))
    assert {type(parameter.grad) for parameter in model.parameters()} == {Tensor}
    expected = gradients(model)
    model.zero_grad()
    handle = model.module[0].weight.register_hook(lambda _: 1 / 0)
    model.local_weight(sizes[rank])
    try:
        with model.no_sync():
            mse_loss(model(x), y).backward()
    except ZeroDivisionError:
        handle.remove()
    assert {type(parameter.grad) for parameter in model.parameters()} <= {Tensor, type(None)}
    model.zero_grad()
    model.local_weight(sizes[rank])
    mse_loss(model(x), y).backward()
    return max(off, furthest(gradients(model), expected))


def double(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


@case
def gradients_that_hooks_see() -> float:
    """Those on parameters see what this rank has computed; those on .grad see it weighted."""
    return max(furthest_that_hooks_see(is_early) for is_early in (False, True))


def furthest_that_hooks_see(is_early: bool) -> float:
    rank, sizes = dist.get_rank(), CHUNK_SIZES[dist.get_world_size()]
    factor = sizes[rank] * dist.get_world_size() / BATCH_SIZE
    torch.manual_seed(0)
    reference = network()
    net = copy.deepcopy(reference)
    x, y = (part[2 * rank : 2 * rank + 2] for part in regression_data(9).tensors)
    mse_loss(reference(x), y).backward()
    before: list[Tensor] = []
    after: list[Tensor] = []
    kept: list[Tensor] = []

    def look(parameter: Tensor) -> None:
        kept.append(parameter.grad)
        after.append(torch.mul(parameter.grad, 1.0, out=torch.empty_like(parameter)))
        ones = torch.ones_like(parameter)
        after.append(torch.mul(parameter.grad, ones, out=torch.empty_like(parameter)))
        assert str(parameter.grad) == str(after[-1])

    parameters = list(net.parameters())[::-1]  # as their gradients come
    for parameter in parameters:
        parameter.register_hook(lambda gradient: before.append(gradient.clone()))
        if is_early:
            parameter.register_post_accumulate_grad_hook(look)
    model = weighted()(net)
    for parameter in [] if is_early else parameters:
        parameter.register_post_accumulate_grad_hook(look)
    expected = gradients(reference)[::-1]
    off = 0.0
    for is_reduced in (False, True):
        for found in (before, after, kept):
            found.clear()
        model.zero_grad()
        model.local_weight(sizes[rank])
        with nullcontext() if is_reduced else model.no_sync():
            mse_loss(model(x), y).backward()
        off = max(off, furthest(before, expected))
        for found in (after[::2], after[1::2], *([] if is_reduced else [gradients(model)[::-1]])):
            off = max(off, furthest(found, [gradient * factor for gradient in expected]))
        off = max(off, furthest(kept, gradients(model)[::-1]))
    return off


@case
def gradients_of_gradients() -> float:
    """Torch refuses them in its own words."""
    alone, _ = dist.new_subgroups(group_size=1)  # nobody waits for what is left undone
    said = []
    for is_weighted in (False, True):
        model = DistributedDataParallel(network(), process_group=alone)
        if is_weighted:
            weight_gradients(model, dist.group.WORLD).local_weight(3 if dist.get_rank() else 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model(torch.randn(2, 6)).sum().backward(create_graph=True)
            except RuntimeError as error:
                said.append(str(error))
    assert len(said) == 2 and said[0] == said[1], said
    return 0.0


@case
def gradients_that_are_left_out() -> float:
    """By DistributedDataParallel, or by a hook that has used them."""
    torch.manual_seed(0)
    reference = network()
    net = copy.deepcopy(reference)
    x, y = regression_data(9).tensors
    mse_loss(reference(x), y).backward()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    node = get_gradient_edge(net[0].weight).node
    used: list[Tensor] = []

    def use(parameter: Tensor) -> None:
        used.append(parameter.grad)
        parameter.grad = None

    model = weighted()(net)
    net[2].weight.register_post_accumulate_grad_hook(use)
    model.local_weight(1 if dist.get_rank() else 2)
    with model.no_sync():
        mse_loss(model(x), y).backward()
    assert net[2].weight.grad is None and node.variable is net[0].weight
    world_size, rank = dist.get_world_size(), dist.get_rank()
    factor = (1 if rank else 2) * world_size / (world_size + 1)
    found = [net[0].weight.grad, *used]
    return furthest(found, [reference[0].weight.grad, factor * reference[2].weight.grad])


@case
def memory_of_gradients() -> float:
    """What is multiplied on its way to a bucket has no copy, and its memory takes the average."""
    net = network()
    memory: dict[Tensor, int] = {}
    for parameter in net.parameters():
        parameter.register_hook(
            lambda gradient, key=parameter: memory.update({key: gradient.data_ptr()})
        )
    model = weighted()(net)
    model.local_weight(dist.get_rank())
    model(torch.randn(2, 6)).sum().backward()
    large = [p for p in net.parameters() if p.numel() > weighted_buckets._SMALL_NUMEL]
    assert len(large) == 2
    assert all(parameter.grad.data_ptr() == memory[parameter] for parameter in large)
    return 0.0


def furthest_of_passes(as_views: bool, between: str, meddle: str | None) -> float:
    rank, sizes = dist.get_rank(), CHUNK_SIZES[dist.get_world_size()]
    start = sum(sizes[:rank])
    torch.manual_seed(0)
    reference = network()
    model = weighted(gradient_as_bucket_view=as_views)(copy.deepcopy(reference))
    for net in (reference, model):
        for parameter in net.parameters():
            if meddle == "hook":
                parameter.register_hook(lambda gradient: 2 * gradient)
            elif meddle == "clone":
                parameter.register_hook(lambda gradient: gradient.clone())
            elif meddle == "post":
                parameter.register_post_accumulate_grad_hook(double)
    off = 0.0
    for number in range(5):
        x, y = (tensor[9 * number : 9 * number + 9] for tensor in regression_data(45).tensors)
        own = slice(start, start + sizes[rank])
        model.local_weight(sizes[rank])
        for net, inputs, targets in ((reference, x, y), (model, x[own], y[own])):
            if between != "kept" or number < 3:
                net.zero_grad(set_to_none=between == "none" or number < 3)
            mse_loss(net(inputs), targets).backward()
        off = max(off, furthest(gradients(model), gradients(reference)))
    return off


@case
def wrapped_again() -> float:
    """As after unfreezing layers: old wrappers' weights are gone, whether they are still there."""
    kept: list[nn.Module] = []

    def wrap(net: nn.Module) -> nn.Module:
        for _ in range(2):
            old = weighted()(net)
            old.local_weight(dist.get_rank() + 5)
            with old.no_sync():
                old(torch.randn(2, 6)).sum().backward()
            old.zero_grad()
            kept[:] = [old]
        return weighted()(net)

    return compared(network, regression_data(26), samples, wrap, accumulation=2)


@case
def a_pass_after_one_that_fails() -> float:
    """What the one has left to do is not done to the other's gradients."""
    alone, _ = dist.new_subgroups(group_size=1)  # nobody waits for what is left undone
    net = nn.Linear(6, 3, bias=False)
    x = torch.randn(2, 6)
    expected = torch.autograd.grad(net(x).sum(), net.weight)[0]
    model = DistributedDataParallel(net, process_group=alone)
    weight_gradients(model, dist.group.WORLD).local_weight(3 if dist.get_rank() else 1)
    handle = get_gradient_edge(net.weight).node.register_prehook(lambda _: 1 / 0)
    try:
        model(x).sum().backward()
    except ZeroDivisionError:
        handle.remove()
    net.weight.grad = torch.zeros_like(net.weight)
    net(x).sum().backward()
    return furthest([net.weight.grad], [model.local_weight.share.factor * expected])


@case
def parameters_of_two_models() -> float:
    shared = nn.Linear(6, 3)
    first, second = (weighted()(nn.Sequential(shared, nn.Tanh())) for _ in range(2))
    second.local_weight(1)
    try:
        first.local_weight(1)
    except DistributedError as error:
        assert "weighted by another one" in str(error)
        return 0.0
    raise AssertionError("two models with weights of their own")


@case
def copies_and_the_bare_module() -> float:
    """Copies have no weights until they get some; the module alone has none."""
    net = network()
    ddp = weighted()(net)
    pickle.loads(pickle.dumps(ddp))
    other = copy.deepcopy(ddp)
    try:
        other.local_weight(1)
    except DistributedError as error:
        assert "call weight_gradients with it" in str(error)
    else:
        raise AssertionError("a copy with weights")
    weight_gradients(other)
    x = torch.randn(3, 6)
    expected = copy.deepcopy(net)
    expected(x).square().sum().backward()
    del ddp, other
    off = 0.0
    for has_nodes in (False, True):
        old = weighted()(net)
        old.local_weight(dist.get_rank() + 5)
        old(x).square().sum().backward()
        net.zero_grad()
        others = [DistributedDataParallel(net)] if has_nodes else []  # keep those of autograd
        del old
        gc.collect()
        net(x).square().sum().backward()
        off = max(off, furthest(gradients(net), gradients(expected)))
        net.zero_grad()
        others.clear()
    return off


@case
def evaluation_between() -> float:
    """A pass without gradients, after the forward pass and before the backward pass."""

    class Peeking(nn.Module):
        def __init__(self, ddp: nn.Module) -> None:
            super().__init__()
            self.ddp, self.local_weight = ddp, ddp.local_weight

        def forward(self, x: Tensor) -> Tensor:
            output = self.ddp(x)
            with torch.no_grad():
                self.ddp(x)
            return output

    return compared(network, regression_data(26), samples, lambda net: Peeking(weighted()(net)))


@case
def nothing_counts() -> float:
    """All ranks without samples: gradients of zero, not NaN."""
    ddp = weight_gradients(DistributedDataParallel(network()))
    ddp.local_weight(0)
    mse_loss(ddp(torch.zeros(0, 6)), torch.zeros(0, 3)).backward()
    found = gradients(ddp)
    return furthest(found, map(torch.zeros_like, found))


@case
def weights_that_cannot_be_used() -> float:
    plain = DistributedDataParallel(network())
    ddp = weight_gradients(DistributedDataParallel(network()))
    try:
        ddp(torch.ones(2, 6)).sum().backward()
    except DistributedError as error:
        assert "call model.local_weight(n) before backward" in str(error)
    else:
        raise AssertionError("no weight was told")
    for n, kind in ((-1, ValueError), (float("nan"), ValueError), ("3", TypeError)):
        try:
            ddp.local_weight(n)
        except kind as error:
            assert "n must be" in str(error)
        else:
            raise AssertionError(n)
    models = [network(), nn.DataParallel(network())]
    if dist.get_world_size() == 2:  # once is enough: importing the compiler takes seconds
        models.append(torch.compile(plain))
    for model in models:
        try:
            weight_gradients(model)
        except TypeError as error:
            assert "DistributedDataParallel or fully_shard" in str(error)
        else:
            raise AssertionError(type(model))
    try:
        weight_gradients(plain, timeout=300)
    except TypeError as error:
        assert "timedelta(minutes=5), got 300" in str(error)
    else:
        raise AssertionError("a timeout of some unit")
    try:
        weight_gradients(ddp)
    except ValueError as error:
        assert "weights already" in str(error)
    else:
        raise AssertionError("weighted twice")
    dist.barrier()
    return 0.0


@case
def defaults_from_the_process_group() -> float:
    sizes = split_ranks(9, rank0_bsz=1)
    assert len(sizes) == dist.get_world_size()
    sampler = BalancedBatchSampler(range(9), 9, sizes, shuffle=False)
    assert (sampler.rank, sampler.world_size) == (dist.get_rank(), dist.get_world_size())
    start = sum(sizes[: dist.get_rank()])
    assert list(sampler) == [list(range(start, start + sizes[dist.get_rank()]))]
    return 0.0


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch.compile's own
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results: dict[str, float | str] = {}
    weighted_buckets._SMALL_NUMEL = 8  # so that most biases are small, and the rest is not
    for name, measure in CASES.items():
        try:
            off: float | str = measure()
        except Exception:
            off = traceback.format_exc()
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, off)
        said = [
            f"rank {rank}: {text}" for rank, text in enumerate(everywhere) if isinstance(text, str)
        ]
        # Not max(), which passes over what is not a number.
        results[name] = "\n".join(said) or float(torch.tensor(everywhere).max())
    if dist.get_rank() == 0:
        results["master"] = os.environ["MASTER_ADDR"]
        Path(sys.argv[1]).write_text(json.dumps(results))
    gc.collect()  # no model outlives its group, so that gloo's threads end while Python runs
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
