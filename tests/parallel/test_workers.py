"""Threads that live as long as the model and no longer."""

from __future__ import annotations

import os
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

from balanced_dp import BalancedCriterion, BalancedDataParallel
from balanced_dp.free_threading import is_free_threaded_build

from ..at_once import at_once
from ..processes import python

pytestmark = pytest.mark.filterwarnings("ignore:.* sets seen in forward")

with_threads_that_last = pytest.mark.skipif(
    is_free_threaded_build(), reason="threads end with each call on free-threaded builds"
)

X = torch.ones(9, 2)


class Threads(nn.Module):
    """Notes in which thread each replica runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: dict[str, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[str(x.device)] = threading.get_ident()
        return x * self.weight


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


@pytest.fixture
def devices(emulated) -> list[torch.device]:
    """With a first device whose calls run in the calling thread, as those of accelerators do."""
    return [torch.device("cpu"), *emulated[1:4]]


@pytest.fixture
def before() -> set[threading.Thread]:
    return set(threading.enumerate())


@with_threads_that_last
def test_each_call_uses_the_same_threads(devices, before):
    model = BalancedDataParallel(1, Threads(), devices)
    model(X)
    threads = dict(model.module.seen)
    started = set(new_threads(before))
    assert threads.pop("cpu") == threading.get_ident()
    assert {thread.ident for thread in started} == set(threads.values())
    assert len(started) == 3
    for _ in range(3):
        model(X)
        assert {k: v for k, v in model.module.seen.items() if k != "cpu"} == threads
    assert set(new_threads(before)) == started


@with_threads_that_last
def test_loss_and_metrics_run_in_the_model_s_threads(devices, before):
    model = BalancedDataParallel(1, Threads(), devices, gather=False)
    outputs = model(X)
    started = set(new_threads(before))
    idents = outputs.map(lambda output: torch.tensor([threading.get_ident()] * len(output)))
    assert set(idents.tolist()) == {threading.get_ident(), *(t.ident for t in started)}
    BalancedCriterion(nn.MSELoss())(outputs, X).backward()
    assert set(new_threads(before)) == started


def test_on_free_threaded_builds_threads_end_with_each_call(devices, before, monkeypatch):
    """A thread that waited for the next call kept what it had made, whoever released it."""
    monkeypatch.setattr("balanced_dp.parallel.parallel_apply.is_free_threaded_build", lambda: True)
    model = BalancedDataParallel(1, Threads(), devices)
    for _ in range(2):
        output = model(X)
        assert len(set(model.module.seen.values()) - {threading.get_ident()}) >= 1
        assert new_threads(before) == []
        output.sum().backward()
        del output
        held = [torch.lazy.memory_allocated(device) for device in devices[1:]]
        assert held == [0, 0, 0]


@with_threads_that_last
def test_close_ends_the_threads_and_a_call_starts_new_ones(devices, before):
    model = BalancedDataParallel(1, Threads(), devices[:3])
    with torch.no_grad():
        model(X)
    assert torch.lazy.memory_allocated(devices[1]) == 0
    for _ in range(2):
        model.close()
        assert new_threads(before) == []
    assert model(X).shape == X.shape
    assert len(new_threads(before)) == 2
    model.close()


@with_threads_that_last
def test_they_end_with_the_model_without_the_garbage_collector(no_collector, devices, before):
    model = BalancedDataParallel(1, Threads(), devices[:3])
    model(X)
    started = new_threads(before)
    assert len(started) == 2
    del model
    for thread in started:
        thread.join(10)
    assert new_threads(before) == []


def test_an_error_leaves_the_threads_ready(emulated):
    class Fails(Threads):
        def forward(self, x):
            if x.sum() < 0:
                raise ValueError(x.device)
            return super().forward(x)

    model = BalancedDataParallel(1, Fails().to(emulated[0]), emulated[:3])
    model(X)
    threads = dict(model.module.seen)
    with pytest.raises(ValueError, match="lazy:0"):
        model(-X)
    model(X)
    assert model.module.seen == threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="warns of fork beside threads")
def test_a_forked_process_starts_its_own(emulated):
    model = BalancedDataParallel(1, Threads().to(emulated[0]), emulated[:3])
    with torch.no_grad():
        model(X)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if model(X).cpu().equal(X) and model(X).cpu().equal(X) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert model(X).cpu().equal(X)


def test_calls_at_the_same_time_do_not_wait_for_each_other(emulated):
    """A call that finds the threads in use has its own."""
    barrier = threading.Barrier(4)  # two devices of two calls

    class Meets(Threads):
        def forward(self, x):
            barrier.wait(60)
            return super().forward(x)

    model = BalancedDataParallel(4, Meets().to(emulated[0]), emulated[:2])
    assert at_once(lambda number: model(X * number).unique().tolist(), 2) == [[0], [1]]


def test_a_replica_may_call_the_model_it_is_of(emulated):
    class Recursive(Threads):
        def forward(self, x, depth=0):
            y = super().forward(x)
            return y if depth == 0 else y + models[0](x.cpu(), depth - 1).to(x.device)

    models = [BalancedDataParallel(4, Recursive().to(emulated[0]), emulated[:2])]
    assert models[0](X, 2).unique().tolist() == [3]
    models.clear()


@pytest.mark.parametrize("first", ["cpu", "emulated"])
def test_close_inside_forward_is_no_error(emulated, first):
    """All replicas call it at the same time, and none waits for another that waits for it."""
    barrier = threading.Barrier(3)

    class Closes(Threads):
        def forward(self, x):
            barrier.wait(timeout=60)
            models[0].close()
            return super().forward(x)

    devices = [torch.device("cpu") if first == "cpu" else emulated[0], *emulated[1:3]]
    models = [BalancedDataParallel(1, Closes().to(devices[0]), devices)]
    outputs: list[torch.Tensor] = []
    call = threading.Thread(target=lambda: outputs.append(models[0](X)), daemon=True)
    call.start()
    call.join(60)
    assert outputs[0].shape == X.shape
    models.clear()
    outputs.clear()


def test_a_thread_may_train_when_the_main_thread_has_ended():
    """What concurrent.futures refuses."""
    script = textwrap.dedent(
        """
        import threading
        import torch
        from balanced_dp import BalancedDataParallel, emulate_devices

        def train():
            with emulate_devices(3) as devices:
                model = BalancedDataParallel(1, torch.nn.Linear(4, 2).to(devices[0]))
                print(model(torch.ones(8, 4)).shape, flush=True)
                threading.main_thread().join()
                print(model(torch.ones(8, 4)).shape, flush=True)

        threading.Thread(target=train).start()
        """
    )
    done = python("-c", script)
    assert (done.stdout, done.stderr) == ("torch.Size([8, 2])\n" * 2, "")
