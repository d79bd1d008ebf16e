"""Test all checks together, on the stand-in for CUDA devices and on emulated ones."""

from __future__ import annotations

import pytest
import torch

from balanced_dp import ArgumentError
from balanced_dp.validation import ValidationSettings, all_checks, validate
from balanced_dp.validation.check import guarded

from .test_seconds import NAME

NUM_GRADIENTS = 7


def outcomes(report, part):
    return [check.outcome for check in report.checks if check.part == part]


def test_distinct_devices(stand_in):
    done = []
    settings = ValidationSettings(2, workload=NAME)
    report = validate(settings, done.append)
    assert sorted(done, key=str) == sorted(report.checks, key=str)
    assert report.kind == "devices"
    assert report.description == "stand_in:0 to stand_in:1, stand-in"
    assert report.provenance.machine["devices"].startswith("stand_in:0 stand-in, 16.00 GiB, ")
    assert report.gradients_are_right
    assert outcomes(report, "gradients") == ["ok"] * NUM_GRADIENTS
    assert set(outcomes(report, "peaks")[::2]) <= {"ok", "not ok"}  # of a model of a few bytes
    assert set(outcomes(report, "peaks")[1::2]) == {"-"}
    stock, ranks = (check for check in report.checks if check.part == "seconds")
    assert stock.value > 0
    assert ranks.outcome == "-"  # the ranks have no stand-in
    assert ranks.note.startswith("no times of the ranks: RuntimeError: ")
    assert outcomes(report, "communicators") == ["-"]


def test_replicas_that_share_one_device(stand_in, monkeypatch):
    module = torch.get_device_module(stand_in.devices[0])
    monkeypatch.setattr(module, "device_count", lambda: 1)
    settings = ValidationSettings(2, workload=NAME)
    report = validate(settings)
    assert report.kind == "one device"
    assert report.description == "2 replicas that share stand_in:0, stand-in"
    assert report.gradients_are_right
    assert "6 to 1 samples" in [check.note for check in report.checks]  # two replicas
    assert len(outcomes(report, "peaks")) == 2
    stock, ranks = (check for check in report.checks if check.part == "seconds")
    assert stock.value > 0
    assert (ranks.outcome, ranks.note) == ("-", "NCCL starts no two ranks on one device")


def test_emulated_devices(no_accelerator):
    settings = ValidationSettings(2, workload=NAME)
    report = validate(settings)
    assert report.kind == "emulated"
    assert report.description == "2 emulated devices, on the CPU: torch sees no GPU here"
    assert report.gradients_are_right
    assert outcomes(report, "seconds") == ["-", "-"]
    assert {"CUDA", "driver", "torch"} <= set(report.provenance.versions)


def test_emulated_devices_on_request(stand_in):
    settings = ValidationSettings(2, emulate=True)
    assert settings.description == "2 emulated devices, on the CPU"


def test_what_fails_does_not_end_the_rest(no_accelerator, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of order")

    monkeypatch.setattr(all_checks, "predict_peaks", fail)
    report = validate(ValidationSettings(2, workload=NAME))
    [peaks] = (check for check in report.checks if check.part == "peaks")
    assert (peaks.outcome, peaks.note) == ("not ok", "RuntimeError: out of order")
    assert report.gradients_are_right  # the exit code is theirs


def test_checks_before_an_error_are_kept():
    def checks():
        yield "first"
        raise ValueError("no")

    first, last = guarded("peaks", "what", checks())
    assert first == "first"
    assert (last.outcome, last.note) == ("not ok", "ValueError: no")


def test_settings_that_cannot_be_used_are_refused(stand_in):
    with pytest.raises(ArgumentError, match="num_devices must be at least 2, got 1"):
        ValidationSettings(1)
    with pytest.raises(ArgumentError, match="num_devices=5, but there are 4 accelerators"):
        ValidationSettings(5)
