"""Test what the commands plan, tune, report, demo and validate print and write."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from balanced_dp import validation
from balanced_dp.cli import demo
from balanced_dp.report import load_report
from balanced_dp.tuning.workload import BUILT_IN, encoded_text
from balanced_dp.validation import Check, Validation

DEMO = ["demo", "--emulate"]
WIDE = ["plan", "tests.tuning.small_workloads:wide_output", "--batch-size", "2000"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "says", "first"),
    [
        ("100GiB", "fits", "nn.DataParallel(model)\n# option 2\n"),
        ("8GiB", "does not fit", "BalancedDataParallel(None, model, gather=False)\ncriterion = "),
    ],
)
def test_the_options_best_one_first(memory, says, first, invoke):
    done = invoke(*WIDE, "--memory", memory)
    assert done.exit_code == 0, done.stderr
    title, begin, *_ = done.stdout.splitlines()
    assert title == "wide-output, batches of 2000, 4 devices"
    assert begin.startswith(f"With the even split of nn.DataParallel, the batch {says}: device 0")
    assert f"# option 1\nmodel = {first}" in done.stdout
    assert "gpu0_bsz costs speed. A largest batch may need another gpu0_bsz: see" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("goal", ["headroom", "batch"])
def test_the_goal_decides_what_comes_first(goal, folder, invoke):
    invoke(*WIDE, "--memory", "24GiB,11GiB,11GiB", "--for", goal, "--json", "goal.json")
    report = load_report(folder / "goal.json")
    assert (report.goal, report.mode) == (goal, "symbolic")
    best, *others = report.ranked_options
    assert best.device_weights is not None
    full = [option.utilization(report.budgets) for option in (best, *others)]
    sizes = [option.batch_size for option in (best, *others)]
    assert full[0] <= min(full) * 1.01 if goal == "headroom" else sizes[0] == max(sizes)


@pytest.mark.parametrize("command", ["plan", "tune"])
def test_the_built_in_workloads_are_listed(command, invoke):
    done = invoke(command, "--list")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [*BUILT_IN]


def test_models_have_the_published_size():
    for name, published in (("gpt2-small", 124_439_808), ("gpt2-medium", 354_823_168)):
        with torch.device("meta"):
            model = BUILT_IN[name]().new_model()
        assert sum(p.numel() for p in model.parameters()) == published


def test_tune_prints_what_report_reads(folder, tuned, invoke):
    assert tuned.returncode == 0, tuned.stderr
    report = load_report(folder / "a.json")
    assert f"# option 1\nmodel = {report.best.line}\n" in tuned.stdout
    assert (report.workload, report.batch_size, report.has_capacity) == ("mine", 64, False)
    assert report.capacity_bytes == (max(report.even.peak_bytes),) * 4
    assert {o.chunk_sizes[0] for o in report.options if o.batch_size == 64} >= set(range(4))
    assert report.provenance.command.startswith("python -m balanced_dp tune mine:make --sweep 0:3")
    shown = invoke("report", "a.json")
    assert shown.stdout == tuned.stdout and "Measured values of gpu0_bsz for " in shown.stdout
    written = invoke("report", "a.json", "--html", "b.html", "--markdown", "b.md", "--json", "-")
    assert written.exit_code == 0 and written.stderr == "wrote b.html\nwrote b.md\n"
    assert (folder / "b.html").read_text() == (folder / "a.html").read_text()
    assert written.stdout == (folder / "a.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "begins", "ends"),
    [
        ("report a.json --against a.json --html -", "<!doctype html>", "</html>\n"),
        ("report a.json --markdown -", "# mine, batches of 64, 4 devices\n", " |\n"),
        ("tune mine:make --json -", '{\n  "schema": ', "}\n"),
        ("report a.json --against a.json --fail peak:5% --json -", '[\n  {\n    "metric"', "]\n"),
    ],
)
def test_stdout_may_be_the_file(tuned, invoke, command, begins, ends):
    done = invoke(*command.split())
    assert (done.exit_code, "worse by" in done.stderr) == (0, "--against" in command)
    assert done.stdout.startswith(begins) and done.stdout.endswith(ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "limits", "code", "says"),
    [
        ("a.json", "peak:0%,speed:0%", 0, "ok"),
        ("c.json", "peak:5%,speed:99%", 1, "FAILED"),
        ("c.json", "", 0, "after: BalancedDataParallel("),
    ],
)
def test_a_report_against_an_older_one(file, limits, code, says, tuned, invoke):
    assert file == "a.json" or invoke("tune", "mine:other", "--json", file).exit_code == 0
    done = invoke("report", file, "--against", "a.json", "--fail", limits)
    assert done.exit_code == code and says in done.stdout


@pytest.mark.slow
def test_devices_and_capacities_are_as_asked(invoke):
    reserved = "--memory 80MiB,40MiB --reserve 1MiB"
    for options, capacities in (("--devices 3", None), (reserved, [80, 40])):
        done = invoke("tune", "mine:make", *options.split(), "--json", "-")
        assert done.exit_code == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["reserve_bytes"] == 2**20 * bool(capacities)
        found = [capacity / 2**20 for capacity in report["capacity_bytes"]]
        assert found == capacities or (capacities is None and len(found) == 3)
    assert any(option["device_weights"] for option in report["options"])


@pytest.mark.slow
def test_the_demo_trains_the_same_three_times(folder, invoke):
    encoded, num_characters = encoded_text()
    assert 400_000 < len(encoded) < 800_000 and 50 < num_characters < 200
    done = invoke(*DEMO, "--devices", "3", "--steps", "3", "--json", "demo.json")
    assert done.exit_code == 0, done.stderr
    assert "The loss curves agree" in done.stdout
    lines = (re.split(" {2,}", line.strip()) for line in done.stdout.splitlines())
    rows = {name: cells for name, *cells in lines}
    best = load_report(folder / "demo.json").best
    assert rows["split"] == ["32", "11 11 10", " ".join(map(str, best.chunk_sizes))]
    assert len({*rows["last loss"]}) == 1 and float(rows["last loss"][0]) < math.log(num_characters)
    peaks = [float(cell) for cell in rows["peak, device 0"]]
    assert peaks == sorted(peaks, reverse=True)
    assert f"# option 1\nmodel = {best.line}\n" in invoke("report", "demo.json").stdout


@pytest.mark.slow
def test_a_demo_whose_losses_differ(monkeypatch, invoke):
    monkeypatch.setattr(demo, "LOSS_TOLERANCE", -1.0)
    done = invoke(*DEMO, "--devices", "2", "--steps", "1", "--gpu0-bsz", "2")
    assert done.exit_code == 1 and "FAILED: the loss curves differ by" in done.stdout
    runs = [demo.DemoRun("", None, [1.0, loss, 1.0]) for loss in (2.0, 5.0, 3.0)]
    assert demo.loss_difference(runs) == 3
    assert re.search(r" split +32 +16 16 +2 30 ", done.stdout)


@pytest.mark.parametrize(("ok", "exit_code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize(
    ("option", "begins"), [("--json", "{"), ("--markdown", "### balanced-dp validate: two devices")]
)
def test_validate_fails_for_gradients_only(option, begins, ok, exit_code, invoke, monkeypatch):
    checks = Check("gradients", "every split", ok, "1e-3"), Check("time", "a", False)

    def run(num_devices, emulate, workload, on_check):
        for check in checks:
            on_check(check)
        return Validation("two devices", {"torch": "2"}, checks)

    monkeypatch.setattr(validation, "validate", run)
    done = invoke("validate", "char-lm", option, "-")
    assert done.exit_code == exit_code and done.stdout.startswith(begins)
    assert "(two devices)" in done.stderr and str(checks[0]) in done.stderr
