"""A folder with workloads of a user's own, and a report on one of them."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from balanced_dp.cli.commands import app

from ..processes import python

WORKLOAD = """
import torch
from balanced_dp import Workload

def make(width=2048):
    return Workload(
        lambda: torch.nn.Sequential(torch.nn.Linear(256, width), torch.nn.Linear(width, 256)),
        lambda n: ((torch.zeros(n, 256),), {}, torch.zeros(n, 256)),
        torch.nn.functional.mse_loss,
        name="mine",
        batch_size=64,
    )

def other():
    return make(8192)

def fails():
    return Workload(torch.nn.Linear, lambda n: ((), {}, None), lambda output, _: output)

def wants(width):
    return make(width)

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x[:, :2])  # line 25

def inside():
    return Workload(Net(256, 256), make().make_batch, torch.nn.functional.mse_loss)

class Reads(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum().item()  # line 32

def reads():
    return Workload(Reads(256, 256), make().make_batch, torch.nn.functional.mse_loss)

def unreduced():
    loss = torch.nn.MSELoss(reduction="none")
    return Workload(torch.nn.Linear(256, 256), make().make_batch, loss)

def narrow():
    return Workload(torch.nn.Linear(2, 2), make().make_batch, torch.nn.functional.mse_loss)

def text():
    return Workload(lambda: "a model", make().make_batch, torch.nn.functional.mse_loss)
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    (folder / "mine.py").write_text(WORKLOAD)
    return folder


@pytest.fixture
def invoke(folder, monkeypatch):
    """Run a command in the folder and in this process, which saves importing torch again."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield lambda *arguments: CliRunner().invoke(app, arguments)
    sys.modules.pop("mine", None)


@pytest.fixture(scope="session")
def tuned(folder):
    options = "--sweep 0:3 --json a.json --html a.html"
    return python("-m", "balanced_dp", "tune", "mine:make", *options.split(), cwd=folder)
