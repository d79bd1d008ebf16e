"""benchmarks/gpu_validation.py, as far as it goes without a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from balanced_dp import emulate_devices
from balanced_dp.validation import peaks

from .tuning.small_workloads import SMALL

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_validation.py"


@pytest.fixture(scope="module")
def validation():
    with mock.patch.object(sys, "path", [str(SCRIPT.parent), *sys.path]):
        return importlib.import_module("gpu_validation")


def test_without_a_gpu_it_says_so_in_a_line(validation, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert validation.main() == 1
    assert capsys.readouterr() == ("", "gpu_validation: torch sees no NVIDIA GPU here\n")


def test_an_unknown_part_is_refused(validation, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "nonsense"])
    with pytest.raises(SystemExit, match="2"):
        validation.main()
    told = capsys.readouterr().err
    assert "there is no part nonsense; parts: probe, emulation, speed" in told


def test_tables_say_where_and_how_they_came_about(validation, tmp_path, monkeypatch, capsys):
    """One of each outcome, on a GPU that is not there."""
    cases = [(10, 12, 2), (1000, 1013, 2), (None, 10, 100), (10, None, 0)]
    outcomes = ["ok", "FAILED", "FAILED", "not run"]

    def part():
        return (validation.check(f"case {i}", *case) for i, case in enumerate(cases))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Some-GPU 80GB")
    monkeypatch.setitem(validation.PARTS, "probe", part)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "probe", "--results", str(tmp_path)])
    assert validation.main() == 1
    text, record = (
        next(tmp_path.glob(f"probe_nvidia-some-gpu-80gb_????-??-??.{kind}")).read_text()
        for kind in ("md", "json")
    )
    assert "| case 1 | 1,000 | 1,013 | 2 | FAILED |  |" in text
    assert "| case 3 | 10 |  | 0 | not run |  |" in text
    found = json.loads(record)
    assert found["hardware"] == "NVIDIA Some-GPU 80GB"
    assert (found["versions"]["torch"], found["versions"]["cuda"]) == (torch.__version__, "12.6")
    assert found["command"].startswith("python benchmarks/gpu_validation.py probe")
    assert [row["outcome"] for row in found["rows"]] == outcomes
    assert "FAILED   case 1" in capsys.readouterr().out


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize(("num_replicas", "gather"), [(1, True), (2, True), (2, False)])
def test_peaks_are_compared_with_those_of_another_device(
    validation, num_replicas, gather, precision
):
    """Here with an emulated one that computes numbers, which agrees to the byte."""
    compare = peaks.measure_step

    def measure(workload, batch_size, gpu0_bsz, devices, *, gather):
        if devices[0].type == "lazy":
            return compare(workload, batch_size, gpu0_bsz, devices, gather=gather)
        with emulate_devices(1) as others:
            repeated = list(others) * len(devices)
            return compare(workload, batch_size, gpu0_bsz, repeated, gather=gather)

    workload = replace(SMALL["char_transformer"](), precision=precision)
    with (
        mock.patch.object(peaks, "measure_step", measure),
        mock.patch.object(torch.cpu, "memory_allocated", lambda device: 0, create=True),
    ):
        check = validation.compare_peaks(
            workload, 6, num_replicas, torch.device("cpu"), gather=gather
        )
    assert check["check"].startswith("char-transformer, batch 6, ")
    how = "gathered" if gather else "loss on each device"
    assert check["check"].endswith(f"{[0] * num_replicas}, {how}")
    assert check["measured"] == check["reference"]
    assert check["note"].startswith("+0.00%;")


def test_errors_are_summed_up_with_their_sign(validation):
    checks = [validation.check("", 100 + error, 100, 10) for error in (-4, 1, 2, 3, 9)]
    median, worst, too_low = validation.summaries([*checks, validation.check("", 1, None, 0)])
    assert (median["measured"], median["outcome"]) == (30_000, "ok")
    assert (worst["measured"], worst["outcome"]) == (90_000, "ok")
    assert (too_low["measured"], too_low["note"]) == (1, "of 5, by 4.00% at most")
    assert next(validation.summaries([validation.check("", 120, 100, 10)]))["outcome"] == "FAILED"
    assert [c["outcome"] for c in validation.summaries([])] == ["FAILED"]


def test_speed_is_a_ratio(validation):
    times = {"ours": 0.0035, "nn.DataParallel": 0.005, "one GPU": 0.003}
    check = validation.speed_check("a step", times, 700)
    assert (check["measured"], check["outcome"]) == (700, "ok")
    assert check["note"] == "ours 3.50 ms, nn.DataParallel 5.00 ms, one GPU 3.00 ms"
    assert validation.speed_check("a step", times, 699)["outcome"] == "FAILED"


def test_a_step_of_replicas_that_share_a_device_is_broken_down(validation, stand_in):
    with stand_in.workspaces(2**20):
        checks = list(validation._step_checks(stand_in.devices[0], length=2))
    assert len(checks) == 5
    assert [check for check in checks if check["outcome"] != "ok"] == []
