"""Is run by torchrun: trains one epoch, and one rank is lost in the middle of it.

Arguments: the checkpoint, and how rank 1 is lost in its third step: "killed" while it computes
gradients, "stuck" before it tells its weight, "restarted" (killed, the first time only), "not".
"""

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

from balanced_dp.distributed import (
    BalancedBatchSampler,
    EmptyBatches,
    split_ranks,
    weight_gradients,
)

NUM_SAMPLES = 61
PATIENCE_S = {"stuck": 5}  # for weights; elsewhere as long as processes take to start


def main(checkpoint: Path, fault: str) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = TensorDataset(torch.arange(NUM_SAMPLES), torch.randn(NUM_SAMPLES, 4))
    timeout = datetime.timedelta(seconds=PATIENCE_S.get(fault, 60))
    ddp = weight_gradients(DistributedDataParallel(nn.Linear(4, 4)), timeout=timeout)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    sizes = split_ranks(8, world_size, rank0_bsz=1)
    sampler = BalancedBatchSampler(data, 8, sizes, seed=5)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=EmptyBatches(data), num_workers=1)
    seen: list[int] = []
    if checkpoint.exists():
        state = torch.load(checkpoint)
        ddp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        seen = state["seen"]
    is_faulty = fault != "not" and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for num_batches, (index, x) in enumerate(loader, 1):
        if is_faulty and num_batches == 3:
            if fault == "stuck":
                signal.pause()
            ddp.module.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        ddp.local_weight(len(x))
        loss = mse_loss(ddp(x), x.roll(1, dims=1))
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
    main(Path(sys.argv[1]), sys.argv[2])
