"""Tests of ``convert`` that need no process group; the others are in ``worker.py``."""

from __future__ import annotations

import pytest
import torch

from balanced_dp import ArgumentError
from balanced_dp.distributed.to_ddp import _device_of_this_rank


def test_the_device_of_a_local_rank(emulated, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert _device_of_this_rank(emulated) == emulated[2]
    assert _device_of_this_rank(emulated[:1]) == emulated[0]  # the only visible one
    assert _device_of_this_rank([torch.device("cpu")] * 2) == torch.device("cpu")
    with pytest.raises(ArgumentError, match=r"the local rank is 2, but the model has 2 dev"):
        _device_of_this_rank(emulated[:2])
