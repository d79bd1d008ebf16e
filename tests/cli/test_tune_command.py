"""Test ``balanced-dp tune``, ``report`` and ``compare``, from the sweep to the page."""

from __future__ import annotations

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from balanced_dp.cli.commands import app, main
from balanced_dp.report import load_reports
from balanced_dp.units import format_bytes

from ..processes import python

WORKLOAD = """
import torch
from balanced_dp import Workload

def make(width=2048):
    return Workload(
        lambda: torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.Linear(width, 256)),
        lambda n: ((torch.zeros(n, 256),), {}, torch.zeros(n, 256)),
        torch.nn.functional.mse_loss,
        name="mine",
        batch_size=64,
    )

def other():
    return make(8192)

def fails():
    return Workload(torch.nn.Linear, lambda n: ((), {}, None), lambda output, _: output)

def wants(width):
    return make(width)

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :2])  # line 25

def inside():
    return Workload(Net(256, 256), make().make_batch, torch.nn.functional.mse_loss)

class Reads(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum().item()  # line 32

def reads():
    return Workload(Reads(256, 256), make().make_batch, torch.nn.functional.mse_loss)

def three():
    return Workload(Net(256, 256), lambda n: (torch.zeros(n),) * 3, torch.nn.functional.mse_loss)

def unreduced():
    loss = torch.nn.MSELoss(reduction="none")
    return Workload(torch.nn.Linear(256, 256), make().make_batch, loss)

def narrow():
    return Workload(torch.nn.Linear(2, 2), make().make_batch, torch.nn.functional.mse_loss)

def text():
    return Workload(lambda: "a model", make().make_batch, torch.nn.functional.mse_loss)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    (folder / "mine.py").write_text(WORKLOAD)
    return folder


@pytest.fixture
def invoke(folder, monkeypatch):
    """Run a command in the folder and in this process, which saves importing torch again."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield lambda *arguments: CliRunner().invoke(app, arguments)
    sys.modules.pop("mine", None)


@pytest.fixture(scope="module")
def tuned(folder):
    options = "--sweep 0:3 --json a.json --html a.html"
    return python("-m", "balanced_dp", "tune", "mine:make", *options.split(), cwd=folder)


def test_tune_writes_and_prints_the_report(folder, tuned):
    assert tuned.returncode == 0, tuned.stderr
    [report] = load_reports(folder / "a.json")
    assert f"# option 1\nmodel = {report.line}\n" in tuned.stdout
    assert report.workload == "mine"
    capacity = format_bytes(report.plan.capacity_bytes[0])
    assert f"each device has what the even split needs, {capacity}." in tuned.stderr
    assert report.plan.batch_size == 64
    assert {m.gpu0_bsz for m in report.measurements if m.batch_size == 64} >= set(range(4))
    assert report.provenance.command.startswith("python -m balanced_dp tune mine:make --sweep 0:3")
    assert "<!doctype html>" in (folder / "a.html").read_text()


def test_report_shows_a_file_again_in_each_form(folder, tuned, invoke):
    shown = invoke("report", "a.json")
    [report] = load_reports(folder / "a.json")
    assert shown.exit_code == 0
    assert f"# option 1\nmodel = {report.line}\n" in shown.stdout
    assert "Measured values of gpu0_bsz, outputs gathered" in shown.stdout
    written = invoke("report", "a.json", "--html", "b.html", "--markdown", "b.md", "--json", "-")
    assert written.exit_code == 0
    assert written.stderr == "wrote b.html\nwrote b.md\n"
    assert (folder / "b.html").read_text() == (folder / "a.html").read_text()
    assert (folder / "b.md").read_text().startswith("# mine, batches of 64, 4 devices\n")
    assert json.loads(written.stdout)["plan"]["gpu0_bsz"] == report.plan.gpu0_bsz


@pytest.mark.parametrize(
    ("option", "begins", "ends"),
    [
        ("--html", "<!doctype html>", "</html>\n"),
        ("--markdown", "# mine, batches of 64, 4 devices\n", " |\n"),
        ("--json", '{"schema": ', "}\n"),
    ],
)
def test_a_report_goes_to_stdout(tuned, invoke, option, begins, ends):
    done = invoke("report", "a.json", option, "-")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(begins) and done.stdout.endswith(ends)


def test_what_tune_and_compare_write_goes_to_stdout(tuned, invoke):
    done = invoke("tune", "mine:make", "--json", "-")
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["workload"] == "mine"
    done = invoke("compare", "a.json", "a.json", "--fail", "peak:5%", "--json", "-")
    assert (done.exit_code, done.stderr) == (0, "")
    peak, *others = json.loads(done.stdout)
    assert peak["workload"] == "mine" and peak["metric"] == "peak"
    assert (peak["before"], peak["worsened"], peak["limit"]) == (peak["after"], 0, 0.05)
    assert [found["failed"] for found in (peak, *others)] == [False] * 4


def test_compare_ends_with_1_where_it_is_worse(tuned, invoke):
    assert invoke("tune", "mine:other", "--json", "c.json").exit_code == 0
    same = invoke("compare", "a.json", "a.json", "--fail", "peak:0%,imbalance:0")
    assert same.exit_code == 0
    assert "ok" in same.stdout
    worse = invoke("compare", "a.json", "c.json", "--fail", "peak:5%,imbalance:0.1")
    assert worse.exit_code == 1
    assert "FAILED" in worse.stdout
    assert invoke("compare", "a.json", "c.json").exit_code == 0


def test_devices_and_capacities_are_as_asked(folder, invoke):
    done = invoke(
        "tune", "mine:make", "--memory", "80MiB,40MiB", "--reserve", "1MiB", "--json", "d.json"
    )
    assert done.exit_code == 0, done.stderr
    [report] = load_reports(folder / "d.json")
    assert report.plan.capacity_bytes == (80 * 2**20, 40 * 2**20)
    assert report.plan.reserve_bytes == 2**20
    assert any(option.device_weights for option in report.options)
    done = invoke(
        "plan", "mine:make", "--memory", "80MiB,40MiB", "--reserve", "0", "--for", "batch"
    )
    assert "device_weights=[" in done.stdout
    workload = ("tests.tuning.small_workloads:mlp", "--batch-size", "12")
    done = invoke("tune", *workload, "--devices", "3", "--json", "-")
    assert len(json.loads(done.stdout)["plan"]["chunk_sizes"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "char-lm", "--sweep", "8"], "--sweep must be FIRST:LAST such as 0:8, got '8'"),
        (["tune", "char-lm", "--sweep", "6:12"], "gpu0_bsz is from 0 to 8, the even split"),
        (["tune", "char-lm", "--sweep", "8:0"], "--sweep must be FIRST:LAST such as 0:8"),
        (["tune", "char-lm", "--devices", "1"], "a plan is for two or more devices"),
        (["tune", "char-lm", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["tune", "char-lm", "--json", "none/a.json"], "there is no folder"),
        (["tune", "char-lm", "--html", "."], "is a folder; name a file"),
        (["tune", "mine:fails"], "mine:fails failed with TypeError: Linear.__init__() missing 2"),
        (["tune", "mine:unreduced"], "the loss of mine:unreduced must be 0-dim, as the mean or"),
        (["tune", "mine:narrow"], "mine:narrow failed in Linear(in_features=2, out_features=2"),
        (["tune", "mine:three"], "make_batch of mine:three must return (arguments, keyword argu"),
        (["tune", "mine:three"], "or (x, y), but returned tuple of Tensor, Tensor, Tensor"),
        (["tune", "mine:text"], "model of mine:text must return an nn.Module, but returned str"),
        (["tune", "mine:wants"], "cannot be made: TypeError: wants() missing 1 required"),
        (["tune", "char-lm", "--json", "x", "--html", "./x"], "--json and --html are both x; name"),
        (
            ["report", "a.json", "--html", "x", "--markdown", "x"],
            "--html and --markdown are both x",
        ),
        (
            ["report", "a.json", "--html", "-", "--json", "-"],
            "--html and --json are both stdout; n",
        ),
        (["report", "a.json", "--html", "a.json"], "the report and --html are both a.json; name"),
        (["compare", "a.json", "c.json", "--json", "c.json"], "AFTER and --json are both c.json"),
        (["report", "none.json"], "none.json cannot be read: No such file"),
        (["compare", "a.json", "a.json", "--fail", "x"], "--fail takes METRIC:NUMBER"),
        (["compare", "a.json", "a.json", "--fail", "peak:5"], "is 5 bytes; did you mean 5GiB?"),
    ],
)
def test_wrong_input_is_said_in_a_line_and_exit_code_2(
    tuned, invoke, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(sys, "argv", ["balanced-dp", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_what_fails_in_a_model_is_said_with_the_user_s_line(folder):
    done = python("-m", "balanced_dp", "tune", "mine:inside", cwd=folder)
    assert done.returncode == 2
    assert "mine.py:25 with RuntimeError: a and b must have same reduction dim" in done.stderr


def test_a_model_that_reads_values_takes_numeric(folder):
    done = python("-m", "balanced_dp", "tune", "mine:reads", cwd=folder)
    assert done.returncode == 2
    assert re.search(
        r"mine:reads reads values at .*mine\.py:32, which takes --numeric", done.stderr
    )
    done = python("-m", "balanced_dp", "tune", "mine:reads", "--numeric", cwd=folder)
    assert done.returncode == 0
    assert "Measured on emulated devices, with numbers" in done.stdout


def test_reports_of_other_workloads_are_not_compared(folder, tuned):
    text = (folder / "a.json").read_text().replace('"workload": "mine"', '"workload": "yours"')
    (folder / "e.json").write_text(text)
    done = python("-m", "balanced_dp", "compare", "a.json", "e.json", cwd=folder)
    assert done.returncode == 2
    assert "a.json has no report of yours; it has mine" in done.stderr
