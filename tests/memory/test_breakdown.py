from __future__ import annotations

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, emulate_devices, memory_breakdown

KEPT = ("parameter", "buffer", "gradient", "optimizer state")


@pytest.fixture
def unlabelled(emulate, monkeypatch):
    """An emulated device that, like a real one, does not record what memory is used for."""
    [device] = emulate(1)
    monkeypatch.delattr(torch.lazy, "memory_breakdown")
    return device


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("vocabulary", [50, 2000])
@pytest.mark.parametrize("gpu0_bsz", [0, 1, 3, 5])
def test_the_breakdown_of_a_step(gpu0_bsz, vocabulary, symbolic, monkeypatch):
    """The ledger's, to the byte; from live objects, as on accelerators, with a rest."""
    with emulate_devices(4, memory="1GiB", symbolic=symbolic) as devices:
        layers = nn.Embedding(vocabulary, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
        head = nn.Linear(64, vocabulary)
        head.weight = layers[0].weight  # tied: counted once
        module = nn.Sequential(*layers, nn.BatchNorm1d(8), head)
        model = BalancedDataParallel(gpu0_bsz, module.to(devices[0]))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            with model.memory.measure() as usage:
                tokens = torch.randint(vocabulary, (24, 8))
                output, target = model(tokens).flatten(0, 1), tokens.flatten().to("lazy:0")
                nn.functional.cross_entropy(output, target).backward()
                optimizer.step()
        labels = [devices.memory_breakdown(device).peak for device in devices]
        exact = memory_breakdown(model, optimizer)
        monkeypatch.delattr(torch.lazy, "memory_breakdown")
        found = memory_breakdown(model, optimizer)
        torch.lazy.reset_peak_memory_stats(devices[1])
        after = memory_breakdown(model, optimizer)["lazy:1"]
        del layers, head, module, model, optimizer, output, target
    assert exact == {f"lazy:{i}": uses for i, uses in enumerate(labels)}
    assert usage.valid and usage.reason is None
    for uses, labelled, device in zip(found.values(), labels, usage.devices, strict=True):
        assert sum(uses.values()) == sum(labelled.values()) == device.peak_allocated_bytes
        assert set(uses) == {*KEPT, "rest"} and min(uses.values()) >= 0
        assert uses["optimizer state"] == labelled["optimizer state"]
        assert uses["parameter"] >= labelled["parameter"] > 0
        assert uses["buffer"] == labels[0]["buffer"] > 0
    assert after["parameter"] == 0 <= after["rest"]  # replicas are gone
    assert found["lazy:0"]["parameter"] == labels[0]["parameter"]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_state_of_any_shape_is_counted_once(unlabelled):
    module = nn.Linear(10, 10).to(unlabelled)
    optimizer = torch.optim.SGD(module.parameters())
    storage = torch.zeros(1000, device=unlabelled)
    optimizer.state[module.weight] = {
        "nested": {"history": [torch.ones(1000, device=unlabelled)]},
        "views": [storage[:500], storage[500:], storage],
        "not counted": [module.weight, torch.ones(1000), 3, None, torch.eye(3).to_sparse_csr()],
    }
    [uses] = memory_breakdown(module, optimizer).values()
    assert uses["optimizer state"] == 4096 + 4096
    assert uses["rest"] >= 0


def test_sparse_gradients_and_lazy_parameters(unlabelled):
    module = nn.ModuleList([nn.Embedding(1000, 8, sparse=True), nn.LazyLinear(3)])
    module[0].to(unlabelled)
    module[0](torch.arange(4, device=unlabelled)).sum().backward()
    [uses] = memory_breakdown(BalancedDataParallel(1, module, [unlabelled])).values()
    assert uses["gradient"] == 512 + 512  # four indices, four rows
    assert uses["parameter"] == 32256
