"""What is measured for the built-in workloads: the README's figures, the guide's, the picture's.

Each workload is planned once for all the tests of this file.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balanced_dp.cli.commands import app
from balanced_dp.cli.demo import DemoSettings, run_demo
from balanced_dp.report import load_reports
from balanced_dp.report.tables import candidate_table
from balanced_dp.tuning.open_devices import open_devices, uses_emulation
from balanced_dp.tuning.step import measure_step, step_meter
from balanced_dp.tuning.workload import find_workload
from balanced_dp.units import format_bytes
from benchmarks import before_and_after, engines

from .processes import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
WHICH_ONE = (ROOT / "docs" / "which_one.md").read_text("utf-8")
PLANNING = (ROOT / "docs" / "planning.md").read_text("utf-8")


@pytest.fixture(scope="module")
def gpt2_file(tmp_path_factory):
    """The report of the command that README and guide show."""
    options = ("--devices", "4", "--memory", "11GiB", "--batch-size", "32", "--json", "-")
    done = CliRunner().invoke(app, ["plan", "gpt2-small", *options])
    assert (done.exit_code, done.stderr.strip()) == (0, "")
    path = tmp_path_factory.mktemp("gpt2") / "plan.json"
    path.write_text(done.stdout)
    return path


@pytest.fixture(scope="module")
def gpt2(gpt2_file):
    [report] = load_reports(gpt2_file)
    return report


@pytest.fixture(scope="module")
def apart():
    """The same with the loss on each device."""
    return before_and_after.measured(gather=False)


@pytest.fixture(scope="module")
def spread():
    """The same with parameters on all devices as well."""
    return before_and_after.measured(gather=False, spread=True)


def test_the_plan_of_gpt2_small_says_what_gathering_costs(gpt2_file):
    said = CliRunner().invoke(app, ["report", str(gpt2_file)]).stdout
    assert "With gathered outputs no value of gpu0_bsz balances this: without any" in said
    assert "costs device 0 6.13 GiB" in said
    assert said.startswith("It fits as it is: with nn.DataParallel the bottleneck is device 0")
    assert "with 8.70 GiB, 83% full." in said


def test_spread_parameters_level_all_devices(spread):
    """Also where gradients and optimizer state alone do not fit device 0, as the guide says."""
    peaks = spread.chosen.peak_bytes
    assert max(peaks) <= 1.03 * min(peaks)
    workload = find_workload("gpt2-large")
    with open_devices(4, emulate=True) as devices:
        home = measure_step(workload, 4, 0, devices, gather=False)
        with step_meter(workload, devices, gather=False, spread=True) as meter:
            large = {size: meter.measure(size, size // 4).peak_bytes for size in (12, 24, 28)}
    assert f"{home.peak_bytes[0] / 2**30:.2f} GiB there without a sample" in WHICH_ONE
    assert f"(12 samples: {max(large[12]) / 2**30:.2f} GiB)" in WHICH_ONE
    assert max(large[12]) <= 1.03 * min(large[12])
    assert max(large[24]) < 10.5 * 2**30 < max(large[28])


def test_the_picture_of_engines_is_measured():
    found = engines.measured()
    figures = re.compile(r">([^<>]*(?:[MG]iB|samples)[^<>]*)<")
    drawn = figures.findall(engines.picture(found))
    assert figures.findall(engines.PATH.read_text("utf-8")) == drawn != []
    *others, spread, ranks, sharded = (max(measured.peak_bytes) for measured in found.values())
    assert sharded < spread < 0.55 * min(*others, ranks)


def test_the_largest_batch_of_fully_shard():
    shown, fits, too_large = (
        engines.sharded("gpt2-small", batch_size // 4, 4).peak_bytes[0]
        for batch_size in (32, 136, 140)
    )
    [row] = [line for line in WHICH_ONE.splitlines() if line.startswith("| `fully_shard`")]
    assert row.split(" | ")[1:4] == [format_bytes(shown), "the same", "136"]
    assert fits <= 10.5 * 2**30 < too_large


def test_the_table_of_ways_is_measured(gpt2, apart, spread):
    ways = {
        "nn.DataParallel": (gpt2.even, gpt2.plan.even_max_batch_size),
        "BalancedDataParallel": (gpt2.chosen, gpt2.plan.max_batch_size),
        "the same, loss on each device": (apart.chosen, apart.plan.max_batch_size),
        "the same, `spread=True": (spread.chosen, spread.plan.max_batch_size),
    }
    for name, (measured, size) in ways.items():
        first, *others = (round(peak / 2**30, 2) for peak in measured.peak_bytes)
        [row] = re.findall(rf"^\| `?{name}`? \| (.*)", WHICH_ONE, re.MULTILINE)
        assert row.startswith(f"{first:.2f} GiB | {max(others):.2f} GiB | {size} |")


def test_the_picture_s_figures_are_measured(gpt2, apart, monkeypatch):
    asked = []

    def planned(workload, batch_size, **options):
        asked.append((workload.name, batch_size, options))
        return gpt2

    monkeypatch.setattr(before_and_after, "tune", planned)
    report = before_and_after.measured()
    capacities, reserve = list(gpt2.plan.capacity_bytes), gpt2.plan.reserve_bytes
    options = {"capacities": capacities, "reserve": reserve, "emulate": True}
    assert asked == [(gpt2.workload, gpt2.plan.batch_size, options)]  # those of the command
    picture = before_and_after.PATH.read_text("utf-8")
    drawn = before_and_after.picture(report, apart)
    figures = re.compile(r">([^<>]*(?:[MG]iB|samples|model)[^<>]*)<")
    assert figures.findall(picture) == figures.findall(drawn) != []
    even, best = report.plan.even_max_batch_size, report.plan.max_batch_size
    assert f"the largest batches are {even}, {best} and {apart.plan.max_batch_size}." in README


def test_the_demo_s_memory_figures_are_those_of_the_readme():
    runs = run_demo(DemoSettings(steps=2, emulate=True))
    rows = dict(re.findall(r"^ (split|peak, .*?) {2,}(.*)$", README, re.MULTILINE))
    measured = [run.measured for run in runs]
    splits = [" ".join(map(str, found.chunk_sizes)) for found in measured]
    assert re.split(" {2,}", rows["split"]) == splits
    firsts = [found.peak_bytes[0] / 2**20 for found in measured]
    others = [max(found.peak_bytes[1:]) / 2**20 for found in measured[1:]]
    # The text, and with it the number of different characters, is that of the Python.
    assert numbers([rows["peak, device 0"]]) == pytest.approx(firsts, rel=0.005)
    assert numbers([rows["peak, highest other"]]) == pytest.approx(others, rel=0.005)


@functools.cache
def swept(*options):
    """Returns the JSON of the command whose table the guide shows."""
    command = ["tune", "char-lm", "--sweep", "0:8", "--json", "-", *options]
    return CliRunner().invoke(app, command).stdout


def test_the_table_of_values_is_measured(tmp_path):
    (tmp_path / "report.json").write_text(swept("--emulate"))
    [report] = load_reports(tmp_path / "report.json")
    rows = candidate_table(report).rows
    assert len(rows) == 9
    shown = [row.replace("**", "").split(" | ") for row in re.findall(r"\n\| (.*) \|", PLANNING)]
    for row in rows:
        [found] = [cells for cells in shown if cells[:2] == list(row[:2])]
        # The text, and with it the number of different characters, is that of the Python.
        assert numbers(found) == pytest.approx(numbers(row), rel=0.01, abs=0.02)


def numbers(cells: Sequence[str]) -> list[float]:
    return [float(number) for cell in cells for number in re.findall(r"[\d.]+", cell)]


def test_the_benchmark_sweep_gives_the_same_report(tmp_path):
    path = tmp_path / "bench.json"
    options = ("-q", "-k", "char-lm", f"--benchmark-json={path}")
    # pytest-benchmark measures nothing in xdist's processes.
    environ = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = python(
        *("-m", "pytest", str(ROOT / "benchmarks" / "test_sweep.py"), *options),
        cwd=ROOT,
        environ={**environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout
    for benchmark in json.loads(path.read_text())["benchmarks"]:
        assert len(benchmark["extra_info"]["peak_bytes"]) == 4
    record = json.loads(CliRunner().invoke(app, ["report", str(path), "--json", "-"]).stdout)
    tuned = json.loads(swept(*(("--emulate",) if uses_emulation(emulate=False) else ())))
    for name in ("gpu0_bsz", "chunk_sizes", "capacity_bytes", "predicted_bytes"):
        assert record["plan"][name] == pytest.approx(tuned["plan"][name], rel=0.001)
    for name in ("chosen", "even"):
        assert record[name]["backward_peak_bytes"] == tuned[name]["backward_peak_bytes"]
    assert record["origin"]["command"].startswith("python -m pytest ")


def test_the_ratio_without_the_lock_is_measured():
    results = ROOT / "benchmarks" / "results"
    [table] = results.glob("free-threading_*.md")
    row = "| balanced_dp | transformer, 48 layers, training | "
    ratio = float(table.read_text("utf-8").partition(row)[2].split(" ")[0])
    for page in ("docs/limits.md", "docs/step.md"):
        text = " ".join((ROOT / page).read_text("utf-8").split())
        assert f"took {ratio:.2f} times as long as" in text
