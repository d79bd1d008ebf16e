"""Measure what ``scalar_outputs="auto"`` costs, compared with ``scalar_outputs="mean"``.

With ``"auto"``, the model finds out what each replica's loss is a mean over. With ``"mean"``, it
weights each replica's loss by the number of samples. The models are language models of the package
transformers, with padded labels. They have all their layers but almost no width, so that almost all
the time goes into launching operators. Both ways alternate on one model, in forward passes of four
replicas on one CPU. A figure is the median of the ratios of neighbouring passes. ``"mean"`` runs
twice: the ratio of these two times shows how precise the other ratios are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from balanced_dp import BalancedDataParallel
from balanced_dp.parallel.losses.weights import ScalarOutputs

NOTES = {
    "losses": "Median ratios of the times of neighbouring forward passes: finding out the mean, to "
    "a mean weighted by samples. Control: the weighted mean, to itself. Four replicas on one CPU "
    "core, 1 and 3 x 2 samples of four tokens."
}


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=50, num_hidden_layers=12, **sizes))


def gpt(num_layers: int) -> Callable[[], nn.Module]:
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_embd": 16, "n_head": 2, "vocab_size": 50, "n_layer": num_layers}
    return lambda: GPT2LMHeadModel(GPT2Config(**tokens, **sizes, use_cache=False))


def median_ratio(ones: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("has_gradients", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("name", "make"),
    [("BERT, 12 layers", bert), ("GPT, 12 layers", gpt(12)), ("GPT, 48 layers", gpt(48))],
)
def test_finding_out_what_a_loss_is_a_mean_over(benchmark, tables, name, make, has_gradients):
    torch.set_num_threads(1)
    module = make()
    module.train(has_gradients)
    tokens = torch.randint(0, 50, (7, 4))
    labels = tokens.clone()
    labels[:, 1] = -100
    model = BalancedDataParallel(1, module, ["cpu"] * 4)
    ways: tuple[ScalarOutputs, ...] = ("auto", "mean", "mean")
    times: list[list[float]] = [[], [], []]

    def each() -> None:
        for i in range(len(times[0]), len(times[0]) + 3):
            model.scalar_outputs = ways[i % 3]
            start = time.perf_counter()
            model(input_ids=tokens, labels=labels)
            times[i % 3].append(time.perf_counter() - start)

    with torch.set_grad_enabled(has_gradients):
        benchmark.pedantic(each, rounds=400, warmup_rounds=5)
    found_out, weighted, again = (measured[5:] for measured in times)
    figures = {
        "ratio": median_ratio(found_out, weighted),
        "control": median_ratio(again, weighted),
        "milliseconds": 1e3 * statistics.median(found_out),
    }
    benchmark.extra_info.update(figures)
    kind = "training" if has_gradients else "evaluation"
    tables["losses"].append({"forward pass": f"{name}, {kind}", **figures})
