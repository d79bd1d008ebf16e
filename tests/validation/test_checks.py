"""The checks of a machine, on emulated devices and on the stand-in for CUDA devices."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from balanced_dp import ArgumentError, BalancedDataParallel, Workload
from balanced_dp.memory import DeviceMemory
from balanced_dp.validation import Check, Validation, checks, validate


def small() -> Workload:
    def batch(size):
        return torch.randn(size, 64), torch.randn(size, 8)

    return Workload(lambda: nn.Linear(64, 8), batch, nn.functional.mse_loss)


WORKLOAD = f"{__name__}:small"


def outcomes(result: Validation, part: str) -> list[str]:
    return [check.outcome for check in result.checks if check.part == part]


def test_distinct_devices(stand_in):
    seen: list[Check] = []
    result = validate(2, workload=WORKLOAD, on_check=seen.append)
    assert tuple(seen) == result.checks
    assert result.devices == "stand_in:0 stand-in, stand_in:1 stand-in"
    assert outcomes(result, "gradients") == ["ok"] * 3 and result.gradients_are_right
    assert set(outcomes(result, "memory")[::2]) <= {"ok", "not ok"}  # of a model of a few bytes
    assert outcomes(result, "memory")[1::2] == ["-"] * 3  # the stand-in has no NVML
    [step] = [check for check in result.checks if check.part == "time"]
    assert float(step.value) > 0 and step.note.count(" ms") == 2


def test_replicas_that_share_a_device(stand_in, monkeypatch):
    monkeypatch.setattr(torch.get_device_module("stand_in"), "device_count", lambda: 1)
    result = validate(2, workload=WORKLOAD)
    assert result.devices == "2 replicas on stand_in:0 stand-in"
    assert result.gradients_are_right and len(outcomes(result, "memory")) == 6


def test_nvml_is_next_to_the_prediction(stand_in, monkeypatch):
    """Less than predicted is fine, and so is what a plan keeps free beyond it."""
    reserve, grown = checks.RESERVE_BYTES, iter([0, 2**40, 0])
    monkeypatch.setattr(checks, "_peaks", lambda *_: ([1000], [next(grown) % 2**41]))
    before = type("Probe", (), {"snapshot": lambda _: [type("At", (), {"used_bytes": 0})]})
    monkeypatch.setattr(checks, "MemoryProbe", lambda devices: before())
    monkeypatch.setattr(checks, "even_share", lambda *_: 0)
    found = [*checks._memory(small(), 4, stand_in.devices[:1])]
    assert [one.outcome for one in found] == ["ok", "not ok"]
    assert reserve < 2**40


@pytest.mark.parametrize(("used", "outcome"), [(3, "ok"), (90, "not ok")])
def test_the_probe_is_compared_with_nvidia_smi(used, outcome, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU-1, 100, 3, 97'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    sizes = {"total_bytes": 100 << 20, "used_bytes": used << 20, "free_bytes": 97 << 20}
    found = DeviceMemory("cuda:0", uuid="GPU-1", **sizes), DeviceMemory("cuda:1", uuid="GPU-2")
    probe = type("Probe", (), {"snapshot": lambda _: found})
    monkeypatch.setattr(checks, "MemoryProbe", lambda devices: probe())
    first, second = checks._probe([])
    assert (first.outcome, second.outcome) == (outcome, "-")
    assert "does not list GPU-2" in second.note


def test_a_wrong_gradient_is_named(no_accelerator, monkeypatch):
    forward = BalancedDataParallel.forward
    monkeypatch.setattr(BalancedDataParallel, "forward", lambda *a, **k: 1.5 * forward(*a, **k))
    result = validate(2)
    first = result.checks[0]
    assert (first.outcome, first.value) == ("not ok", "5e-01") and "chunks of " in first.note
    assert "FAILED: not all gradients" in str(result)


def test_emulated_devices_answer_for_gradients_only(no_accelerator):
    result = validate(2)
    assert [check.part for check in result.checks] == [
        *["gradients"] * 3,
        "probe",
        "memory",
        "time",
    ]
    assert result.markdown().startswith("### balanced-dp validate: 2 emulated devices\n\nbalanced")
    assert json.loads(result.json())["devices"] == "2 emulated devices"
    assert str(result).endswith("All gradients and outputs are those of one device.")


def test_an_error_in_a_part_leaves_the_others(no_accelerator, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of order")
        yield

    monkeypatch.setattr(checks, "_memory", fail)
    result = validate(2)
    [memory] = [check for check in result.checks if check.part == "memory"]
    assert (memory.outcome, memory.note) == ("not ok", "RuntimeError: out of order")
    assert result.gradients_are_right and outcomes(result, "time") == ["-"]


def test_how_many_devices(stand_in):
    with pytest.raises(ArgumentError, match="num_devices must be at least 2, got 1"):
        validate(1)
    with pytest.raises(ArgumentError, match="num_devices=5, but there are 4 accelerators"):
        validate(5)
    assert validate(5, emulate=True).devices == "5 emulated devices"
