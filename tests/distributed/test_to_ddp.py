"""What of ``convert`` needs no ranks; the rest is in ``worker.py``."""

from __future__ import annotations

import pytest
import torch

from balanced_dp import ArgumentError, ArgumentTypeError
from balanced_dp.distributed import convert
from balanced_dp.distributed.to_ddp import _own


def test_each_process_has_the_device_of_its_number(emulated, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert _own(emulated) == emulated[2]
    assert _own(emulated[:1]) == emulated[0]  # the only one that it sees
    assert _own([torch.device("cpu")] * 2) == torch.device("cpu")
    with pytest.raises(ArgumentError, match=r"process 2 of its machine, but the model has 2 dev"):
        _own(emulated[:2])


def test_other_models_are_refused():
    with pytest.raises(ArgumentTypeError, match=r"got a Linear; any other module goes into Distr"):
        convert(torch.nn.Linear(2, 2))
