"""Test ``balanced-dp tune``, ``report`` and ``compare``, from the sweep to the page."""

from __future__ import annotations

import json

import pytest

from balanced_dp.report import load_reports
from balanced_dp.units import format_bytes


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


def test_a_model_that_reads_values_takes_numeric(invoke):
    done = invoke("tune", "mine:reads", "--numeric")
    assert done.exit_code == 0, done.stderr
    assert "Measured on emulated devices, with numbers" in done.stdout


def test_reports_of_other_workloads_are_not_compared(folder, tuned, invoke):
    text = (folder / "a.json").read_text().replace('"workload": "mine"', '"workload": "yours"')
    (folder / "e.json").write_text(text)
    error = invoke("compare", "a.json", "e.json").exception
    assert str(error) == "a.json has no report of yours; it has mine"
