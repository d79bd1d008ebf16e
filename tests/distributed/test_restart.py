"""torchrun names a killed rank, and training resumes with all ranks.

It runs this file: one epoch, in which rank 1 is killed once, in its third step.
"""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import balanced_dp
from balanced_dp.distributed import BalancedBatchSampler, EmptyBatches, scale_loss, split_ranks

NUM_SAMPLES, BATCH_SIZE, SEED = 61, 8, 5


def start() -> tuple[TensorDataset, nn.Module]:
    """Return the data and the model, which are the same on all ranks."""
    torch.manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64)
    return TensorDataset(torch.arange(NUM_SAMPLES), x), nn.Linear(4, 4, dtype=torch.float64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = mse_loss(model(x), x.roll(1, dims=1))
    (scale_loss(loss, len(x)) if dist.is_initialized() else loss).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(checkpoint: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    data, net = start()
    ddp = DistributedDataParallel(net)
    optimizer = sgd(ddp)
    sizes = split_ranks(BATCH_SIZE, rank0_bsz=1)
    sampler = BalancedBatchSampler(data, BATCH_SIZE, sizes, seed=SEED)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=EmptyBatches(data), num_workers=1)
    seen: list[int] = []
    if checkpoint.exists():
        state = torch.load(checkpoint)
        ddp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
        seen = state["seen"]
    is_faulty = dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for num_batches, (index, x) in enumerate(loader, 1):
        if is_faulty and num_batches == 3:
            net.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        step(ddp, optimizer, x)
        everyone: list[list[int]] = [[] for _ in sizes]
        dist.all_gather_object(everyone, index.tolist())
        seen = seen + [i for part in everyone for i in part]
        if dist.get_rank() == 0:
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


@pytest.mark.slow
def test_a_restart_resumes_with_each_sample_seen_once(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    options = ("--max-restarts", "1", "--nproc-per-node", "2")
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(balanced_dp.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        # Otherwise restarts share the store, and their processes find addresses of earlier ones
        # (pytorch/pytorch#135712, and so in torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    command = [*torchrun, *options, __file__, str(checkpoint)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"exitcode: -9\) local_rank: 1 ", done.stderr), done.stderr

    data, net = start()
    optimizer = sgd(net)
    sampler = BalancedBatchSampler(data, BATCH_SIZE, (BATCH_SIZE,), rank=0, world_size=1, seed=SEED)
    seen = []
    for indices in sampler:
        step(net, optimizer, data[indices][1])
        seen += indices
    resumed = torch.load(checkpoint)
    assert sorted(resumed["seen"]) == list(range(NUM_SAMPLES))
    assert resumed["seen"] == seen
    model = {name.removeprefix("module."): weight for name, weight in resumed["model"].items()}
    torch.testing.assert_close(model, dict(net.state_dict()), rtol=0, atol=1e-10)
    torch.testing.assert_close(resumed["optimizer"], optimizer.state_dict(), rtol=0, atol=1e-10)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
