from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    BalancedDataParallel,
    MemoryLogger,
)

from .driver import GTX, H100


@pytest.mark.parametrize("shape", ["SummaryWriter", "function"])
def test_a_record_every_third_step(shape, emulate):
    written = []

    def write(tag, value, step):
        written.append((tag, value, step))

    devices = emulate(2)
    model = BalancedDataParallel(1, nn.Linear(100, 50).to(devices[0]))
    writer = write if shape == "function" else SimpleNamespace(add_scalar=write)
    logger = MemoryLogger(model, writer, every=3)
    for step in range(7):
        model(torch.randn(100 * (step + 1), 100)).sum().backward()
        logger.step()
    tags = ["memory/lazy:0/peak_MiB", "memory/lazy:1/peak_MiB", "memory/imbalance"]
    assert [(tag, step) for tag, _, step in written] == [
        (tag, step) for step in (3, 6) for tag in tags
    ]
    for i in (0, 3):
        low, high = sorted(value for _, value, _ in written[i : i + 2])
        assert written[i + 2][1] == pytest.approx((high - low) / high)


def test_the_steps_between_ask_nothing(monkeypatch, emulate):
    devices = emulate(2)
    model = BalancedDataParallel(1, nn.Linear(100, 50).to(devices[0]))
    logger = MemoryLogger(model, print, every=4)
    monkeypatch.setattr(logger, "_peaks", None)  # any query would fail
    for _ in range(3):
        logger.step()
    with pytest.raises(AttributeError):
        logger.step()


def test_the_tags_hold_both_numbers(driver):
    tags = driver.run("log", json.dumps([H100, GTX]))
    assert tags == [
        "memory/cuda:0 (gpu:2)/peak_MiB",
        "memory/cuda:1 (gpu:0)/peak_MiB",
        "memory/imbalance",
    ]


@pytest.mark.parametrize(
    ("every", "writer", "error", "message"),
    [
        (0, print, ArgumentError, "every must be at least 1, got 0"),
        (True, print, ArgumentTypeError, "every must be an integer, got True"),
        (1, "runs", ArgumentTypeError, "writer must have add_scalar"),
    ],
)
def test_what_cannot_be_used(every, writer, error, message, emulate):
    devices = emulate(1)
    model = BalancedDataParallel(1, nn.Linear(2, 2).to(devices[0]), list(devices))
    with pytest.raises(error, match=message):
        MemoryLogger(model, writer, every)
