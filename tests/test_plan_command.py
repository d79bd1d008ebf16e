"""``balanced-dp plan`` and ``balanced-dp workloads``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from balanced_dp.cli import app, main
from balanced_dp.workloads import BUILT_IN

from .processes import python


def plan(*arguments, **options):
    return python("-m", "balanced_dp", "plan", *arguments, **options)


@pytest.fixture(scope="module")
def gpt2_small():
    options = ("--devices", "4", "--memory", "11GiB", "--batch-size", "32", "--json")
    done = plan("gpt2-small", *options)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    return done


def test_the_plan_of_gpt2_small_says_what_gathering_costs(gpt2_small, tmp_path):
    (tmp_path / "plan.json").write_text(gpt2_small.stdout)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "plan.json")])
    assert done.exit_code == 0
    assert "model = BalancedDataParallel(gpu0_bsz=0, module=model)" in done.stdout
    assert "No value of gpu0_bsz balances this: without any samples device 0" in done.stdout
    assert "costs device 0 6.13 GiB" in done.stdout
    told = " ".join(done.stdout.split())
    assert "(gather=False and BalancedCriterion) and gpu0_bsz=6 the fullest is device 1" in told
    assert "3.51 GiB, 33% full, and the largest batch that fits is 113." in told


WIDE = ["tests.small_workloads:wide_output", "--batch-size", "2000", "--devices", "4"]


def test_the_loss_on_each_device_is_planned():
    done = CliRunner().invoke(app, ["plan", *WIDE, "--memory", "100GiB", "--loss-on-device"])
    told = " ".join(done.stdout.split())
    assert "loss on each device. 512.00 MiB" in told
    assert ", module=model, gather=False) criterion = BalancedCriterion(criterion) The" in told
    assert "With the outputs gathered and their loss computed on device 0 and gpu0_bsz=" in told


def test_json_has_what_scripts_read():
    done = CliRunner().invoke(app, ["plan", "char-lm", "--memory", "1GiB", "--json"])
    record = json.loads(done.stdout)
    plan = record["plan"]
    assert record["schema"] == 2
    assert record["workload"] == "char-lm"
    assert plan["batch_size"] == 32
    assert sum(plan["chunk_sizes"]) == 32
    assert plan["chunk_sizes"][0] == plan["gpu0_bsz"] == 5
    assert len(plan["predicted_bytes"]) == len(plan["capacity_bytes"]) == 4
    assert plan["max_batch_size"] > 32
    assert plan["limiting_device"] in range(4)
    assert record["chosen"]["mode"] == "symbolic"


def test_a_workload_of_ones_own_is_found_in_the_current_folder(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from balanced_dp import Workload\n"
        "def make():\n"
        "    return Workload(lambda: torch.nn.Linear(64, 64), lambda n: ((torch.ones(n, 64),),"
        " {}, None), lambda output, _: output.sum(), name='<script>')\n"
    )
    options = ("--memory", "1GiB,2GiB", "--batch-size", "10")
    done = plan("mine:make", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "<script>, batches of 10, 2 devices" in done.stdout


def test_predictions_that_cannot_be_trusted_are_told():
    done = plan("tests.test_tuner:lawless", "--memory", "1GiB", "--batch-size", "24")
    assert done.returncode == 0, done.stderr
    assert "So the choice is among the measured values" in done.stdout
    lawful = plan("tests.small_workloads:mlp", "--memory", "2GiB", "--batch-size", "24")
    assert "is a guess" not in lawful.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope", "--memory", "1GiB"], "there is no workload 'nope'; built in are char-lm, gpt2"),
        (["no.such:x", "--memory", "1GiB"], "workload 'no.such:x' cannot be loaded: No module"),
        (["os:getcwd", "--memory", "1GiB"], "os:getcwd must give a balanced_dp.Workload, but gave"),
        (["char-lm", "--memory", "much"], "--memory must be bytes or a size in B, KiB"),
        (["char-lm", "--memory", "1GiB", "--devices", "1"], "a plan is for two or more devices"),
        (["char-lm", "--memory", "1GiB,1GiB", "--devices", "3"], "--memory gives 2 devices, but"),
        (["char-lm", "--memory", "400MiB"], "more than the reserve of 512.00 MiB"),
        (["char-lm", "--memory", "1GiB", "--batch-size", "0"], "batch_size must be at least 1"),
        (["char-lm", "--memory", "520MiB"], "a batch of 32 does not fit with any gpu0_bsz: with"),
        (
            [*WIDE, "--memory", "8GiB"],
            "with the loss computed on each device (gather=False) this batch fits, with gpu0_bsz=",
        ),
    ],
)
def test_one_line_says_what_to_change(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["balanced-dp", "plan", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr()
    [line] = told.err.strip().splitlines()
    assert message in line
    assert told.out == ""


def test_the_built_in_workloads_are_listed():
    done = CliRunner().invoke(app, ["workloads", "--json"])
    listed = {row["name"]: row for row in json.loads(done.stdout)}
    assert set(listed) == set(BUILT_IN)
    assert listed["gpt2-small"]["num_parameters"] == 124_439_808  # as published
    assert listed["resnet50-shaped"]["num_parameters"] == 25_557_032  # torchvision's
    assert listed["bert-base"]["num_parameters"] == pytest.approx(109.5e6, rel=0.001)
    table = CliRunner().invoke(app, ["workloads"]).stdout
    assert all(name in table for name in BUILT_IN)


def test_the_figures_in_the_readme(gpt2_small):
    record = json.loads(gpt2_small.stdout)
    peaks = {
        name: [
            round(max(phases) / 2**30, 2)
            for phases in zip(m["backward_peak_bytes"], m["optimizer_peak_bytes"], strict=True)
        ]
        for name, m in (
            ("nn.DataParallel", record["even"]),
            ("BalancedDataParallel", record["chosen"]),
            ("the same, loss on each device", record["alternative"]["chosen"]),
        )
    }
    sizes = (
        record["plan"]["even_max_batch_size"],
        record["plan"]["max_batch_size"],
        record["alternative"]["plan"]["max_batch_size"],
    )
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    for (name, (first, *others)), size in zip(peaks.items(), sizes, strict=True):
        [row] = re.findall(rf"^\| `?{name}`? \| (.*)", readme, re.MULTILINE)
        assert row.startswith(f"{first:.2f} GiB | {max(others):.2f} GiB | {size} |")
