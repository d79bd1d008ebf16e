"""What docs/migration.md says of each earlier way: how it cut a batch, how ours does, and that ours

has the loss and the gradients of the whole batch.
"""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from balanced_dp import (
    ArgumentTypeError,
    BalancedCriterion,
    BalancedDataParallel,
    GatherError,
    balanced_data_parallel,
    emulate_devices,
    split_batch,
    split_by_weights,
)
from benchmarks.stock_on_cpu import stock_on_cpu

from . import peers

PAGE = (Path(__file__).parent.parent / "docs" / "migration.md").read_text("utf-8")

PAIRS: set[str] = set()
"""Rows of the page's table that have a test."""

batch_sizes = st.integers(1, 500)
device_counts = st.integers(2, 16)

pytestmark = pytest.mark.filterwarnings("ignore:.* sets (net.)?seen in forward")


def pair(name):
    """Marks the test of a row of the page's table."""

    def mark(test):
        PAIRS.add(name)
        return test

    return mark


def test_every_row_of_the_table_has_a_test_and_a_section():
    rows = re.findall(r"^\| \[(.+)\]\(#(.+?)\) \|", PAGE, re.MULTILINE)
    table = PAGE.split("|---", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    assert len(rows) == len(table)
    assert {name.replace("`", "") for name, _ in rows} == PAIRS
    headings = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    assert [anchor for _, anchor in rows] == [
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
    ]


# A step on one device, on several emulated ones, and by torch's own DataParallel.


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


def stock(net, num_devices, loss_of):
    """Returns the chunk sizes, too, of torch's ``nn.DataParallel``, whose steps run on the CPU."""
    net = copy.deepcopy(net)
    model = constructed_without_accelerator(net)
    model.device_ids, model.output_device, model.dim = list(range(num_devices)), 0, 0
    model.src_device_obj = torch.device("cpu")
    with stock_on_cpu():
        loss = loss_of(model)
        loss.backward()
    sizes = sorted(net.seen, reverse=True)  # the threads' order is by chance
    return tuple(sizes), (loss.detach(), [parameter.grad for parameter in net.parameters()])


def constructed_without_accelerator(module):
    """Returns torch's own wrapper, which then looks neither for devices nor at the module."""
    namespace = importlib.import_module(nn.DataParallel.__module__)
    with mock.patch.object(namespace, "_get_available_device_type", lambda: None):
        return nn.DataParallel(module)


def ours(net, num_devices, gpu0_bsz, loss_of, **options):
    """Returns the chunk sizes, too, of a BalancedDataParallel on emulated devices."""

    def step(devices):
        model = BalancedDataParallel(gpu0_bsz, copy.deepcopy(net).to(devices[0]), **options)
        loss = loss_of(model)
        loss.backward()
        gradients = [parameter.grad.cpu() for parameter in model.parameters()]
        return model.chunk_sizes, (loss.detach().cpu(), gradients)

    with emulate_devices(num_devices) as devices:
        return step(devices)


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def weights_of_samples(num_devices, gpu0_bsz, batch_size, scalar_outputs):
    """Returns how much each sample counts in the mean of the replicas' losses, 1 for its part."""
    module = nn.Flatten(0)
    module.forward = lambda x: x.mean()
    x = torch.zeros(batch_size, 1, dtype=torch.double, requires_grad=True)
    devices = ["cpu"] * num_devices
    model = BalancedDataParallel(gpu0_bsz, module, devices, scalar_outputs=scalar_outputs)
    model(x).mean().backward()
    return x.grad.flatten() * batch_size


# The pairs.


@given(batch_sizes, device_counts)
def test_the_even_rule_is_torch_chunk_and_ours_at_the_even_share(batch_size, num_devices):
    chunks = torch.zeros(batch_size).chunk(num_devices)
    even = peers.even(batch_size, num_devices)
    assert even == tuple(map(len, chunks))
    ours = split_batch(batch_size, num_devices, -(-batch_size // num_devices))
    assert ours == even + (0,) * (num_devices - len(even))


@pair("nn.DataParallel")
@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize(("batch_size", "num_devices"), [(16, 4), (10, 4), (10, 8), (9, 4)])
def test_data_parallel(batch_size, num_devices):
    net, loss_of = Net(), outer_loss(*data(batch_size))
    whole = one_device(net, loss_of)
    theirs, stock_step = stock(net, num_devices, loss_of)
    assert theirs == peers.even(batch_size, num_devices)
    assert_same(stock_step, whole)
    for gpu0_bsz in (batch_size, 1):
        chunk_sizes, step = ours(net, num_devices, gpu0_bsz, loss_of)
        active = tuple(size for size in chunk_sizes if size)
        assert (active == theirs) == (gpu0_bsz == batch_size)
        assert chunk_sizes[0] == min(gpu0_bsz, theirs[0])
        assert_same(step, whole)


def test_a_vector_of_losses_is_refused_since_its_mean_would_not_be_weighted():
    x, y = data(10)
    net = Net()
    vector_of = lambda model: model(x, y, keepdim=True).mean()  # noqa: E731
    whole = one_device(net, vector_of)
    assert not torch.isclose(stock(net, 4, vector_of)[1][0], whole[0], rtol=1e-3)
    with pytest.raises(GatherError, match=r"return a mean without dimensions \(no unsqueeze\)"):
        ours(net, 4, 1, vector_of)
    assert_same(ours(net, 4, 1, inner_loss(x, y))[1], whole)


@pair("data_parallel, the function")
@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("gpu0_bsz", [1, 16])
def test_data_parallel_as_a_function(gpu0_bsz):
    """Torch's function takes the steps of its class, of which these are."""
    x, y = data(10)
    net, options = Net(), {"scale": 2.0}
    whole = one_device(net, lambda model: F.mse_loss(model(x, **options), y))
    theirs, stock_step = stock(net, 4, lambda model: F.mse_loss(model(x, **options), y))
    assert theirs == peers.even(10, 4)
    assert_same(stock_step, whole)

    def step(devices):
        module = copy.deepcopy(net).to(devices[0])
        output = balanced_data_parallel(gpu0_bsz, module, x, devices, module_kwargs=options)
        loss = F.mse_loss(output, y.to(devices[0]))
        loss.backward()
        gradients = [parameter.grad.cpu() for parameter in module.parameters()]
        return sorted(module.seen), (loss.detach().cpu(), gradients)

    with emulate_devices(4) as devices:
        sizes, found = step(devices)
    assert sizes == sorted(theirs if gpu0_bsz == 16 else (1, 3, 3, 3))
    assert_same(found, whole)


def test_the_function_without_an_accelerator():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    net, (x, _) = Net(), data(4)
    with pytest.raises(RuntimeError, match="device type could not be determined"):
        nn.parallel.data_parallel(net, x)
    assert torch.equal(balanced_data_parallel(1, net, x), net(x))


@given(batch_sizes, device_counts, st.integers(0, 600))
def test_transformer_xl_cuts_as_ours_or_gives_device_0_more_than_was_asked(
    batch_size, num_devices, gpu0_bsz
):
    theirs = peers.transformer_xl(batch_size, num_devices, gpu0_bsz)
    found = split_batch(batch_size, num_devices, gpu0_bsz)
    if (batch_size - gpu0_bsz) // (num_devices - 1) <= gpu0_bsz < -(-batch_size // num_devices):
        assert theirs[0] > gpu0_bsz == found[0]
    else:
        assert found == theirs + (0,) * (num_devices - len(theirs))


@pair("Transformer-XL's BalancedDataParallel")
@pytest.mark.parametrize(
    ("batch_size", "num_devices", "gpu0_bsz", "theirs", "is_mended"),
    [
        (32, 4, 2, (2, 10, 10, 10), False),
        (4, 3, 1, (2, 2), True),
        (9, 4, 2, (3, 3, 3), True),
    ],
)
def test_transformer_xl(batch_size, num_devices, gpu0_bsz, theirs, is_mended):
    """Its batches are in dimension 1, and the script takes the mean of unreduced losses."""
    assert peers.transformer_xl(batch_size, num_devices, gpu0_bsz) == theirs
    x, y = data(5, batch_size)
    net = Net(dim=1)

    def loss_of(model):
        output = model(x)
        return F.mse_loss(output, y.to(output.device), reduction="none").mean()

    chunk_sizes, step = ours(net, num_devices, gpu0_bsz, loss_of, dim=1)
    assert (chunk_sizes != theirs) == is_mended
    assert chunk_sizes[0] == gpu0_bsz
    assert_same(step, one_device(net, loss_of))


def test_transformer_xl_on_one_device():
    with pytest.raises(ZeroDivisionError):
        peers.transformer_xl(8, 1, 2)
    assert split_batch(8, 1, 2) == (8,)
    net, loss_of = Net(), outer_loss(*data(8))
    _, step = ours(net, 1, 2, loss_of)
    assert_same(step, one_device(net, loss_of))


@pair("the repository Balanced-DataParallel")
@pytest.mark.parametrize(
    ("batch_size", "num_devices", "gpu0_bsz", "theirs"),
    [
        (158, 6, 1, (1, 32, 32, 31, 31, 31)),
        (9, 4, 0, (3, 3, 3)),
    ],
)
def test_the_repository(batch_size, num_devices, gpu0_bsz, theirs):
    """The same rule; with 0 a chunk fewer than there are devices, where ours says 0."""
    assert peers.balanced_repository(batch_size, num_devices, gpu0_bsz) == theirs
    net, loss_of = Net(), inner_loss(*data(batch_size))
    chunk_sizes, step = ours(net, num_devices, gpu0_bsz, loss_of)
    assert chunk_sizes == (*([] if gpu0_bsz else [0]), *theirs)
    assert_same(step, one_device(net, loss_of))


@pytest.mark.parametrize(
    ("batch_size", "num_devices", "gpu0_bsz", "times"), [(158, 6, 1, 26), (114, 4, 18, 1.6)]
)
def test_an_unweighted_mean_counts_samples_on_device_0_too_often(
    batch_size, num_devices, gpu0_bsz, times
):
    arguments = (num_devices, gpu0_bsz, batch_size)
    assert weights_of_samples(*arguments, "stack")[0].item() == pytest.approx(times, rel=0.05)
    assert_same(weights_of_samples(*arguments, "mean"), torch.ones(batch_size).double())


chunk_lists = st.lists(st.integers(1, 64), min_size=2, max_size=8)


@given(chunk_lists, batch_sizes)
def test_a_fixed_list_fits_one_batch_size_and_weights_fit_all(chunk_sizes, batch_size):
    assert peers.fixed(sum(chunk_sizes), chunk_sizes) == tuple(chunk_sizes)
    assert split_by_weights(sum(chunk_sizes), chunk_sizes) == tuple(chunk_sizes)
    assume(batch_size != sum(chunk_sizes))
    with pytest.raises(ValueError, match="do not fit"):
        peers.fixed(batch_size, chunk_sizes)
    found = split_by_weights(batch_size, chunk_sizes)
    assert sum(found) == batch_size
    for size, weight in zip(found, chunk_sizes, strict=True):  # in proportion, but for rounding
        assert abs(size - batch_size * weight / sum(chunk_sizes)) < 1


@given(batch_sizes, device_counts, st.data())
def test_master_batch_size_is_gpu0_bsz_below_the_even_share(batch_size, num_devices, data):
    master = data.draw(st.integers(0, batch_size))
    theirs = peers.others_evenly(batch_size, num_devices, master)
    found = split_batch(batch_size, num_devices, master)
    if master * num_devices < batch_size:
        assert found == theirs
    assert found[0] <= theirs[0]
    assert split_by_weights(batch_size, theirs) == theirs


@pair("CornerNet's and CenterNet's DataParallel")
@pytest.mark.parametrize(
    ("chunk_sizes", "gpu0_bsz", "weights"),
    [
        ((18, 32, 32, 32), 18, None),
        ((4, 8, 16), None, (4, 8, 16)),
    ],
)
def test_fixed_lists(chunk_sizes, gpu0_bsz, weights):
    num_devices, options = len(chunk_sizes), {"device_weights": weights}
    for batch_size in (sum(chunk_sizes), sum(chunk_sizes) - 7):  # the last batch is smaller
        net, loss_of = Net(), inner_loss(*data(batch_size))
        found, step = ours(net, num_devices, gpu0_bsz, loss_of, **options)
        if batch_size == sum(chunk_sizes):
            assert found == peers.fixed(batch_size, chunk_sizes)
        else:
            with pytest.raises(ValueError, match="do not fit"):
                peers.fixed(batch_size, chunk_sizes)
            assert sum(found) == batch_size
        assert_same(step, one_device(net, loss_of))


@pair("PyTorch-Encoding's DataParallelModel")
@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("gpu0_bsz", [1, 3])
@pytest.mark.parametrize("num_ignored", [0, 2])
def test_outputs_that_stay(gpu0_bsz, num_ignored):
    """Their loss is the mean of the devices' losses, whatever each of them is a mean over."""
    x, _ = data(10)
    y = torch.arange(10) % 3
    y[:num_ignored] = -100
    criterion, net = nn.CrossEntropyLoss(), Net()
    whole = one_device(net, lambda model: criterion(model(x), y))
    sizes = peers.even(10, 4)
    assert sizes == (3, 3, 3, 1)
    losses = [
        criterion(net(x_chunk), y_chunk)
        for x_chunk, y_chunk in zip(x.split(sizes), y.split(sizes), strict=True)
    ]
    theirs = peers.unweighted_mean(losses)
    gradients = list(torch.autograd.grad(theirs, net.parameters()))
    assert not torch.isclose(theirs, whole[0], rtol=1e-3)
    assert not any(map(torch.allclose, gradients, whole[1]))

    found, step = ours(
        net, 4, gpu0_bsz, lambda model: BalancedCriterion(criterion)(model(x), y), gather=False
    )
    assert found == ((1, 3, 3, 3) if gpu0_bsz == 1 else sizes)
    assert_same(step, whole)


class Classifier(nn.Module):
    """As the Trainer takes it: the batch as keywords, a dictionary with the loss."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pair("Hugging Face's Trainer")
@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("gpu0_bsz", [1, 4])
def test_the_trainer(gpu0_bsz, tmp_path):
    """Four samples for each of four devices; the second batch has 10."""
    hf = pytest.importorskip("transformers")
    from balanced_dp.integrations.transformers import BalancedTrainer

    x, _ = data(26)
    labels = torch.arange(26) % 3
    labels[torch.tensor([0, 1, 5, 20])] = -100
    rows = [{"x": x[i], "labels": labels[i]} for i in range(26)]
    bare = Classifier()

    def trained(trainer_class, per_device, **options):
        model, losses = copy.deepcopy(bare), []

        class Recording(trainer_class):
            def _get_train_sampler(self, *args):
                return torch.utils.data.SequentialSampler(rows)

            def training_step(self, *args, **kwargs):
                loss = super().training_step(*args, **kwargs)
                losses.append(loss.detach().cpu())
                return loss

        args = hf.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=per_device,
            max_steps=2,
            optim="sgd",
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Recording(model=model, args=args, train_dataset=rows, **options)
        trainer.remove_callback(hf.PrinterCallback)
        trainer.train()
        state = {key: value.cpu() for key, value in model.state_dict().items()}
        sizes = trainer.parallel_model.chunk_sizes if options else None
        return sizes, (losses, state)

    _, expected = trained(hf.Trainer, 16)
    with emulate_devices(4):
        sizes, found = trained(BalancedTrainer, 4, gpu0_bsz=gpu0_bsz)
    assert peers.even(16, 4) == (4, 4, 4, 4)
    assert sizes == (peers.even(10, 4) if gpu0_bsz == 4 else (1, 3, 3, 3))
    assert_same(found, expected)  # with steps of 1 the weights are what gradients left

    def loss(start, end):
        return bare(x[start:end], labels[start:end])["loss"]

    theirs = peers.unweighted_mean([loss(start, start + 4) for start in range(0, 16, 4)])
    assert not torch.isclose(theirs, loss(0, 16), rtol=1e-3)


@pair("an optimizer in DataParallel")
@pytest.mark.parametrize("is_made_before", [True, False])
def test_an_optimizer(is_made_before):
    x, y = data(10)
    bare = Net()
    expected = copy.deepcopy(bare)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    wrapped = constructed_without_accelerator(optimizer)
    assert wrapped.module is optimizer
    F.mse_loss(expected(x), y).backward()
    wrapped.module.step()

    def stepped(devices):
        net = copy.deepcopy(bare).to(devices[0])
        if is_made_before:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = BalancedDataParallel(1, net)
        if not is_made_before:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ArgumentTypeError, match=r"module must be an nn\.Module, got SGD"):
            BalancedDataParallel(1, optimizer)
        F.mse_loss(model(x), y.to(devices[0])).backward()
        optimizer.step()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    with emulate_devices(4) as devices:
        found = stepped(devices)
    assert_same(found, [parameter.detach() for parameter in expected.parameters()])
