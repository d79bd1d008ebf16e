"""What the benchmarks share: tables of their figures, and the option that keeps them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .tables import hardware, write_table


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FOLDER", help="where tables are kept")


@pytest.fixture(scope="module")
def tables(request: pytest.FixtureRequest) -> Iterator[defaultdict[str, list[dict[str, Any]]]]:
    """Rows by what they answer: printed at the end, and written where ``--results`` says.

    A module's ``NOTES`` say of each question how the figures were had.
    """
    tables: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    yield tables
    folder = request.config.getoption("--results")
    for question, rows in tables.items():
        for row in rows:
            texts = (f"{k} {v:.3g}" if type(v) is float else f"{k} {v}" for k, v in row.items())
            print("\n" + ", ".join(texts))
        if folder is not None:
            note = request.module.NOTES[question]
            write_table(question, rows, folder, on=hardware(), note=note)
