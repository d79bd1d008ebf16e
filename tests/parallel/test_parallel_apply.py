from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_dp import BalancedDataParallel, emulate_devices
from balanced_dp.errors import add_note
from balanced_dp.parallel.parallel_apply import parallel_apply

from ..modules import Lambda

CPUS = [torch.device("cpu")] * 3


def run(calls, devices):
    return parallel_apply(calls, [((), {})] * len(calls), devices)


def thread_names(num_devices):
    """The first device's calls run in the calling thread."""
    others = [f"replicas on lazy:{i}" for i in range(1, num_devices)]
    return [threading.current_thread().name, *others]


def test_results_come_in_order_each_device_s_from_its_own_thread(emulated):
    barrier = threading.Barrier(3)  # all three run at the same time, or this would not end

    def call(index):
        barrier.wait(timeout=60)
        return index, threading.current_thread().name

    results = run([lambda i=i: call(i) for i in range(3)], [CPUS[0], *emulated[1:3]])
    assert results == list(enumerate(thread_names(3)))


def test_on_symbolic_devices_calls_take_turns(monkeypatch):
    monkeypatch.setattr("balanced_dp.parallel.parallel_apply.TURN_SECONDS", 60)
    log = []

    def call(index):
        log.append(index)
        threading.Event().wait(0.01)  # others could begin now
        log.append(index)

    with emulate_devices(3, symbolic=True) as devices:
        run([lambda i=i: call(i) for i in range(3)], list(devices))
    assert log == [0, 0, 1, 1, 2, 2]


def test_on_symbolic_devices_calls_may_wait_for_each_other():
    barrier = threading.Barrier(3)
    with emulate_devices(3, symbolic=True) as devices:
        results = run([lambda: barrier.wait(timeout=60)] * 3, list(devices))
    assert sorted(results) == [0, 1, 2]


def test_calls_on_one_device_run_one_after_another(emulated):
    devices = [CPUS[0], emulated[1], CPUS[0], emulated[1]]
    log = []

    def call(index):
        log.append((index % 2, index, "begins"))
        log.append((index % 2, index, "ends"))
        return threading.current_thread().name

    names = run([lambda i=i: call(i) for i in range(4)], devices)
    assert names == thread_names(2) * 2
    for device in range(2):
        assert [entry[1:] for entry in log if entry[0] == device] == [
            (index, what) for index in (device, device + 2) for what in ("begins", "ends")
        ]


@pytest.mark.parametrize("num_calls", [1, 3])
def test_calls_on_a_single_device_run_in_the_calling_thread(num_calls, emulated):
    for device in (CPUS[0], emulated[1]):
        threads = run([threading.current_thread] * num_calls, [device] * num_calls)
        assert threads == [threading.current_thread()] * num_calls


def state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        "cache": torch.is_autocast_cache_enabled(),
    }


@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad(),
        torch.enable_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        torch.autocast("cpu", enabled=False),
    ],
    ids=["no_grad", "enable_grad", "inference_mode", "bfloat16", "float16", "disabled"],
)
def test_threads_have_the_caller_s_modes(context, num_calls, emulated):
    """Threads of nn.DataParallel enter autocast without its dtype, so that bfloat16 becomes
    float16, and do not take over inference mode.
    """
    before = state()
    with context:
        expected = state()
        assert run([state] * num_calls, emulated[:num_calls]) == ([expected] * num_calls)
    assert state() == before


def test_threads_have_the_caller_s_context_variables(emulated):
    variable = contextvars.ContextVar("variable", default="unset")
    token = variable.set("set")
    try:
        assert run([variable.get] * 3, emulated[:3]) == ["set"] * 3
    finally:
        variable.reset(token)


def test_emulated_devices_all_have_a_thread_in_which_they_are_current(emulated):
    module = torch.get_device_module(emulated[0])

    def call():
        return threading.current_thread().name, module.current_device()

    assert run([call] * 3, emulated[2:5]) == [(f"replicas on lazy:{i}", i) for i in (2, 3, 4)]
    assert module.current_device() == 0


def test_the_first_of_several_failures_is_raised_when_all_have_ended(emulated):
    ended = []

    def fail(index):
        ended.append(index)
        raise ValueError(index)

    with pytest.raises(ValueError, match="1"):
        run([lambda: 0, lambda: fail(1), lambda: fail(2)], emulated[:3])
    assert sorted(ended) == [1, 2]


def test_a_failure_holds_no_memory_once_it_is_handled(no_collector, emulated):
    memory = torch.get_device_module(emulated[0])

    def fail(device):
        kept = torch.zeros(1000, device=device)
        raise ValueError(kept.shape)

    calls = [lambda: torch.zeros(1000, device=emulated[0]), lambda: fail(emulated[1])]
    with pytest.raises(ValueError, match="1000") as caught:
        run(calls, emulated[:2])
    del caught
    assert [memory.memory_allocated(device) for device in emulated[:2]] == [0, 0]


def test_before_python_3_11_a_note_becomes_part_of_the_message():
    class Old(ValueError):
        add_note = property(lambda self: (_ for _ in ()).throw(AttributeError))

    error = Old("no such value")
    add_note(error, "in replica 1")
    assert str(error) == "no such value\nin replica 1"


def test_replicas_of_one_device_that_wait_for_each_other(monkeypatch, caplog):
    """Synchronized batch norm hung without a word."""
    monkeypatch.setattr("balanced_dp.parallel.parallel_apply.PATIENCE_SECONDS", 0.1)
    logged = threading.Event()
    caplog.handler.addFilter(lambda record: logged.set() or True)
    assert run([lambda: logged.wait(60)] * 2, CPUS[:2]) == [True, True]
    assert "replicas on cpu have not ended after 0.1 s" in caplog.text


def test_the_first_failure_is_logged_at_once(caplog, emulated):
    """Others may wait for the replica that failed, as those of synchronized batch norm do."""
    logged = threading.Event()
    caplog.handler.addFilter(lambda record: logged.set() or True)

    def fail():
        raise ValueError("master")

    with pytest.raises(ValueError, match="master"):
        run([lambda: logged.wait(60), fail, lambda: logged.wait(60)], emulated[:3])
    [record] = caplog.records
    assert "ValueError('master') in replica 1 on lazy:1; it is raised when" in record.getMessage()


INTERRUPTED = """
    import os, sys, threading, torch
    from balanced_dp import BalancedDataParallel, emulate_devices

    release = threading.Event()
    ended = []

    class Waiting(torch.nn.Module):
        def forward(self, x):
            os.write(1, b"running\\n")  # in one piece, unlike print
            if x.device.index == {failing}:
                raise ValueError("failed")
            assert release.wait(60)
            ended.append(x.device)
            return x

    def listen():
        sys.stdin.readline()
        release.set()

    threading.Thread(target=listen, daemon=True).start()
    with emulate_devices(3) as devices:
        model = BalancedDataParallel(1, Waiting(), ["cpu", *devices[1:]])
        try:
            model(torch.ones(8))
        except KeyboardInterrupt as error:
            print("interrupted", len(ended), repr(error.__cause__), flush=True)
        model.close()
        release.set()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
@pytest.mark.parametrize(
    ("failing", "answer", "says"),
    [(-1, "\n", "interrupted 2 None"), (1, None, "interrupted 0 ValueError('failed')")],
)
def test_ctrl_c_waits_for_replicas_unless_one_has_failed(failing, answer, says):
    """They work on the caller's tensors, and would go on behind the caller's back. The first one
    runs in the calling thread, which is the one that is interrupted. One that has failed is shown.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED.format(failing=failing))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert [process.stdout.readline() for _ in range(3)] == ["running\n"] * 3
    if failing == 1:
        process.stderr.readline()
    os.kill(process.pid, signal.SIGINT)
    if answer is None:
        assert process.stdout.readline() == f"{says}\n"
    output, errors = process.communicate(answer, timeout=60)
    assert (output, errors, process.returncode) == (f"{says}\n" if answer else "", "", 0)


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
