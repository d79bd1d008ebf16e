"""Test how steps are timed, on one process and on ranks."""

from __future__ import annotations

import pytest
import torch

from balanced_dp import BalancedDataParallel, Workload, emulate_devices
from balanced_dp.validation import seconds

NAME = f"{__name__}:tiny"


def tiny() -> Workload:
    return Workload(
        lambda: torch.nn.Linear(8, 4),
        lambda n: ((torch.zeros(n, 8),), {}, torch.arange(n) % 4),
        torch.nn.functional.cross_entropy,
    )


@pytest.mark.parametrize("training", [True, False])
def test_models_take_turns(training):
    workload = tiny()
    module = workload.model()
    turns = []

    class Noting(torch.nn.Sequential):
        def forward(self, x):
            turns.append(torch.is_grad_enabled())
            return super().forward(x)

    models = {
        "ours": BalancedDataParallel(1, module, ["cpu", "cpu"]),
        "alone": Noting(module),
        "again": Noting(module),
    }
    times = seconds.step_seconds(workload, 4, models, training=training, rounds=2)
    assert list(times) == list(models)
    assert min(times.values()) > 0
    assert turns == [training] * 2 * (seconds.NUM_WARM_UP + 2)
    assert (next(module.parameters()).grad is not None) == training
    models["ours"].close()


def test_after_the_time_limit_there_are_three_rounds():
    workload = tiny()
    calls = []
    module = workload.model()
    module.register_forward_hook(lambda *_: calls.append(1))
    seconds.step_seconds(workload, 4, {"one": module}, time_limit_s=0)
    assert len(calls) == seconds.NUM_WARM_UP + 3


def test_a_step_is_compared_with_that_of_data_parallel(stand_in, monkeypatch):
    monkeypatch.setattr(seconds, "rank_seconds", lambda *_: 0.25)
    found = {"ours": 0.5, "nn.DataParallel": 0.4}
    measured = seconds.data_parallel_seconds(tiny(), 8, stand_in.devices[:2])
    assert list(measured) == list(found)
    assert min(measured.values()) > 0
    monkeypatch.setattr(seconds, "data_parallel_seconds", lambda *_: found)
    stock, ranks = seconds.time_checks(NAME, 8, stand_in.devices[:2])
    assert (stock.outcome, stock.value) == ("not ok", pytest.approx(1.25))
    assert stock.note == "500.0 ms and 400.0 ms; allowed: 1.05"
    assert (ranks.outcome, ranks.value) == ("ok", 2)
    found["ours"] = 0.42
    assert next(seconds.time_checks(NAME, 8, stand_in.devices[:2])).outcome == "ok"
    _, shared = seconds.time_checks(NAME, 8, stand_in.devices[:1] * 2)
    assert (shared.outcome, shared.note) == ("-", "NCCL starts no two ranks on one device")


def test_emulated_devices_are_not_timed():
    with emulate_devices(2) as devices:
        checks = list(seconds.time_checks(NAME, 8, devices))
    assert [check.outcome for check in checks] == ["-", "-"]


@pytest.mark.slow
def test_ranks_are_timed():
    assert 0 < seconds.rank_seconds(NAME, 8, "cpu", 2) < 10


def test_ranks_that_fail_say_why():
    """The first line of NCCL's errors says what happened, and more lines follow."""
    output = (
        "\n\n-- Process 1 terminated with the following error:\n"
        "Traceback (most recent call last):\n"
        '    raise DistBackendError("it fails")\n'
        "torch.distributed.DistBackendError: NCCL error: unhandled\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\n"
    )
    assert seconds._first_error(output) == "DistBackendError: NCCL error: unhandled"


def test_ranks_that_take_too_long_are_ended(monkeypatch):
    monkeypatch.setattr(seconds, "_RANKS_TIME_LIMIT_S", 0.0)
    with pytest.raises(TimeoutError, match="they took more than 0 s"):
        seconds.rank_seconds(NAME, 8, "cpu", 2)
