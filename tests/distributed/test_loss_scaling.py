"""Test that ranks train as one process with the whole batch does.

Also test the conversion of a ``BalancedDataParallel`` for ranks.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from balanced_dp import ArgumentError, BalancedDataParallel
from balanced_dp.distributed import convert, count_all_ranks, scale_loss
from balanced_dp.distributed.to_ddp import _device_of_this_rank

from ..modules import assert_same_gradients
from ..processes import run_ranks
from ..versions import since_torch
from . import worker

TOLERANCE = 1e-10


@pytest.mark.slow
def test_ranks_train_as_one_process_does(tmp_path):
    """Run all cases of ``worker.py``, in processes that are started once."""
    path = tmp_path / "results.json"
    exit_code, output = run_ranks(worker.__file__, path, num_processes=worker.NUM_RANKS)
    assert exit_code == 0, output
    results = json.loads(path.read_text())
    assert len(results) == len(worker.CASES) + len(worker.ON_TWO)
    wrong = {name: off for name, off in results.items() if not isinstance(off, float)}
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())
    # NaN is not below the limit either.
    assert {name: off for name, off in results.items() if not off < TOLERANCE} == {}


@pytest.fixture(scope="module")
def alone():
    """Make a process group that consists of this process only.

    It is made once for all tests of this file, since torch 2.5 may hang when a group is destroyed.
    """
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


def test_a_loss_of_nothing_beside_another(alone):
    """Gradients of the other pass the same nodes."""
    net, (x, y) = worker.regression(), worker.numbers(4)
    reference = copy.deepcopy(net)
    output = net(x)
    nothing = (output * 0).sum() / torch.zeros(())
    (scale_loss(nothing, 0, total=4) + scale_loss(mse_loss(output, y), 4)).backward()
    mse_loss(reference(x), y).backward()
    assert_same_gradients(net, reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_of_the_loss_stays(alone, dtype):
    for count, total in ((2.0, torch.tensor(4)), (torch.tensor(2), count_all_ranks(4))):
        scaled = scale_loss(torch.tensor(3.0, dtype=dtype), count, total=total)
        assert (scaled, scaled.dtype) == (1.5, dtype)


def test_a_count_above_the_total(alone):
    with pytest.raises(ArgumentError, match="count is 2, but total is 1; total must be the sum"):
        scale_loss(torch.ones(()), 2, total=1)


def test_the_device_of_a_local_rank(emulated, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert _device_of_this_rank(emulated) == emulated[2]
    assert _device_of_this_rank(emulated[:1]) == emulated[0]  # the only visible one
    assert _device_of_this_rank([torch.device("cpu")] * 2) == torch.device("cpu")
    with pytest.raises(ArgumentError, match=r"the local rank is 2, but the model has 2 dev"):
        _device_of_this_rank(emulated[:2])


def test_converting_keeps_what_there_is(alone):
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net[1].eval()
    balanced = BalancedDataParallel(1, net, device_ids=["cpu"] * 4)
    calls: list[str] = []
    net.register_forward_pre_hook(lambda *_: calls.append("module"))
    net[0].weight.register_hook(lambda gradient: calls.append("parameter"))
    parameters = list(balanced.parameters())
    before = copy.deepcopy(balanced.state_dict())
    ddp = convert(balanced, bucket_cap_mb=1)
    assert ddp.bucket_bytes_cap == 2**20 and ddp.gradient_as_bucket_view
    assert [m.training for m in (ddp, net, net[0], net[1])] == [True, True, True, False]
    assert all(a is b for a, b in zip(parameters, ddp.parameters(), strict=True))
    ddp(torch.randn(4, 6)).sum().backward()
    assert sorted(calls) == ["module", "parameter"], calls
    ddp.load_state_dict(before)  # checkpoints load in both directions
    other = BalancedDataParallel(1, copy.deepcopy(net), device_ids=["cpu"] * 4)
    other.load_state_dict(ddp.state_dict())
    balanced.eval()
    assert balanced(torch.randn(8, 6)).shape == (8, 3)  # the old wrapper still runs


@since_torch("2.6")  # earlier ones have no backend for emulated devices
def test_a_spread_model_on_one_device(alone, emulate):
    devices, reference = emulate(4, as_cuda=True), worker.tagger()
    net = copy.deepcopy(reference).to(devices[0])
    balanced = BalancedDataParallel(None, net, devices, spread=True)
    assert len({p.device for p in net.parameters()}) > 1
    ddp = convert(balanced, devices[1])
    assert not net._forward_pre_hooks
    x, y = worker.token_labels(9)
    for model in (ddp, reference):  # the inputs of ddp are moved
        output = model(x)
        scale_loss(*worker.tokens(output, y.to(output.device))).backward()
    assert_same_gradients(net, reference)
