"""The public API as mypy sees it from a user's code."""

from __future__ import annotations

from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # without the cache of `make check`, which reads the same file
def test_typical_calls_are_accepted_and_wrong_ones_are_not(monkeypatch):
    monkeypatch.chdir(ROOT)
    found, errors, exit_code = api.run(["tests/typing/user_code.py"])
    assert exit_code == 0, found + errors
