"""Test ``balanced-dp tune`` and ``report``, from the sweep to the page."""

from __future__ import annotations

import json

import pytest

from balanced_dp.report import load_report


def test_tune_writes_and_prints_the_report(folder, tuned):
    assert tuned.returncode == 0, tuned.stderr
    report = load_report(folder / "a.json")
    assert f"# option 1\nmodel = {report.best.line}\n" in tuned.stdout
    assert report.workload == "mine" and not report.has_capacity
    assert report.batch_size == 64
    assert {o.chunk_sizes[0] for o in report.options if o.batch_size == 64} >= set(range(4))
    assert report.provenance.command.startswith("python -m balanced_dp tune mine:make --sweep 0:3")
    assert "<!doctype html>" in (folder / "a.html").read_text()


def test_report_shows_a_file_again(folder, tuned, invoke):
    shown = invoke("report", "a.json")
    report = load_report(folder / "a.json")
    assert shown.exit_code == 0
    assert shown.stdout == tuned.stdout and "Measured values of gpu0_bsz, " in shown.stdout
    written = invoke("report", "a.json", "--html", "b.html", "--markdown", "b.md", "--json", "-")
    assert written.exit_code == 0
    assert written.stderr == "wrote b.html\nwrote b.md\n"
    assert (folder / "b.html").read_text() == (folder / "a.html").read_text()
    assert (folder / "b.md").read_text().startswith("# mine, batches of 64, 4 devices\n")
    assert len(json.loads(written.stdout)["options"]) == len(report.options)


@pytest.mark.parametrize(
    ("option", "begins", "ends"),
    [
        ("--html", "<!doctype html>", "</html>\n"),
        ("--markdown", "# mine, batches of 64, 4 devices\n", " |\n"),
        ("--json", '{\n  "schema": ', "}\n"),
    ],
)
def test_a_report_goes_to_stdout(tuned, invoke, option, begins, ends):
    done = invoke("report", "a.json", option, "-")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(begins) and done.stdout.endswith(ends)


def test_json_on_stdout(tuned, invoke):
    done = invoke("tune", "mine:make", "--json", "-")
    assert (done.exit_code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["workload"] == "mine"
    done = invoke("report", "a.json", "--against", "a.json", "--fail", "peak:5%", "--json", "-")
    assert (done.exit_code, done.stderr) == (0, "")
    peak, *others = json.loads(done.stdout)
    assert peak["metric"] == "peak"
    assert (peak["before"], peak["worsened"], peak["limit"]) == (peak["after"], 0, 0.05)
    assert [found["failed"] for found in (peak, *others)] == [False] * 3


def test_a_comparison_that_fails(tuned, invoke):
    assert invoke("tune", "mine:other", "--json", "c.json").exit_code == 0
    same = invoke("report", "a.json", "--against", "a.json", "--fail", "peak:0%,speed:0%")
    assert same.exit_code == 0
    assert "ok" in same.stdout
    worse = invoke("report", "c.json", "--against", "a.json", "--fail", "peak:5%,speed:99%")
    assert worse.exit_code == 1
    assert "FAILED" in worse.stdout
    assert invoke("report", "c.json", "--against", "a.json").exit_code == 0


def test_devices_and_capacities_are_as_asked(folder, invoke):
    done = invoke(
        "tune", "mine:make", "--memory", "80MiB,40MiB", "--reserve", "1MiB", "--json", "d.json"
    )
    assert done.exit_code == 0, done.stderr
    report = load_report(folder / "d.json")
    assert report.capacity_bytes == (80 * 2**20, 40 * 2**20)
    assert report.reserve_bytes == 2**20
    assert any(option.device_weights for option in report.options)
    done = invoke(
        "plan", "mine:make", "--memory", "80MiB,40MiB", "--reserve", "0", "--for", "batch"
    )
    assert "device_weights=[" in done.stdout
    workload = ("tests.tuning.small_workloads:mlp", "--batch-size", "12")
    done = invoke("tune", *workload, "--devices", "3", "--json", "-")
    assert len(json.loads(done.stdout)["capacity_bytes"]) == 3


def test_every_command_tells_the_same_of_a_file(folder, tuned, invoke):
    """run, plan, tune and demo write what report and each other read."""
    options = ("--memory", "90MiB", "--reserve", "0")
    written = {
        "plan": ("plan", "mine:make", *options, "--json", "plan.json"),
        "tune": ("tune", "mine:make", *options, "--emulate", "--json", "tune.json"),
        "demo": ("demo", "--emulate", "--steps", "2", "--json", "demo.json"),
        "run": ("run", "--json", "run.json", *options, "--symbolic", "script.py"),
    }
    (folder / "script.py").write_text(
        "import torch, mine\n"
        "workload = mine.make()\n"
        "model = torch.nn.DataParallel(workload.new_model().cuda())\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(10):\n"
        "    (x,), _, y = workload.new_batch(64)\n"
        "    output = model(x)\n"
        "    workload.loss(output, y.cuda()).backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    first = {}
    for name, command in written.items():
        told = invoke(*command)
        assert told.exit_code == 0, told.stderr
        report = load_report(folder / f"{name}.json")
        first[name] = report.best.line
        shown = invoke("report", f"{name}.json").stdout
        assert f"# option 1\nmodel = {report.best.line}\n" in shown
        if name != "demo":
            assert shown in told.stdout + told.stderr
        compared = invoke("report", f"{name}.json", "--against", f"{name}.json")
        assert f"after: {report.best.line}" in compared.stdout
    assert first["plan"] == first["tune"] == first["run"] == "nn.DataParallel(model)"
