"""Script for torchrun: training of one epoch, in which rank 1 is killed once, in its third step."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from balanced_dp.distributed import BalancedBatchSampler, EmptyBatches, scale_loss, split_ranks

NUM_SAMPLES = 61
BATCH_SIZE = 8
SEED = 5


def start() -> tuple[TensorDataset, nn.Module]:
    """Return the data and the model, which are the same on all ranks."""
    torch.manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64)
    return TensorDataset(torch.arange(NUM_SAMPLES), x), nn.Linear(4, 4, dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def main(checkpoint: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data, net = start()
    ddp = DistributedDataParallel(net)
    optimizer = sgd(ddp)
    sampler = BalancedBatchSampler(
        data, BATCH_SIZE, split_ranks(BATCH_SIZE, rank0_bsz=1), seed=SEED
    )
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=EmptyBatches(data), num_workers=1)
    seen: list[int] = []
    if checkpoint.exists():
        state = torch.load(checkpoint)
        ddp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        seen = state["seen"]
    is_faulty = rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for num_batches, (index, x) in enumerate(loader, 1):
        if is_faulty and num_batches == 3:
            net.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss = scale_loss(mse_loss(ddp(x), x.roll(1, dims=1)), len(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        everyone: list[list[int]] = [[] for _ in range(world_size)]
        dist.all_gather_object(everyone, index.tolist())
        seen = seen + [i for part in everyone for i in part]
        if rank == 0:
            state = {
                "model": ddp.state_dict(),
                "optimizer": optimizer.state_dict(),
                "sampler": sampler.state_dict(num_batches),
                "seen": seen,
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    del ddp  # before its group, so that gloo's threads end while Python runs
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
