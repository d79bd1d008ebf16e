"""Each class of docs/migration.md next to ours: split, loss and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from balanced_dp import (
    ArgumentTypeError,
    BalancedCriterion,
    BalancedDataParallel,
    balanced_data_parallel,
    emulate_devices,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* sets (net.)?seen in forward")


# A step on one device and on several emulated ones.


class Net(nn.Module):
    """Gives outputs and notes the sizes of its chunks; with targets it gives their mean loss."""

    def __init__(self, dim=0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.dim = dim
        self.seen = []

    def forward(self, x, y=None, scale=1.0, keepdim=False):
        self.seen.append(x.size(self.dim))
        output = self.layers(x) * scale
        if y is None:
            return output
        loss = F.mse_loss(output, y)
        return loss[None] if keepdim else loss


def data(*batch):
    return torch.randn(*batch, 4).double(), torch.randn(*batch, 3).double()


def outer_loss(x, y):
    """Returns a step whose loss is of the gathered outputs."""

    def loss_of(model):
        output = model(x)
        return F.mse_loss(output, y.to(output.device))

    return loss_of


def inner_loss(x, y):
    """Returns a step whose loss the model computes, as recipes take its mean."""
    return lambda model: model(x, y).mean()


def one_device(net, loss_of):
    net = copy.deepcopy(net)
    loss = loss_of(net)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in net.parameters()]


def ours(net, num_devices, gpu0_bsz, loss_of, **options):
    """Returns the chunk sizes, too, of a BalancedDataParallel on emulated devices."""
    with emulate_devices(num_devices) as devices:
        model = BalancedDataParallel(gpu0_bsz, copy.deepcopy(net).to(devices[0]), **options)
        loss = loss_of(model)
        loss.backward()
        gradients = [parameter.grad.cpu() for parameter in model.parameters()]
        found, sizes = (loss.detach().cpu(), gradients), model.chunk_sizes
        del model, loss
    return sizes, found


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize(("batch_size", "num_devices"), [(16, 4), (10, 4), (10, 8), (9, 4)])
def test_data_parallel(batch_size, num_devices):
    net, (x, y) = Net(), data(batch_size)
    loss_of = outer_loss(x, y)
    whole = one_device(net, loss_of)
    theirs = tuple(map(len, x.chunk(num_devices)))
    for gpu0_bsz in (batch_size, 1):
        chunk_sizes, step = ours(net, num_devices, gpu0_bsz, loss_of)
        active = tuple(size for size in chunk_sizes if size)
        assert (active == theirs) == (gpu0_bsz == batch_size)
        assert chunk_sizes[0] == min(gpu0_bsz, theirs[0])
        assert_same(step, whole)


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("gpu0_bsz", [1, 16])
def test_data_parallel_as_a_function(gpu0_bsz):
    x, y = data(10)
    net, options = Net(), {"scale": 2.0}
    whole = one_device(net, lambda model: F.mse_loss(model(x, **options), y))
    theirs = map(len, x.chunk(4))

    def loss_of(model):
        output = balanced_data_parallel(gpu0_bsz, model.module, x, module_kwargs=options)
        assert sorted(model.module.seen) == sorted(theirs if gpu0_bsz == 16 else (1, 3, 3, 3))
        return F.mse_loss(output, y.to(output.device))

    assert_same(ours(net, 4, gpu0_bsz, loss_of)[1], whole)


XL, REPOSITORY = "Transformer-XL's BalancedDataParallel", "the repository Balanced-DataParallel"
LISTS = "CornerNet's and CenterNet's DataParallel"


@pytest.mark.parametrize(
    ("whose", "batch_size", "num_devices", "gpu0_bsz", "weights", "found"),
    [
        (XL, 32, 4, 2, None, (2, 10, 10, 10)),
        (XL, 4, 3, 1, None, (1, 2, 1)),  # theirs: 2, 2
        (XL, 9, 4, 2, None, (2, 3, 2, 2)),  # theirs: 3, 3, 3
        (REPOSITORY, 158, 6, 1, None, (1, 32, 32, 31, 31, 31)),
        (REPOSITORY, 9, 4, 0, None, (0, 3, 3, 3)),  # theirs: a chunk fewer than there are devices
        (LISTS, 114, 4, 18, None, (18, 32, 32, 32)),
        (LISTS, 107, 4, 18, None, (18, 30, 30, 29)),  # the last batch is smaller
        (LISTS, 28, 3, None, (4, 8, 16), (4, 8, 16)),
        (LISTS, 21, 3, None, (4, 8, 16), (3, 6, 12)),
    ],
)
def test_other_rules(whose, batch_size, num_devices, gpu0_bsz, weights, found):
    """The batches of Transformer-XL's script are in dimension 1, and it has unreduced losses."""
    if whose == XL:
        net, (x, y), dim = Net(dim=1), data(5, batch_size), 1

        def loss_of(model):
            output = model(x)
            return F.mse_loss(output, y.to(output.device), reduction="none").mean()
    else:
        net, loss_of, dim = Net(), inner_loss(*data(batch_size)), 0
    sizes, step = ours(net, num_devices, gpu0_bsz, loss_of, dim=dim, device_weights=weights)
    assert sizes == found
    assert_same(step, one_device(net, loss_of))


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("gpu0_bsz", [1, 3])
@pytest.mark.parametrize("num_ignored", [0, 2])
def test_outputs_that_stay(gpu0_bsz, num_ignored):
    """Theirs is the mean of the devices' losses, whatever each of them is a mean over."""
    x, _ = data(10)
    y = torch.arange(10) % 3
    y[:num_ignored] = -100
    criterion, net = nn.CrossEntropyLoss(), Net()
    found, step = ours(
        net, 4, gpu0_bsz, lambda model: BalancedCriterion(criterion)(model(x), y), gather=False
    )
    assert found == ((1, 3, 3, 3) if gpu0_bsz == 1 else (3, 3, 3, 1))
    assert_same(step, one_device(net, lambda model: criterion(model(x), y)))


def test_an_optimizer():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = BalancedDataParallel(1, net, ["cpu"] * 4)
    wrapped = {id(parameter) for parameter in model.parameters()}
    assert wrapped == {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    with pytest.raises(ArgumentTypeError, match=r"module must be an nn\.Module, got SGD"):
        BalancedDataParallel(1, optimizer)
