"""What making replicas costs in Python, next to torch.nn.parallel.replicate.

Copies are left out on both sides: torch's broadcast is replaced by one that hands the tensors on,
and ours has nothing to copy where all replicas are on the module's own device.
"""

from __future__ import annotations

import importlib
import time

import pytest
import torch
from torch import nn
from torch.nn import parallel

from balanced_dp.replicate import replicate

torch_replicate = importlib.import_module("torch.nn.parallel.replicate")


def bert_base_tree() -> nn.Module:
    """Twelve encoder layers of BERT-base's shape in modules and parameters, of width 8."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(12)]
    return nn.ModuleDict({"embeddings": nn.Embedding(10, 8), "layers": nn.ModuleList(layers)})


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_replicate_without_copies(benchmark, monkeypatch, num_replicas):
    module = bert_base_tree()
    devices = [torch.device("cpu")] * num_replicas
    copies = [parameter.detach() for parameter in module.parameters()]
    monkeypatch.setattr(
        torch_replicate,
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach=False: [copies[: len(tensors)]] * len(devices),
    )
    benchmark(replicate, module, devices)
    theirs = min(_seconds(parallel.replicate, module, list(range(num_replicas))) for _ in range(20))
    ratio = benchmark.stats.stats.min / theirs
    benchmark.extra_info.update(torch_s=theirs, ratio_to_torch=ratio)
    print(f"\n{num_replicas} replicas: {ratio:.2f} of torch's time ({theirs * 1e3:.1f} ms)")


def _seconds(function, *args) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start
