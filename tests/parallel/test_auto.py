"""Compare ``gpu0_bsz="auto"`` with trying every value, and test what it must never do."""

from __future__ import annotations

import contextlib
import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, Workload, emulate_devices
from balanced_dp.search import MAX_SPLITS

from ..modules import short_of_memory_in_backward
from ..notes import notes_of


def layers(width, outputs, loss, **options):
    """Return a workload with few operators, whose activations fill most of the memory."""
    return Workload(
        lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, outputs)),
        lambda n: ((torch.zeros(n, 64),), {}, None),
        lambda output, target: loss(output),
        **options,
    )


WIDE = layers(4096, 64, lambda output: output.square().mean())
TALL = layers(2048, 1, torch.mean, make_optimizer=partial(torch.optim.SGD, lr=0.1))


class Loop:
    """A training loop that trains the model of a workload on emulated devices."""

    def __init__(self, workload, device, gpu0_bsz):
        with torch.device(device):
            module = workload.model()
        self.workload, self.device = workload, device
        self.model = BalancedDataParallel(gpu0_bsz, module.to(device))
        self.optimizer = workload.make_optimizer(module.parameters())

    def forward_backward(self, batch_size):
        args, kwargs, target = self.workload.make_batch(batch_size)
        target = None if target is None else target.to(self.device)
        self.workload.loss(self.model(*args, **kwargs), target).backward()

    def step(self, *batch_sizes):
        """Make a training step with the accumulated gradients of several batches.

        Return how many samples of the last batch device 0 got.
        """
        self.optimizer.zero_grad()
        for batch_size in batch_sizes:
            self.forward_backward(batch_size)
        self.optimizer.step()
        return self.model.chunk_sizes[0]

    def follow(self, batch_size, num_steps=14):
        """Make ``num_steps`` training steps, and repeat those that run out of memory.

        Return the number of samples on device 0 in each step, and how often memory ran out.
        """
        values, num_failures = [], 0
        while len(values) < num_steps:
            try:
                values.append(self.step(batch_size))
            except torch.OutOfMemoryError:
                num_failures += 1
                assert num_failures < 12
        return values, num_failures

    @property
    def search(self):
        return self.model._policy.search


@contextlib.contextmanager
def looping(workload, num_devices=4, gpu0_bsz="auto", symbolic=True, **options):
    """Open emulated devices, and yield a ``Loop`` on them.

    At the end, all attributes of the loop are deleted, so that no tensor outlives the devices.
    """
    with emulate_devices(num_devices, symbolic=symbolic, **options) as devices:
        loop = Loop(workload, devices[0], gpu0_bsz)
        try:
            yield loop
        finally:
            vars(loop).clear()


@pytest.fixture
def loop():
    with looping(WIDE) as loop:
        yield loop


def test_the_value_can_be_read_and_set(loop, monkeypatch):
    """Once it is frozen, nothing is read any more."""
    model = loop.model
    assert (model.gpu0_bsz, model.chunk_sizes) == (None, None)
    loop.step(400)
    assert (model.gpu0_bsz, model.chunk_sizes) == (100, (100, 100, 100, 100))
    loop.follow(400)
    assert loop.search.is_over
    assert model.gpu0_bsz < 100
    with monkeypatch.context() as patch:
        for name in ("max_memory_allocated", "reset_peak_memory_stats", "memory_stats"):
            patch.delattr(torch.lazy, name)
        loop.follow(400, 3)
    loop.step(400, 404)  # no search begins within an iteration, whose peaks are not known
    model.gpu0_bsz = 40
    loop.step(400)
    assert model.chunk_sizes == model.split(400) == (40, 120, 120, 120)
    model.gpu0_bsz = "auto"
    loop.step(400)
    auto = model._policy
    for duplicate in (auto, copy.deepcopy(auto), pickle.loads(pickle.dumps(auto))):
        assert duplicate.split(400) == (100, 100, 100, 100)


def accumulates(loop, number):
    """Accumulate gradients. Some steps have one small batch, or are followed by an evaluation."""
    loop.step(*(400, 200) if number % 4 != 3 else (5,))
    if number % 4 == 1:
        with torch.no_grad():
            loop.model(torch.zeros(2000, 64))


def skips_steps(loop, number):
    """Skip some steps of the optimizer, as ``GradScaler`` does if gradients are not finite."""
    loop.optimizer.zero_grad()
    loop.forward_backward(400)
    if number not in (0, 2, 3):
        loop.optimizer.step()


def runs_out_of_data(loop, number):
    """Let some iterations end with a batch of one sample.

    Such an iteration takes less memory of device 0, so that the even split may look best.
    """
    loop.step(400, 1 if number in (2, 3, 9) else 400)


def begins_small(loop, number):
    """Begin with small batches. Their ``gpu0_bsz`` was once kept forever."""
    loop.step(40 if number < 14 else 400)


def differs_in_length(loop, number):
    """Use sequences of another length in each step, so that a sample takes more or less memory."""
    length = [8, 2, 6, 1, 7, 3, 5, 4][number % 8]
    loop.workload = replace(WIDE, make_batch=lambda n: ((torch.zeros(n, length, 64),), {}, None))
    loop.step(400)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "tolerance"),
    [
        *((f, 1.01) for f in (accumulates, begins_small, skips_steps, runs_out_of_data)),
        (differs_in_length, 1.2),
    ],
)
def test_loops_that_do_other_things(train, tolerance, loop):
    for number in range(40):
        train(loop, number)
    value = loop.model.gpu0_bsz
    assert loop.search.search.batch_size == 400
    assert loop.search.is_over and len(loop.search.search.told) <= MAX_SPLITS
    peaks = {}
    for gpu0_bsz in {value, *range(0, 101, 10)}:
        loop.model.gpu0_bsz = gpu0_bsz if gpu0_bsz < 100 else None
        for number in (24, 26):
            for device in loop.model.devices:
                torch.lazy.reset_peak_memory_stats(device)
            train(loop, number)
        peaks[gpu0_bsz] = max(map(torch.lazy.max_memory_allocated, loop.model.devices))
    assert peaks[value] <= min(peaks.values()) * tolerance


def test_steps_of_any_optimizer_are_seen():
    """A fused kernel writes to the parameters without a new version."""
    with looping(replace(WIDE, make_optimizer=partial(torch.optim.AdamW, fused=True))) as loop:
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        for _ in range(6):
            loop.forward_backward(400)
            other.step()  # not the model's
        assert loop.search.search.batch_size == 0
        loop.follow(400)
        assert loop.search.is_over and loop.model.gpu0_bsz < 100


def test_running_out_in_evaluation_moves_nothing():
    with looping(WIDE, memory="16MiB") as loop:
        for number in range(3):
            if number:
                loop.forward_backward(400)
            assert loop.model.split(400) == (100, 100, 100, 100)
            with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
                loop.model(torch.zeros(60_000, 64))
            assert "lower the batch size" in str(notes_of(caught.value))
            del caught
            loop.optimizer.step()
            with pytest.raises(torch.OutOfMemoryError):  # as in a metric
                torch.zeros(2**23, device=loop.device)


@pytest.mark.slow
def test_running_out_in_backward():
    workload = replace(TALL, model=lambda: short_of_memory_in_backward(["lazy:0"])[0])
    with looping(workload, 3, symbolic=False, memory=["24MiB", "64MiB", "64MiB"]) as loop:
        with pytest.raises(torch.OutOfMemoryError):
            loop.step(3000)
        with torch.no_grad():  # where it forgot the failure
            assert loop.model.gpu0_bsz == 1000
        assert loop.model.split(3000)[0] == loop.model.gpu0_bsz < 1000  # it has moved by now
        assert loop.follow(3000)[1] == 0
        assert loop.search.is_over


def test_one_device_has_nothing_to_balance():
    assert BalancedDataParallel("auto", nn.Linear(2, 2), ["cpu"])(torch.ones(3, 2)).shape == (3, 2)
    with looping(WIDE, 1) as loop:
        loop.forward_backward(3)


def test_batch_norm_never_gets_a_single_sample():
    """It refuses one in training; with the even split the run would go on."""

    def model():
        return nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 64))

    with looping(replace(WIDE, model=model)) as loop:
        assert 1 not in loop.follow(400)[0] and loop.search.is_over


@pytest.mark.slow
def test_a_resumed_run_runs_out_no_more(tmp_path):
    """The even split does. Checkpoints load both ways, also to and from nn.DataParallel."""
    resume = partial(looping, TALL, 3, symbolic=False)
    memory = ["14MiB", "64MiB", "64MiB"]
    with resume(memory=memory) as loop:
        assert loop.follow(3000)[1] > 0
        assert loop.search.is_over
        found = loop.model.gpu0_bsz
        loop.step(7)  # the last batch of an epoch says nothing
        assert loop.model.gpu0_bsz == found < 1000
        torch.save(loop.model.state_dict(), tmp_path / "checkpoint.pt")
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    with resume(memory=memory) as loop:
        loop.model.load_state_dict(state)
        assert loop.model.gpu0_bsz == loop.model.split(3000)[0] == found
        values, num_failures = loop.follow(3000)
        assert (values[0], num_failures) == (found, 0)
        state._metadata[""]["auto_split"]["gpu0_bsz"] += 1
        loop.model.load_state_dict(state)  # now training has begun
        assert loop.model.gpu0_bsz == values[-1]
    stock = nn.DataParallel(TALL.model()).cpu()
    assert state.keys() == stock.state_dict().keys()
    stock.load_state_dict(state, strict=True)
    for gpu0_bsz, other in (("auto", stock.state_dict()), ("auto", dict(state)), (5, state)):
        with resume(gpu0_bsz=gpu0_bsz) as loop:
            loop.model.load_state_dict(other, strict=True)
            assert loop.model.split(3000)[0] == (1000 if gpu0_bsz == "auto" else 5)
            # Nothing was found here.
            assert "auto_split" not in str(loop.model.state_dict()._metadata)
