"""Typical calls of the public API, for mypy; nothing here is run.

A call that mypy must reject has a ``type: ignore`` with the error's code: under ``--strict`` an
ignore that hides nothing is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from balanced_dp import (
    BalancedCriterion,
    BalancedDataParallel,
    MemoryLogger,
    MemoryProbe,
    Option,
    Report,
    Workload,
    balanced_data_parallel,
    distributed,
    emulate_devices,
    memory_breakdown,
    split_batch,
    split_by_weights,
    training_devices,
    tune,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)


def write(tag: str, value: float, step: int) -> None: ...


def train(x: Tensor, y: Tensor) -> None:
    with emulate_devices(4, memory="1GiB") as devices:
        model = BalancedDataParallel(2, Net().to(devices[0]))
        head: nn.Linear = model.module.head  # the type of the module is kept
        logger = MemoryLogger(model, write, every=10)
        with model.shared_weights(), model.memory.measure() as usage:
            cross_entropy(model(x), y).backward()
        logger.step()
        peaks: list[int | None] = [peak.peak_allocated_bytes for peak in usage.devices]
        uses = devices.memory_breakdown(devices[0])
    model.gpu0_bsz = "auto"
    model.gpu0_bsz = 3
    sizes: tuple[int, ...] = model.split(32)
    print(head, usage.imbalance, peaks, uses, sizes, memory_breakdown(model), model.chunk_sizes)


def every_option(module: nn.Module, x: Tensor) -> None:
    BalancedDataParallel("auto", module, device_ids=[0, 1], output_device="cpu", dim=1)
    with training_devices(2, memory=["1GiB", 2**30], symbolic=True) as devices:
        BalancedDataParallel(2, module.to(devices[0]), device_ids=devices)
    BalancedDataParallel(None, module, ["cuda:0", torch.device("cuda", 1)], device_weights=[1, 2.5])
    model = BalancedDataParallel(2, module, gather=False, broadcast=["table"], split=("mask",))
    criterion = BalancedCriterion(nn.CrossEntropyLoss())
    criterion(model(x), x).backward()
    BalancedCriterion(cross_entropy, loss_weight=lambda output, target: len(target))
    balanced_data_parallel(2, module, (x,), module_kwargs={"scale": 2})


def choose(workload: Workload) -> int:
    sizes = [*split_batch(32, 4, 2), *split_by_weights(32, [11, 24, 24], gpu0_bsz=4)]
    report: Report = tune(workload, sum(sizes), 4, [2**30] * 4, sweep=range(9), emulate=True)
    chosen: Option = report.best
    snapshot = MemoryProbe(["cuda:0"]).snapshot()
    print([memory.label for memory in snapshot], chosen.chunk_sizes)
    return report.largest_batch(chosen).batch_size


def workload() -> Workload:
    return Workload(
        Net,
        lambda n: ((torch.ones(n, 8),), {}, torch.zeros(n, dtype=torch.long)),
        cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        precision=torch.bfloat16,
    )


def ranks(data: TensorDataset, model: BalancedDataParallel[Net]) -> None:
    sampler = distributed.BalancedBatchSampler(data, 32, distributed.split_ranks(32, rank0_bsz=2))
    collate_fn = distributed.EmptyBatches(data)
    ddp = distributed.convert(model, bucket_cap_mb=10)
    sampler.set_epoch(1)
    for x, y in DataLoader(data, batch_sampler=sampler, collate_fn=collate_fn):
        total = distributed.count_all_ranks(len(x))
        distributed.scale_loss(cross_entropy(ddp(x), y), len(x), total=total).backward()
    sampler.load_state_dict(sampler.state_dict())


def wrong(module: nn.Module, model: BalancedDataParallel[Net]) -> None:
    BalancedDataParallel("2", module)  # type: ignore[arg-type]
    BalancedDataParallel(2, module, gather_outputs=False)  # type: ignore[call-arg]
    BalancedDataParallel(2, module, scalar_outputs="average")  # type: ignore[arg-type]
    model.gpu0_bsz = 2.5  # type: ignore[assignment]
    split_batch(32, 4)  # type: ignore[call-arg]
    distributed.scale_loss(1.0, 2)  # type: ignore[arg-type]
