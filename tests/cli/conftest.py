"""Fixtures: a folder with workloads as users write them, and a report on one of these."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from balanced_dp.cli.commands import app

from ..processes import python

WORKLOAD = """
import torch
from balanced_dp import Workload

def zeros(n):
    return torch.zeros(n, 256), torch.zeros(n, 256)

def of(model, loss=torch.nn.functional.mse_loss, **options):
    return Workload(model, zeros, loss, **options)

def make(width=2048):
    layers = torch.nn.Linear(256, width), torch.nn.Linear(width, 256)
    return of(torch.nn.Sequential(*layers), name="mine", batch_size=64)

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :2])  # line 17

class Reads(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum().item()  # line 21

def other():
    return make(8192)

def wants(width):
    return make(width)

fails = of(torch.nn.Linear)
inside = of(lambda: Net(256, 256))
reads = of(lambda: Reads(256, 256))
unreduced = of(lambda: torch.nn.Linear(256, 256), torch.nn.MSELoss(reduction="none"))
narrow = of(lambda: torch.nn.Linear(2, 2))
text = of(lambda: "a model")
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    (folder / "mine.py").write_text(WORKLOAD)
    return folder


@pytest.fixture
def invoke(folder, monkeypatch):
    """A function that runs ``balanced-dp`` with arguments in the folder of workloads.

    The command runs in this process, so that torch is not imported again.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield lambda *arguments: CliRunner().invoke(app, arguments)
    sys.modules.pop("mine", None)


@pytest.fixture(scope="session")
def tuned(folder):
    options = "--sweep 0:3 --json a.json --html a.html"
    return python("-m", "balanced_dp", "tune", "mine:make", *options.split(), cwd=folder)
