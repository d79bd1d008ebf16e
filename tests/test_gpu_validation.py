"""benchmarks/gpu_validation.py, as far as it goes without a GPU."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from balanced_dp import emulate_devices
from balanced_dp.validation import peaks

from .processes import python
from .tuning.small_workloads import SMALL

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_validation.py"


@pytest.fixture(scope="module")
def validation():
    spec = importlib.util.spec_from_file_location("gpu_validation", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def run(*arguments):
    return python(str(SCRIPT), *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_a_line():
    done = run()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpu_validation: torch sees no NVIDIA GPU here\n"


def test_an_unknown_part_is_refused():
    done = run("nonsense")
    assert done.returncode == 2
    assert "there is no part nonsense; parts: probe, emulation, speed" in done.stderr


@pytest.mark.parametrize(
    ("measured", "reference", "allowed", "outcome"),
    [
        (10, 10, 0, "ok"),
        (10, 12, 2, "ok"),
        (10, 13, 2, "FAILED"),
        (None, 10, 100, "FAILED"),
        (10, None, 0, "not run"),
    ],
)
def test_outcomes(validation, measured, reference, allowed, outcome):
    assert validation.Check("", measured, reference, allowed).outcome == outcome


def test_reports_say_where_and_how_they_came_about(validation, tmp_path):
    checks = [validation.Check("one", 1000, 1000, 0), validation.Check("two", 5, None, 0, "note")]
    written = validation.write_report("probe", checks, "NVIDIA Some-GPU 80GB", tmp_path)
    assert [re.sub(r"\d{4}-\d\d-\d\d", "DATE", path.name) for path in written] == [
        "probe_nvidia-some-gpu-80gb_DATE.md",
        "probe_nvidia-some-gpu-80gb_DATE.json",
    ]
    text = written[0].read_text()
    assert "| one | 1,000 | 1,000 | 0 | ok |  |" in text
    assert "| two | 5 |  | 0 | not run | note |" in text
    record = json.loads(written[1].read_text())
    assert record["hardware"] == "NVIDIA Some-GPU 80GB"
    assert record["versions"]["torch"] == torch.__version__
    assert record["command"].startswith("python benchmarks/gpu_validation.py")
    assert [check["outcome"] for check in record["checks"]] == ["ok", "not run"]


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
    assert check.name.startswith("char-transformer, batch 6, ")
    how = "gathered" if gather else "loss on each device"
    assert check.name.endswith(f"{[0] * num_replicas}, {how}")
    assert check.measured == check.reference
    assert check.note.startswith("+0.00%;")


def test_errors_are_summed_up_with_their_sign(validation):
    checks = [validation.Check("", 100 + error, 100, 10) for error in (-4, 1, 2, 3, 9)]
    median, worst, too_low = validation.summaries([*checks, validation.Check("", 1, None, 0)])
    assert (median.measured, median.outcome) == (30_000, "ok")
    assert (worst.measured, worst.outcome) == (90_000, "ok")
    assert (too_low.measured, too_low.note) == (1, "of 5, by 4.00% at most")
    assert next(validation.summaries([validation.Check("", 120, 100, 10)])).outcome == "FAILED"
    assert [c.outcome for c in validation.summaries([])] == ["FAILED"]


def test_speed_is_a_ratio(validation):
    times = {"ours": 0.0035, "nn.DataParallel": 0.005, "one GPU": 0.003}
    check = validation.speed_check("a step", times, 700)
    assert (check.measured, check.outcome) == (700, "ok")
    assert check.note == "ours 3.50 ms, nn.DataParallel 5.00 ms, one GPU 3.00 ms"
    assert validation.speed_check("a step", times, 699).outcome == "FAILED"


WORKSPACE = 2**20


def test_what_libraries_keep_for_themselves_is_not_taken_for_the_steps_peak(validation, stand_in):
    """cuBLAS keeps memory for each thread and stream that computes: here two of each."""
    workload = SMALL["char_transformer"]()
    with stand_in.workspaces(WORKSPACE):
        check = validation.compare_peaks(workload, 6, 2, stand_in.devices[0])
    assert check.outcome == "ok", check
    assert "cuBLAS's 2 MiB left out" in check.note


def test_a_step_of_replicas_that_share_a_device_is_broken_down(validation, stand_in):
    with stand_in.workspaces(WORKSPACE):
        checks = list(validation._step_checks(stand_in.devices[0], length=2))
    assert len(checks) == 5
    assert [check for check in checks if check.outcome != "ok"] == []
