"""torchrun names a killed rank, and training resumes with all ranks."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.functional import mse_loss

from balanced_dp.distributed import BalancedBatchSampler

from .launch import torchrun, wait_for
from .restarted import BATCH_SIZE, NUM_SAMPLES, SEED, sgd, start


@pytest.mark.slow
def test_a_restart_resumes_with_each_sample_seen_once(tmp_path):
    options = ("--standalone", "--max-restarts", "1")
    # Otherwise restarts share the store, and their processes find addresses of earlier ones
    # (pytorch/pytorch#135712, and so in torch 2.13).
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    checkpoint = tmp_path / "checkpoint"
    ranks = torchrun("restarted.py", [checkpoint], options, num_processes=2, **own_store)
    exit_code, output = wait_for(ranks)
    assert exit_code == 0, output
    assert re.search(r"exitcode: -9\) local_rank: 1 ", output), output

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
