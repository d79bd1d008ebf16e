"""Tables in which benchmarks collect their figures, and the option to write them to files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .tables import text, write_table


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FOLDER", help="where tables are stored")


@pytest.fixture(scope="module")
def tables(request: pytest.FixtureRequest) -> Iterator[defaultdict[str, list[dict[str, Any]]]]:
    """A dict from each question that a benchmark answers to the rows of its table.

    At the end, the rows are printed. With the option ``--results``, each table is also written to
    that folder. The dict ``NOTES`` of a benchmark's module says for each question how the figures
    were measured.
    """
    tables: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    yield tables
    folder = request.config.getoption("--results")
    for question, rows in tables.items():
        for row in rows:
            print("\n" + ", ".join(f"{name} {text(value)}" for name, value in row.items()))
        if folder is not None:
            write_table(question, rows, folder, request.module.NOTES[question])
