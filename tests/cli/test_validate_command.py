"""``balanced-dp validate``: its exit code, and what it writes where."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from balanced_dp import validation
from balanced_dp.cli.commands import app
from balanced_dp.validation import Check, Validation


@pytest.mark.parametrize(("ok", "exit_code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_only_a_wrong_gradient_is_a_failure(option, ok, exit_code, monkeypatch):
    checks = Check("gradients", "every split", ok, "1e-3"), Check("time", "a", False)

    def run(num_devices, emulate, on_check):
        for check in checks:
            on_check(check)
        return Validation("two devices", {"torch": "2"}, checks)

    monkeypatch.setattr(validation, "validate", run)
    done = CliRunner().invoke(app, ["validate", option, "-"])
    assert done.exit_code == exit_code
    assert "(two devices)" in done.stderr and str(checks[0]) in done.stderr
    if option == "--json":
        assert json.loads(done.stdout)["checks"][0]["ok"] == ok
    else:
        assert done.stdout.startswith("### balanced-dp validate: two devices")
