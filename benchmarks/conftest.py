"""What the benchmarks share: the option that keeps their tables."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FOLDER", help="where tables are kept")
