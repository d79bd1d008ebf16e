"""What it takes to find out what a loss is a mean over, next to a mean weighted by samples.

Language models of transformers with all their layers and next to no width, whose labels are padded:
nothing takes time but launching. Both ways take turns on one model, in forward passes on four
replicas of a repeated CPU; a figure is the median of the ratios of neighbours.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from balanced_dp import BalancedDataParallel

from .tables import hardware, write_table

NOTE = (
    "Medians of the ratios of neighbouring forward passes: found out, by a mean weighted by "
    "samples. Four replicas on one CPU core, 1 and 3 x 2 samples of four tokens."
)


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=50, num_hidden_layers=12, **sizes))


def gpt(num_layers: int) -> Callable[[], nn.Module]:
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 16, "n_head": 2, "vocab_size": 50, "n_layer": num_layers}
    return lambda: GPT2LMHeadModel(GPT2Config(**tokens, **sizes, use_cache=False))


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    yield rows
    folder = request.config.getoption("--results")
    if folder is not None and rows:
        write_table("losses", rows, folder, on=hardware(), note=NOTE)


@pytest.mark.parametrize("has_gradients", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("name", "make"),
    [("BERT, 12 layers", bert), ("GPT, 12 layers", gpt(12)), ("GPT, 48 layers", gpt(48))],
)
def test_finding_out_what_a_loss_is_a_mean_over(benchmark, table, name, make, has_gradients):
    torch.set_num_threads(1)
    module = make()
    module.train(has_gradients)
    tokens = torch.randint(0, 50, (7, 4))
    labels = tokens.clone()
    labels[:, 1] = -100
    models = [
        BalancedDataParallel(1, module, ["cpu"] * 4, scalar_outputs=scalar_outputs)
        for scalar_outputs in ("auto", "mean")
    ]
    times: list[list[float]] = [[], []]

    def both() -> None:
        for i in (0, 1) if len(times[0]) % 2 else (1, 0):
            start = time.perf_counter()
            models[i](input_ids=tokens, labels=labels)
            times[i].append(time.perf_counter() - start)

    with torch.set_grad_enabled(has_gradients):
        benchmark.pedantic(both, rounds=200, warmup_rounds=5)
    ratios = [ours / plain for ours, plain in zip(*times, strict=True)][5:]
    low, middle, high = statistics.quantiles(ratios, n=4)
    figures = {
        "ratio": middle,
        "quartiles": f"{low:.3f} to {high:.3f}",
        "milliseconds": 1e3 * statistics.median(times[0]),
    }
    benchmark.extra_info.update(figures)
    kind = "training" if has_gradients else "evaluation"
    table.append({"forward pass": f"{name}, {kind}", **figures})
    print(f"\n{name}, {kind}: {middle:.4f}")
