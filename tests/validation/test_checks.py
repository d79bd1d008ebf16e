"""Test ``balanced_dp.validation``, which checks the devices of a machine.

The devices are emulated ones, or the stand-in for CUDA devices.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, Workload
from balanced_dp.validation import Check, checks, validate


def small() -> Workload:
    def batch(size):
        return torch.randn(size, 64), torch.randn(size, 8)

    return Workload(lambda: nn.Linear(64, 8), batch, nn.functional.mse_loss)


WORKLOAD = f"{__name__}:small"


def test_distinct_devices(stand_in):
    seen: list[Check] = []
    result = validate(2, workload=WORKLOAD, on_check=seen.append)
    assert tuple(seen) == result.checks
    assert result.devices == "stand_in:0 stand-in, stand_in:1 stand-in"
    # The stand-in has no NVML.
    assert [one.part for one in result.checks] == [*["gradients"] * 2, *["memory"] * 3, "time"]
    assert result.gradients_are_right
    assert all(check.value.endswith("%") for check in result.checks if check.part == "memory")
    step = result.checks[-1]
    assert float(step.value) > 0 and step.note.count(" ms") == 2


def test_replicas_that_share_a_device(stand_in, monkeypatch):
    monkeypatch.setattr(torch.get_device_module("stand_in"), "device_count", lambda: 1)
    result = validate(2, workload=WORKLOAD)
    assert result.devices == "stand_in:0 stand-in, stand_in:0 stand-in"
    assert result.gradients_are_right and len(result.checks) == 6
    with pytest.raises(ValueError, match="num_devices must be at least 1, got 0"):
        validate(0, workload=WORKLOAD)


@pytest.mark.parametrize(
    ("measured", "peak_used", "ok"), [(1000, 0, [True, True]), (2000, 2**40, [False, False])]
)
def test_predictions_and_measurements(measured, peak_used, ok, stand_in, monkeypatch):
    """NVML's number may be lower than predicted, or higher by what a plan keeps free."""
    steps = (SimpleNamespace(peak_bytes=(peak,)) for peak in (1000, measured))
    monkeypatch.setattr(checks, "measure_step", lambda *_: next(steps))
    of_nvml = SimpleNamespace(used_bytes=0, peak_used_bytes=peak_used)
    block = nullcontext(SimpleNamespace(devices=[of_nvml]))
    probe = SimpleNamespace(snapshot=lambda: [of_nvml], measure=lambda: block)
    monkeypatch.setattr(checks, "MemoryProbe", lambda devices: probe)
    monkeypatch.setattr(checks, "even_share", lambda *_: 0)
    found = [*checks._memory(small(), 4, stand_in.devices[:1])]
    assert [one.ok for one in found] == ok


def test_a_wrong_gradient_is_named(no_accelerator, monkeypatch):
    forward = BalancedDataParallel.forward
    monkeypatch.setattr(BalancedDataParallel, "forward", lambda *a, **k: 1.5 * forward(*a, **k))
    result = validate(2)
    first = result.checks[0]
    assert (first.ok, first.value) == (False, "5e-01") and "chunks of " in first.note
    assert "FAILED: not all gradients" in str(result)


def test_gradients_on_emulated_devices(no_accelerator):
    result = validate(2)
    assert [check.part for check in result.checks] == ["gradients"] * 2
    assert result.markdown().startswith("### balanced-dp validate: 2 emulated devices\n\npython ")
    assert str(result).endswith("equal those of one device. Memory and time need a GPU.")


@pytest.mark.slow
def test_how_many_devices(stand_in):
    for num_devices, emulate in ((5, False), (3, True)):
        result = validate(num_devices, workload=WORKLOAD, emulate=emulate)
        assert result.devices == f"{num_devices} emulated devices"
