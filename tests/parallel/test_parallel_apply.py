"""Test that replicas run in a thread for each device, and calls of models by several threads."""

from __future__ import annotations

import contextvars
import copy
import threading
import time
import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from balanced_dp import BalancedDataParallel
from balanced_dp.memory.peaks import Peaks
from balanced_dp.parallel import copies
from balanced_dp.parallel.auto import AutoSplit
from balanced_dp.parallel.parallel_apply import parallel_apply

from ..at_once import at_once
from ..modules import Lambda, assert_same_gradients


def run(calls, devices):
    return parallel_apply(calls, [((), {})] * len(calls), devices)


@pytest.mark.parametrize(
    ("names", "threads"),
    [
        (["cpu"], [None]),
        (["cpu"] * 3, [None] * 3),
        (["lazy:1"] * 3, [None] * 3),
        (["cpu", "lazy:1", "lazy:2"], [None, 1, 2]),
        (["cpu", "lazy:1", "cpu", "lazy:1"], [None, 1, None, 1]),
        (["lazy:2", "lazy:3", "lazy:4"], [2, 3, 4]),
    ],
)
def test_each_device_has_a_thread(names, threads, emulated):
    """The first one's is that of the caller, unless all are emulated; there it is current."""
    devices = [*map(torch.device, names)]
    barrier = threading.Barrier(len(set(names)))

    def call(index):
        if names.index(names[index]) == index:
            barrier.wait(60)  # the first calls of all devices run at the same time

        return index, threading.current_thread().name, torch.lazy.current_device()

    caller = threading.current_thread().name
    found = run([lambda i=i: call(i) for i in range(len(names))], devices)
    for index, (device, thread) in enumerate(zip(devices, threads, strict=True)):
        name = caller if thread is None else f"replicas on lazy:{thread}"
        assert found[index] == (index, name, device.index or 0)
    assert torch.lazy.current_device() == 0


variable = contextvars.ContextVar("variable", default="unset")


def state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        "cache": torch.is_autocast_cache_enabled(),
        "variable": variable.get(),
    }


def test_emulated_devices_share_the_cores(emulated, request):
    """Their threads of OpenMP outnumbered the cores, so that backward took 1.4 times as long."""
    request.addfinalizer(lambda: torch.set_num_threads(1))
    torch.set_num_threads(8)
    found = [run([torch.get_num_threads] * 4, ids) for ids in (emulated[:4], emulated[:1] * 4)]
    # And as many as before in new threads.
    assert (*found, *at_once(lambda _: torch.get_num_threads(), 1)) == ([2] * 4, [8] * 4, 8)


@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.parametrize(
    "context",
    [
        *(torch.no_grad(), torch.enable_grad(), torch.inference_mode()),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        torch.autocast("cpu", enabled=False),
    ],
)
def test_threads_have_the_state_of_the_caller(context, num_calls, emulated):
    """Threads of nn.DataParallel enter autocast without its dtype, so that bfloat16 becomes
    float16, and do not take over inference mode.
    """
    token = variable.set("set")
    before = state()
    with context:
        expected = state()
        assert run([state] * num_calls, emulated[:num_calls]) == [expected] * num_calls
    assert state() == before
    variable.reset(token)


@pytest.mark.parametrize("first", [KeyboardInterrupt, ValueError])
def test_the_first_failure_is_raised_at_the_end(emulated, first):
    ended = []

    def call(index):
        ended.append(index)
        if index:
            raise first(f"master {index}")

    with pytest.raises(first, match="master 1"):
        run([lambda i=i: call(i) for i in range(3)], emulated[:3])
    assert sorted(ended) == [0, 1, 2]


def test_peaks_are_those_before_an_idle_step(emulated):
    """Device 0 ran its backward pass last from then on, when it held the gradients of all others:
    `run` measured the even split too high, and advised values that take more (ignite, skorch).
    """
    inner = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(emulated[0])
    model, peaks = BalancedDataParallel(None, inner, emulated[:4]), []
    for gpu0_bsz in (None, None, 0, None):
        model.gpu0_bsz = gpu0_bsz
        torch.lazy.reset_peak_memory_stats(emulated[0])
        model(torch.ones(64, 64)).square().sum().backward()
        peaks.append(torch.lazy.max_memory_allocated(emulated[0]))
        model.zero_grad()
    assert peaks[3] == peaks[1]


def test_a_replica_may_call_the_model_it_is_of(emulated):
    def forward(self, x, depth=0):
        return x if depth == 0 else 1 + models[0](x.cpu(), depth - 1).to(x.device)

    models = [BalancedDataParallel(4, Lambda(forward), emulated[:2])]
    assert models[0](torch.ones(9), 2).unique().tolist() == [3]
    models.clear()


def test_checkpointing_draws_the_same_dropout_again(devices):
    """Replicas on one device ran at the same time and drew from one generator, so that the masks
    of backward were not those of forward.
    """

    def forward(self, x):
        for _ in range(4):
            x = checkpoint(lambda x: nn.functional.dropout(x * 1.0), x, use_reentrant=False)
        return x

    x = torch.ones(64, 256, requires_grad=True, device=devices[0])
    output = BalancedDataParallel(20, Lambda(forward), devices[:3])(x)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient.cpu(), output.detach().cpu())


# Calls from eight threads on one model. Without Python's lock they do run at the same time.


def forward(self, x, y):
    output = self.head(self.layers(x))
    return [functional.cross_entropy(output, y), functional.cross_entropy(output, y % 2), output]


def batch(number):
    """Return samples and padded targets, which are different for each ``number``."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(9 + number, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 5, (9 + number,), generator=generator)
    y[1 : 2 + number % 4] = -100
    return x, y


def held(devices):
    return [torch.lazy.memory_allocated(d) for d in devices if d.type == "lazy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_gradients", "block", "how"),
    [
        *((False, None, ""), (False, "shared_weights", "")),
        *((True, None, ""), (True, "accumulate", ""), (True, "accumulate", "a block each")),
        *((True, None, "bound"), (False, None, "bound")),  # replicas made for each call
    ],
)
def test_steps_of_many_threads(devices, has_gradients, block, how, monkeypatch):
    """Gradients of all threads are added up in the same parameters. In a block, one makes the
    copies for all. It ends with the last thread in it.
    """
    fill_buckets = copies.fill_buckets
    monkeypatch.setattr(  # so that the other threads come while the first one makes them
        copies, "fill_buckets", lambda *args, **kw: time.sleep(0.02) or fill_buckets(*args, **kw)
    )
    layers = [nn.Linear(4, 8), nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(5))]
    bare = Lambda(forward, layers=nn.Sequential(*layers), head=nn.Linear(8, 5)).double()
    module = copy.deepcopy(bare).to(devices[0])
    if how == "bound":
        module.head.forward = types.MethodType(nn.Linear.forward, module.head)
    model, before = BalancedDataParallel(1, module, devices[:3]), held(devices)
    cross_entropy_loss = torch._C._nn.cross_entropy_loss

    def total(found):
        return found[0] + 2 * found[1] + found[2].square().mean()

    def step(number):
        with torch.set_grad_enabled(has_gradients):
            found = model(*batch(number))
        if has_gradients:
            total(found).backward()
        return [tensor.detach().cpu() for tensor in found]

    def train(number):
        with getattr(model, block)() if how == "a block each" else nullcontext():
            return [step(number) for _ in range(3)]

    with getattr(model, block)() if block and how != "a block each" else nullcontext():
        found = at_once(train)
    for number, outputs in enumerate(found):
        expected = bare(*batch(number))
        torch.testing.assert_close(outputs, [expected] * 3, rtol=1e-10, atol=1e-12)
        if has_gradients:
            (3 * total(expected)).backward()
    assert_same_gradients(module, bare)
    assert torch._C._nn.cross_entropy_loss is cross_entropy_loss
    model.zero_grad()
    assert held(devices) == before


def test_loops_and_measurements_of_threads(emulated):
    """Optimizers step while models begin to watch, and peaks of measurements overlap."""

    def train(number):
        module = nn.Linear(4, 4, device=emulated[0])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        splits = [AutoSplit(emulated[:3]) for _ in range(10)]
        for split in splits:
            split.begin_call(module, 8)
            module(torch.ones(2, 4, device=emulated[0])).sum().backward()
            optimizer.step()
        return all(split._peaks is None for split in splits)

    def measure(size):
        peaks = Peaks(emulated[:1])
        tensor = torch.empty((1 + size) * 2**10, device=emulated[0])
        return peaks.of(emulated[0])[0] >= tensor.nbytes

    assert all(at_once(train))
    assert all(at_once(lambda _: all(map(measure, range(20)))))
