"""Test ``balanced-dp plan``."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter
from typer.testing import CliRunner

from balanced_dp import Report
from balanced_dp.cli.commands import app
from balanced_dp.tuning.workload import BUILT_IN

WIDE = ["tests.tuning.small_workloads:wide_output", "--batch-size", "2000"]


@pytest.mark.parametrize(
    ("memory", "begins", "has"),
    [
        (
            "100GiB",
            "With the even split of nn.DataParallel the batch fits: device 0 is the fullest, with",
            [
                "# option 1\nmodel = nn.DataParallel(model)\n",
                "gather=False)\ncriterion = BalancedCriterion(criterion)\n",
                "A smaller gpu0_bsz costs speed: with BalancedDataParallel(404, model, ga",
            ],
        ),
        (
            "8GiB",  # what does not fit leads with what does
            "With the even split of nn.DataParallel the batch does not fit: device 0 is the full",
            ["# option 1\nmodel = BalancedDataParallel(None, model, gat"],
        ),
    ],
)
def test_the_options_best_one_first(memory, begins, has):
    done = CliRunner().invoke(app, ["plan", *WIDE, "--memory", memory])
    assert done.exit_code == 0, done.stderr
    title, begin, *_ = done.stdout.splitlines()
    assert title == "wide-output, batches of 2000, 4 devices" and begin.startswith(begins)
    assert [part for part in has if part not in done.stdout] == []
    assert ("= nn.DataParallel(model)" in done.stdout) == (memory == "100GiB")


@pytest.mark.parametrize("goal", ["headroom", "batch"])
def test_the_goal_decides_what_comes_first(goal):
    options = ["--memory", "24GiB,11GiB,11GiB", "--for", goal, "--json", "-"]
    done = CliRunner().invoke(app, ["plan", *WIDE, *options])
    report = TypeAdapter(Report).validate_json(done.stdout)
    assert (report.goal, report.mode) == (goal, "symbolic")
    best, *others = report.ranked_options
    assert best.device_weights is not None
    full = [option.utilization(report.budgets) for option in (best, *others)]
    sizes = [option.batch_size for option in (best, *others)]
    assert full[0] <= min(full) * 1.01 if goal == "headroom" else sizes[0] == max(sizes)


def test_the_built_in_workloads_are_listed():
    done = CliRunner().invoke(app, ["plan", "--list"])
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [*BUILT_IN]
    for name, published in (("gpt2-small", 124_439_808), ("gpt2-medium", 354_823_168)):
        with torch.device("meta"):
            model = BUILT_IN[name]().new_model()
        assert sum(p.numel() for p in model.parameters()) == published
