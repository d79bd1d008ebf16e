"""Compare the time of two replicas with that of one, with and without Python's lock (the GIL).

The models have hundreds of small modules, and their tensors are so small that almost all the time
goes into Python code and into launching operators. Each replica gets a batch of its own. With the
lock, replicas take turns; without the lock, they can run at the same time. The lock is on or off
for a whole process. So run this file twice on a free-threaded build, with ``PYTHON_GIL=1`` and with
``PYTHON_GIL=0``. Calls with one and with two replicas alternate in one process, and a figure is the
median of the ratios of neighbouring calls. The time to start and end threads does not grow with the
model, so models of two sizes are measured.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import parallel

from balanced_dp.free_threading import is_free_threaded_build
from balanced_dp.parallel.parallel_apply import parallel_apply

from .stock_on_cpu import stock_on_cpu

HAS_LOCK = not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled()
QUESTION = "free-threading-with-lock" if HAS_LOCK else "free-threading"
NOTES = {
    QUESTION: f"Forward passes on threads, {'with' if HAS_LOCK else 'without'} Python's lock, on a "
    f"{'free-threaded' if is_free_threaded_build() else 'common'} build. Medians over neighbouring "
    "calls: the time of two replicas with a batch each, over that of one in the calling thread."
}


def perceptron() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()) for _ in range(100)]
    return nn.Sequential(*blocks)


def transformer() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(4, 2, 4, batch_first=True) for _ in range(48)]
    return nn.Sequential(*layers)


MODELS = {"100 linear layers": perceptron, "transformer, 48 layers": transformer}


def ours(replicas: list[nn.Module], x: torch.Tensor) -> list[Any]:
    # The names differ because replicas on the same device would share one thread.
    devices = [torch.device("cpu"), torch.device("cpu", 1)][: len(replicas)]
    return parallel_apply(replicas, [((x,), {})] * len(replicas), devices, [])


def torchs(replicas: list[nn.Module], x: torch.Tensor) -> list[Any]:
    indices = list(range(len(replicas)))
    return parallel.parallel_apply(replicas, [(x,)] * len(replicas), devices=indices)


WAYS: dict[str, Callable[[list[nn.Module], torch.Tensor], Any]] = {
    "balanced_dp": ours,
    "torch.nn.parallel": torchs,
}


@pytest.mark.parametrize("has_gradients", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_two_replicas_next_to_one(benchmark, tables, model, name, has_gradients):
    torch.set_num_threads(1)
    module = MODELS[model]()
    replicas = [module, copy.deepcopy(module)]
    x = torch.ones(2, 3, 4)
    times: dict[int, list[float]] = {1: [], 2: []}

    def each() -> None:
        for num_replicas, measured in times.items():
            start = time.perf_counter()
            outputs = WAYS[name](replicas[:num_replicas], x)
            measured.append(time.perf_counter() - start)
            del outputs

    with torch.set_grad_enabled(has_gradients), stock_on_cpu():
        benchmark.pedantic(each, rounds=300, warmup_rounds=10)
    one, two = (measured[10:] for measured in times.values())
    figures = {
        "ratio": statistics.median(b / a for a, b in zip(one, two, strict=True)),
        "milliseconds of one": 1e3 * statistics.median(one),
        "milliseconds of two": 1e3 * statistics.median(two),
    }
    benchmark.extra_info.update(figures)
    kind = "training" if has_gradients else "evaluation"
    tables[QUESTION].append({"parallel_apply": name, "model": f"{model}, {kind}", **figures})
