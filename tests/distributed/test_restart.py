"""torchrun names a killed rank, and training resumes with all ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import balanced_dp
from balanced_dp.distributed import BalancedBatchSampler

from . import restarted
from .restarted import BATCH_SIZE, NUM_SAMPLES, SEED, sgd, start


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
    command = [*torchrun, *options, restarted.__file__, str(checkpoint)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"exitcode: -9\) local_rank: 1 ", done.stderr), done.stderr

    data, net = start()
    optimizer = sgd(net)
    sampler = BalancedBatchSampler(data, BATCH_SIZE, (BATCH_SIZE,), rank=0, world_size=1, seed=SEED)
    seen = []
    for indices in sampler:
        _, x = data[indices]
        optimizer.zero_grad()
        mse_loss(net(x), x.roll(1, dims=1)).backward()
        optimizer.step()
        seen += indices
    resumed = torch.load(checkpoint)
    assert sorted(resumed["seen"]) == list(range(NUM_SAMPLES))
    assert resumed["seen"] == seen
    model = {name.removeprefix("module."): weight for name, weight in resumed["model"].items()}
    torch.testing.assert_close(model, dict(net.state_dict()), rtol=0, atol=1e-10)
    torch.testing.assert_close(resumed["optimizer"], optimizer.state_dict(), rtol=0, atol=1e-10)
