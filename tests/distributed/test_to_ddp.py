"""Tests of ``convert`` that need no process group; the others are in ``worker.py``."""

from __future__ import annotations

import pytest
import torch

from balanced_dp import ArgumentError, ArgumentTypeError
from balanced_dp.distributed import convert
from balanced_dp.distributed.to_ddp import _device_of_this_rank


def test_each_process_has_the_device_of_its_number(emulated, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert _device_of_this_rank(emulated) == emulated[2]
    assert _device_of_this_rank(emulated[:1]) == emulated[0]  # the only visible one
    assert _device_of_this_rank([torch.device("cpu")] * 2) == torch.device("cpu")
    with pytest.raises(ArgumentError, match=r"the local rank is 2, but the model has 2 dev"):
        _device_of_this_rank(emulated[:2])


def test_other_models_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"got a Linear; wrap any other module in Distr"):
        convert(torch.nn.Linear(2, 2))
