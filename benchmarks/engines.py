"""Draws the guide's picture: where parameters, gradients and optimizer state are, by engine.

`python -m benchmarks.engines` writes docs/engines.svg, for GPT-2 large, and prints what a rank of
`fully_shard` needs for GPT-2 small. It measures on emulated devices that keep shapes only.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from balanced_dp import Option
from balanced_dp.emulation.ledger import Label
from balanced_dp.emulation.tensor import EmulatedTensor, allocations_of, set_label
from balanced_dp.tuning.open_devices import open_devices
from balanced_dp.tuning.step import measure_step
from balanced_dp.tuning.workload import Workload, find_workload
from balanced_dp.units import format_bytes

from .before_and_after import draw_panels

PATH = Path(__file__).parent.parent / "docs" / "engines.svg"


def measured(batch_size: int = 12) -> dict[str, Option]:
    """Returns a step of each engine on four devices; a rank of DDP is one device with its share."""
    workload, share = find_workload("gpt2-large"), batch_size // 4
    with open_devices(4, emulate=True) as devices:
        found = {
            "nn.DataParallel's split": measure_step(workload, batch_size, share, devices),
            "gpu0_bsz=0,\nloss on each device": measure_step(
                workload, batch_size, 0, devices, gather=False
            ),
            "spread=True,\nloss on each device": measure_step(
                workload, batch_size, share, devices, gather=False, spread=True
            ),
        }
    with open_devices(1, emulate=True) as devices:
        rank = measure_step(workload, share, share, devices)
    found["DistributedDataParallel,\ngradient_as_bucket_view=True"] = of_ranks(rank, 4)
    found["fully_shard"] = of_ranks(sharded("gpt2-large", share, 4), 4)
    return found


def of_ranks(rank: Option, num_ranks: int) -> Option:
    """Returns what all ranks take, from what one takes."""
    return replace(
        rank,
        chunk_sizes=rank.chunk_sizes * num_ranks,
        peak_bytes=rank.peak_bytes * num_ranks,
        uses=rank.uses * num_ranks,
    )


def sharded(name: str, share: int, num_ranks: int) -> Option:
    """Returns the second step of one rank of `fully_shard`, each layer a group of its own.

    The other ranks need not be there: in a fake process group, collectives move nothing, but take
    the memory that they would.
    """
    with open_devices(1, emulate=True) as [device], one_of_ranks(num_ranks):
        backward, optimizer, uses = sharded_peaks(find_workload(name), share, num_ranks, device)
        gc.collect()  # modules and their hooks refer to each other
    return Option(
        gather=True,
        spread=True,
        gpu0_bsz=None,
        device_weights=None,
        chunk_sizes=(share,),
        peak_bytes=(max(backward, optimizer),),
        uses=(uses,),
        seconds=0.0,
    )


def sharded_peaks(
    workload: Workload, share: int, num_ranks: int, device: torch.device
) -> tuple[int, int, dict[str, int]]:
    """Returns the peaks of backward and of the optimizer's step, and what the first is made of."""
    with torch.device(device):
        module = workload.model()
    mesh = DeviceMesh(device.type, list(range(num_ranks)))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    model = fully_shard(module, mesh=mesh)
    optimizer = workload.make_optimizer(model.parameters())
    memory = torch.get_device_module(device)
    for _ in range(2):
        args, _kwargs, target = workload.make_batch(share)
        optimizer.zero_grad()
        memory.reset_peak_memory_stats()
        workload.loss(model(*(arg.to(device) for arg in args)), target.to(device)).backward()
        backward = memory.max_memory_allocated()
        label(model, optimizer)
        uses = memory.memory_breakdown().peak
        memory.reset_peak_memory_stats()
        optimizer.step()
    return backward, memory.max_memory_allocated(), uses


@contextlib.contextmanager
def one_of_ranks(num_ranks: int) -> Iterator[None]:
    """Makes this process the first of many ranks, whose devices are emulated.

    Emulated devices have no streams, and storages that do not change their size.
    """
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    names = ("Stream", "Event", "stream", "current_stream")
    streams = {name: mock.MagicMock() for name in names}
    with (
        mock.patch.multiple(torch.get_device_module("lazy"), create=True, **streams),
        mock.patch.object(_fsdp_param, "alloc_storage", lambda tensor: resize(tensor, 1)),
        mock.patch.object(_fsdp_param, "free_storage", lambda tensor: resize(tensor, 0)),
    ):
        yield
    dist.destroy_process_group()


def resize(tensor: EmulatedTensor, factor: int) -> None:
    for allocation in allocations_of(tensor):
        allocation.ledger.resize(allocation, factor * tensor.nbytes)


def label(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Labels the memory of sharded tensors, which emulated devices do not recognize."""
    parameters = list(model.parameters())
    uses = {
        Label.PARAMETER: parameters,
        Label.GRADIENT: [p.grad for p in parameters],
        Label.OPTIMIZER_STATE: [v for entry in optimizer.state.values() for v in entry.values()],
    }
    for use, tensors in uses.items():
        for tensor in tensors:
            set_label(getattr(tensor, "_local_tensor", tensor), use, set(Label))


def picture(found: dict[str, Option]) -> str:
    """Returns the picture, with a panel for each engine."""
    return draw_panels(found, size=(14.5, 4.4))


def largest_share(name: str, num_ranks: int, capacity: int) -> int:
    """Returns the most samples with which a rank of `fully_shard` takes at most `capacity`."""
    shares = range(1, 1000)
    return bisect.bisect(shares, capacity, key=lambda n: sharded(name, n, num_ranks).peak_bytes[0])


if __name__ == "__main__":
    PATH.write_text(picture(measured()))
    [peak] = sharded("gpt2-small", 8, 4).peak_bytes
    largest = 4 * largest_share("gpt2-small", 4, int(10.5 * 2**30))
    print(f"fully_shard: {format_bytes(peak)}; largest batch {largest}")
