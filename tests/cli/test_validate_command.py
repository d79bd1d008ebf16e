"""Test ``balanced-dp validate``: its table, its files and its exit code."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from balanced_dp import validation
from balanced_dp.cli.commands import app
from balanced_dp.report.validation import validation_json, validation_markdown
from balanced_dp.tuning.report_types import Provenance
from balanced_dp.validation import Check, ValidationReport

from ..processes import python

CHECKS = (
    Check("gradients", "every split", "ok", 6.2e-16, "gpu0_bsz from 0 to 4"),
    Check("peaks", "gpu0_bsz=4, NVML", "not ok", -31.4, "by device: -31.4; allowed: 512.00 MiB"),
    Check("seconds", "nn.DataParallel", "ok", 0.8765, "10.0 ms and 11.4 ms"),
    Check("seconds", "DistributedDataParallel", "-", note="no times of the ranks: A|B"),
    Check("communicators", "taken by the first step", "ok", 3 * 2**20, "by device: 3.00 MiB"),
)


def report_of(*checks):
    return ValidationReport(
        schema=1,
        provenance=Provenance.of_this_process(["cuda:0 NVIDIA Some-GPU, 80.00 GiB"]),
        kind="devices",
        description="cuda:0 to cuda:1, NVIDIA Some-GPU",
        workload="gpt2-small",
        batch_size=8,
        checks=checks,
    )


@pytest.fixture
def invoke(monkeypatch):
    def invoke(*arguments, checks=CHECKS):
        monkeypatch.setattr(validation, "validate", lambda settings, on_check: report_of(*checks))
        return CliRunner().invoke(app, ["validate", "--emulate", *arguments])

    return invoke


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validate")
    options = "--emulate --devices 2 --json a.json --markdown a.md"
    ran = python("-m", "balanced_dp", "validate", *options.split(), cwd=folder)
    return ran, folder


def test_each_line_has_an_outcome_and_a_number_or_a_reason(done):
    ran, folder = done
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Validating on 2 emulated devices, on the CPU")
    assert ran.stdout.endswith("All gradients and outputs are those of one device.\n")
    record = json.loads((folder / "a.json").read_text())
    lines = [line for line in ran.stdout.splitlines() if line.startswith("  ")]
    assert len(lines) == len(record["checks"]) >= 12
    for line, check in zip(lines, record["checks"], strict=True):
        assert re.match(rf"  {re.escape(check['what'])} +{check['outcome']} ", line)
        assert check["note"] in line
        assert (check["value"] is None) == (check["outcome"] == "-")
    assert {c["outcome"] for c in record["checks"] if c["part"] == "gradients"} == {"ok"}
    assert record["kind"] == "emulated"
    assert record["provenance"]["command"].startswith("python -m balanced_dp validate --emulate")


def test_markdown_has_the_checks_the_versions_and_the_devices(done):
    _, folder = done
    text = (folder / "a.md").read_text()
    assert text.startswith("### balanced-dp validate: 2 emulated devices, on the CPU")
    assert "| every split | ok | " in text
    assert re.search(r"\n- python [\d.]+, .*torch .*, CUDA .*, driver ", text)
    assert "\n- Emulated device 0, Emulated device 1\n" in text


def test_the_number_has_its_unit(invoke):
    shown = invoke()
    numbers = ("6.2e-16", "-31.4 %", "0.88", "3.00 MiB")
    for found in (shown.stdout, validation_markdown(report_of(*CHECKS))):
        assert [number for number in numbers if number not in found] == []
    assert "no times of the ranks: A\\|B" in validation_markdown(report_of(*CHECKS))


def test_only_a_wrong_gradient_is_a_failure(invoke):
    assert invoke().exit_code == 0
    wrong = Check("gradients", "every split", "not ok", 0.1, "wrong: gpu0_bsz=1")
    shown = invoke(checks=(wrong, *CHECKS))
    assert shown.exit_code == 1
    assert "FAILED: not all gradients" in shown.stdout
    assert "FAILED: not all gradients" in validation_markdown(report_of(wrong))


@pytest.mark.parametrize(
    ("option", "as_text"), [("--json", validation_json), ("--markdown", validation_markdown)]
)
def test_a_dash_is_stdout_and_nothing_else_is_written_there(option, as_text, invoke):
    shown = invoke(option, "-")
    lines = as_text(report_of(*CHECKS)).splitlines()
    assert shown.stdout.splitlines()[:4] == lines[:4]
    assert len(shown.stdout.splitlines()) == len(lines)
    assert shown.stderr.startswith("Validating on 4 emulated devices, on the CPU")
