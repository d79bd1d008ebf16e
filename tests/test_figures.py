"""What is measured for the built-in workloads: the README's figures, the guide's, the picture's.

Each workload is planned once for all the tests of this file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balanced_dp import tune
from balanced_dp.cli.commands import app
from balanced_dp.cli.demo import DemoSettings, run_demo
from balanced_dp.report import load_reports
from balanced_dp.report.tables import candidate_table
from balanced_dp.tuning.open_devices import open_devices
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


def test_the_plan_of_gpt2_small_says_what_fits(gpt2_file):
    said = CliRunner().invoke(app, ["report", str(gpt2_file)]).stdout
    assert said.startswith("It fits as it is: with nn.DataParallel(model) the bottleneck is device")
    assert "with 8.70 GiB, 83% full." in said


def test_the_plan_measures_no_more_steps_than_a_person_would_wait_for(gpt2):
    assert len(gpt2.options) <= 27


def test_spread_parameters_level_all_devices(spread):
    """Also where gradients and optimizer state alone do not fit device 0, as the guide says."""
    peaks = spread.even.peak_bytes
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
    def least_full(report):
        of_batch = [o for o in report.options if o.batch_size == 32 and o.gather and not o.spread]
        return min(of_batch, key=lambda option: max(option.peak_bytes))

    ways = {
        "nn.DataParallel": (gpt2.even, gpt2.largest_batch(gpt2.even).batch_size),
        "BalancedDataParallel": (least_full(gpt2), 47),
        "the same, loss on each device": (apart.best, 113),
        "the same, `spread=True": (spread.best, 112),
    }
    largest = (
        gpt2.largest_batch(least_full(gpt2)),
        *(r.largest_batch(r.best) for r in (apart, spread)),
    )
    assert [option.batch_size for option in largest] == [47, 113, 112]
    for name, (measured, size) in ways.items():
        first, *others = (round(peak / 2**30, 2) for peak in measured.peak_bytes)
        [row] = re.findall(rf"^\| `?{name}`? \| (.*)", WHICH_ONE, re.MULTILINE)
        assert row.startswith(f"{first:.2f} GiB | {max(others):.2f} GiB | {size} |")


def test_the_picture_s_figures_are_measured(gpt2, apart):
    report = before_and_after.measured()
    assert report.capacity_bytes == gpt2.capacity_bytes
    assert (report.batch_size, report.reserve_bytes) == (gpt2.batch_size, gpt2.reserve_bytes)
    picture = before_and_after.PATH.read_text("utf-8")
    drawn = before_and_after.picture(report, apart)
    figures = re.compile(r">([^<>]*(?:[MG]iB|samples|model)[^<>]*)<")
    assert figures.findall(picture) == figures.findall(drawn) != []
    found = (report.even, report.best)
    even, best = (report.largest_batch(option).batch_size for option in found)
    largest = apart.largest_batch(apart.best).batch_size
    assert f"batches are {even}, {best} and {largest}." in " ".join(README.split())
    at_best = report.largest_batch(report.best)
    assert (at_best.chunk_sizes[0], f"{at_best.speed:.2f}") == (0, "0.75")


def test_the_demo_s_memory_figures_are_those_of_the_readme():
    _, runs = run_demo(DemoSettings(steps=2, emulate=True))
    rows = dict(re.findall(r"^ (split|peak, .*?) {2,}(.*)$", README, re.MULTILINE))
    measured = [run.measured for run in runs]
    splits = [" ".join(map(str, found.chunk_sizes)) for found in measured]
    assert re.split(" {2,}", rows["split"]) == splits
    firsts = [found.peak_bytes[0] / 2**20 for found in measured]
    others = [max(found.peak_bytes[1:]) / 2**20 for found in measured[1:]]
    # The text, and with it the number of different characters, is that of the Python.
    assert numbers([rows["peak, device 0"]]) == pytest.approx(firsts, rel=0.005)
    assert numbers([rows["peak, highest other"]]) == pytest.approx(others, rel=0.005)


def test_the_table_of_values_is_measured():
    report = tune(
        find_workload("char-lm"), 32, sweep=range(9), emulate=True, with_alternatives=False
    )
    rows = candidate_table(report).rows
    assert len(rows) == 9
    shown = [row.replace("**", "").split(" | ") for row in re.findall(r"\n\| (.*) \|", PLANNING)]
    for row in rows:
        [found] = [cells for cells in shown if cells[:2] == list(row[:2])]
        # The text, and with it the number of different characters, is that of the Python.
        assert numbers(found) == pytest.approx(numbers(row), rel=0.01, abs=0.02)


def numbers(cells: Sequence[str]) -> list[float]:
    return [float(number) for cell in cells for number in re.findall(r"[\d.]+", cell)]


def test_the_benchmark_sweep_gives_a_report(tmp_path):
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
    [report] = load_reports(path)
    assert [option.chunk_sizes[0] for option in report.options] == list(range(9))
    assert report.best.chunk_sizes[0] == 5
    assert report.provenance.command.startswith("python -m pytest ")


def test_the_ratio_without_the_lock_is_measured():
    results = ROOT / "benchmarks" / "results"
    [table] = results.glob("free-threading_*.md")
    row = "| balanced_dp | transformer, 48 layers, training | "
    ratio = float(table.read_text("utf-8").partition(row)[2].split(" ")[0])
    for page in ("docs/limits.md", "docs/step.md"):
        text = " ".join((ROOT / page).read_text("utf-8").split())
        assert f"took {ratio:.2f} times as long as" in text
