"""Training on several ranks is equivalent to training on one with the whole batch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from balanced_dp import ArgumentError
from balanced_dp.distributed import count_all_ranks, scale_loss

from ..processes import run_ranks
from ..versions import since_torch
from . import worker

TOLERANCE = 1e-10


def test_ranks_train_as_one_process_does(tmp_path):
    """Run all cases of ``worker.py`` in processes that are started once."""
    path = tmp_path / "results.json"
    exit_code, output = run_ranks(worker.__file__, path, num_processes=worker.NUM_RANKS)
    assert exit_code == 0, output
    results = json.loads(path.read_text())
    assert len(results) == len(list(worker.cases()))
    wrong = {name: off for name, off in results.items() if not isinstance(off, float)}
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())
    # NaN is not below the limit either.
    assert {name: off for name, off in results.items() if not off < TOLERANCE} == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
@since_torch("2.13")  # which names the threads
def test_no_thread_outlives_the_process_group():
    """Where it did, Python aborted now and then: terminate called without an active exception."""
    code = """
from pathlib import Path
import torch, torch.distributed as dist
from balanced_dp.distributed import scale_loss

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
scale_loss(model(torch.ones(2, 3)).sum(), 2).backward()
torch.optim.SGD(model.parameters()).step()
threads = lambda: [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert any("gloo" in name for name in threads()), threads()
del model
dist.destroy_process_group()
assert not any("gloo" in name for name in threads()), threads()
"""
    # Not a fork of a process that has imported what optimizers import.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def alone():
    """Make a process group of this process only, once: torch 2.5 may hang where it ends one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x: cross_entropy(x, torch.full((4,), worker.IGNORED)),
        lambda x: (x * torch.zeros(4, 1)).sum() / torch.zeros(4).sum(),
        lambda x: x[:0].mean(),
        lambda x: (x / 0).exp().sum(),
        lambda x: (x.to_sparse() * 0).sum() / torch.zeros(()),
    ],
    ids=["ignored labels", "a mask", "no rows", "infinite", "a sparse step"],
)
def test_a_loss_of_nothing_has_zero_gradients(alone, loss_of, dtype):
    net = torch.nn.Sequential(torch.nn.Embedding(7, 5, sparse=True), torch.nn.Linear(5, 3))
    loss = loss_of(net.to(dtype)(torch.arange(4)))
    assert not loss.isfinite()
    scaled = scale_loss(loss, 0)
    assert (scaled, scaled.dtype) == (0, loss.dtype)
    scaled.backward()
    assert not any(p.grad.to_dense().count_nonzero() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_of_the_loss_stays(alone, dtype):
    for count, total in ((2.0, torch.tensor(4)), (torch.tensor(2), count_all_ranks(4))):
        scaled = scale_loss(torch.tensor(3.0, dtype=dtype), count, total=total)
        assert (scaled, scaled.dtype) == (1.5, dtype)


def test_a_count_above_the_total(alone):
    with pytest.raises(ArgumentError, match="count is 2, but total is 1; total must be the sum"):
        scale_loss(torch.ones(()), 2, total=1)
