"""Test ``balanced-dp plan``."""

from __future__ import annotations

import json
import re

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from balanced_dp import Report
from balanced_dp.cli.commands import app
from balanced_dp.tuning.workload import BUILT_IN

SMALL = "tests.tuning.small_workloads"
WIDE = [f"{SMALL}:wide_output", "--batch-size", "2000"]


@pytest.mark.parametrize(
    ("options", "begins", "has"),
    [
        (
            ["--memory", "100GiB"],
            "It fits as it is: with nn.DataParallel(model) the bottleneck is device 0",
            [
                "# option 1\nmodel = nn.DataParallel(model)\n",
                "gather=False)\ncriterion = BalancedCriterion(criterion)\n",
                "A smaller gpu0_bsz costs speed: with BalancedDataParallel(404, model, ga",
            ],
        ),
        (
            ["--memory", "8GiB"],  # what does not fit leads with what does
            "With nn.DataParallel(model) it does not fit: the bottleneck is device 0 with",
            ["# option 1\nmodel = BalancedDataParallel(None, model, gat"],
        ),
        (
            ["--memory", "100GiB", "--loss-on-device"],
            "It fits as it is: with BalancedDataParallel(None, model, gather=False) the ",
            [
                "# option 1\nmodel = BalancedDataParallel(None, model, gather=False)\n"
                "criterion = BalancedCriterion(criterion)"
            ],
        ),
    ],
)
def test_the_options_are_told_the_best_one_first(options, begins, has):
    done = CliRunner().invoke(app, ["plan", *WIDE, *options])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(begins)
    assert "wide-output, batches of 2000, 4 devices" in done.stdout
    assert [part for part in has if part not in done.stdout] == []
    assert ("= nn.DataParallel(model)" in done.stdout) == ("with nn.DataParallel" in begins)


@pytest.mark.parametrize("goal", ["headroom", "batch"])
def test_the_goal_decides_which_option_comes_first(goal):
    options = ["--memory", "24GiB,11GiB,11GiB", "--for", goal, "--json", "-"]
    done = CliRunner().invoke(app, ["plan", *WIDE, *options])
    report = TypeAdapter(Report).validate_json(done.stdout)
    assert report.goal == goal
    assert report.mode == "symbolic"
    best, *others = report.ranked_options
    assert best.device_weights is not None
    full = [option.utilization(report.budgets) for option in (best, *others)]
    sizes = [option.batch_size for option in (best, *others)]
    assert full[0] <= min(full) * 1.01 if goal == "headroom" else sizes[0] == max(sizes)


@pytest.mark.parametrize(
    "options",
    [
        ["plan", "--memory", "11GiB"],
        ["plan", "--memory", "24GiB,11GiB,11GiB", "--for", "batch"],
        ["tune", "--emulate", "--memory", "100GiB", "--devices", "8", "--for", "headroom"],
        pytest.param(
            ["tune", "--emulate", "--memory", "100GiB", "--devices", "11", "--sweep", "9:12"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_cell_is_wrapped_at_80_columns(options):
    done = CliRunner().invoke(app, [*options, *WIDE])  # wider than a terminal
    assert done.exit_code == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if re.match(r" +\d|[ ─]+$", line)]
    assert len(rows) > 5
    assert max(len(line.rstrip()) for line in rows) <= 80


def test_the_built_in_workloads_are_listed():
    done = CliRunner().invoke(app, ["plan", "--list", "--json", "-"])
    listed = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(listed) == set(BUILT_IN)
    assert listed["gpt2-small"]["num_parameters"] == 124_439_808  # as published
    assert listed["gpt2-medium"]["num_parameters"] == 354_823_168
    assert listed["bert-base"]["num_parameters"] == pytest.approx(109.5e6, rel=0.001)
