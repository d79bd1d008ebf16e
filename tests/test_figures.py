"""The figures of the README and of its picture are what is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from balanced_dp.cli.demo import run_demo
from benchmarks import before_and_after

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_the_picture_and_the_largest_batches():
    report, apart = before_and_after.measured(), before_and_after.measured(gather=False)
    figures = re.compile(r">([^<>]*(?:[MG]iB|samples|model)[^<>]*)<")
    drawn = figures.findall(before_and_after.picture(report, apart))
    assert figures.findall(before_and_after.PATH.read_text("utf-8")) == drawn != []
    largest = [report.largest_batch(option) for option in (report.even, report.best)]
    largest.append(apart.largest_batch(apart.best))
    even, best, loss_apart = (option.batch_size for option in largest)
    assert f"batches are {even}, {best} and {loss_apart}." in " ".join(README.split())
    assert (largest[1].chunk_sizes[0], f"{largest[1].speed:.2f}") == (0, "0.75")


def test_the_memory_of_the_demo():
    _, runs = run_demo(steps=2, emulate=True)
    rows = dict(re.findall(r"^ (split|peak, .*?) {2,}(.*)$", README, re.MULTILINE))
    measured = [run.measured for run in runs]
    splits = [" ".join(map(str, found.chunk_sizes)) for found in measured]
    assert re.split(" {2,}", rows["split"]) == splits
    firsts = [found.peak_bytes[0] / 2**20 for found in measured]
    others = [max(found.peak_bytes[1:]) / 2**20 for found in measured[1:]]
    # The text, and with it the number of different characters, is that of the Python.
    assert numbers([rows["peak, device 0"]]) == pytest.approx(firsts, rel=0.005)
    assert numbers([rows["peak, highest other"]]) == pytest.approx(others, rel=0.005)


def numbers(cells: Sequence[str]) -> list[float]:
    return [float(number) for cell in cells for number in re.findall(r"[\d.]+", cell)]
