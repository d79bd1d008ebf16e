from __future__ import annotations

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, ProbeError, emulate_devices, memory_breakdown

KEPT = ("parameter", "buffer", "gradient", "optimizer state")


class LanguageModel(nn.Module):
    """A small model with a comparatively large output, as in language models."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, vocabulary)
        self.head.weight = self.embedding.weight  # tied: counted once

    def forward(self, tokens):
        hidden = self.layers(self.embedding(tokens)).transpose(1, 2)
        return self.head(self.norm(hidden).transpose(1, 2))


def train_step(model, optimizer, vocabulary):
    tokens = torch.randint(vocabulary, (24, 8))
    output = model(tokens)
    labels = tokens.flatten().to(output.device)
    nn.functional.cross_entropy(output.flatten(0, 1), labels).backward()
    optimizer.step()


@pytest.fixture
def unlabelled(emulate, monkeypatch):
    """An emulated device without labels, as on accelerators."""
    [device] = emulate(1)
    monkeypatch.delattr(torch.lazy, "memory_breakdown")
    return device


def breakdown_of_a_step(gpu0_bsz, vocabulary, symbolic=False, hide_labels=None):
    """Return the breakdown of the second step, in which optimizer state exists."""
    with emulate_devices(4, memory="1GiB", symbolic=symbolic) as devices:
        model = BalancedDataParallel(gpu0_bsz, LanguageModel(vocabulary).to(devices[0]))
        optimizer = torch.optim.AdamW(model.parameters())
        train_step(model, optimizer, vocabulary)
        optimizer.zero_grad()
        with model.memory.measure() as usage:
            train_step(model, optimizer, vocabulary)
        labels = [devices.memory_breakdown(device).peak for device in devices]
        if hide_labels is not None:
            hide_labels.delattr(torch.lazy, "memory_breakdown")
        found = memory_breakdown(model, optimizer)
        del model, optimizer
    return found, usage, labels


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("vocabulary", [50, 2000])
@pytest.mark.parametrize("gpu0_bsz", [0, 1, 5])
def test_on_emulated_devices_it_is_the_ledgers_to_the_byte(gpu0_bsz, vocabulary, symbolic):
    found, usage, labels = breakdown_of_a_step(gpu0_bsz, vocabulary, symbolic)
    assert [*found] == [f"lazy:{i}" for i in range(4)]
    assert [*found.values()] == labels
    assert usage.valid and usage.reason is None
    for uses, device in zip(labels, usage.devices, strict=True):
        assert device.peak_allocated_bytes == device.peak_reserved_bytes == sum(uses.values())
        assert (device.total_bytes, device.peak_used_bytes) == (2**30, None)


@pytest.mark.parametrize("gpu0_bsz", [0, 1, 3, 5])
def test_from_live_objects_it_agrees_with_the_ledger(gpu0_bsz, monkeypatch):
    """Without labels, as on accelerators, the breakdown is the same with one rest."""
    with monkeypatch.context() as patch:
        found, _, _ = breakdown_of_a_step(gpu0_bsz, 2000, hide_labels=patch)
    exact, _, _ = breakdown_of_a_step(gpu0_bsz, 2000)
    for uses, labelled in zip(found.values(), exact.values(), strict=True):
        assert set(uses) == {*KEPT, "rest"} and min(uses.values()) >= 0
        assert sum(uses.values()) == sum(labelled.values())
        assert uses["optimizer state"] == labelled["optimizer state"]
        assert uses["parameter"] >= labelled["parameter"] > 0
    assert found["lazy:0"]["gradient"] > 0


def test_a_bare_module_has_a_breakdown(emulate):
    devices = emulate(2)
    found = memory_breakdown(nn.Linear(100, 10).to(devices[1]))
    assert found["lazy:1"]["parameter"] == 4096 + 512


def test_state_of_any_shape_is_counted_once(unlabelled):
    module = nn.Linear(10, 10).to(unlabelled)
    optimizer = torch.optim.SGD(module.parameters())
    storage = torch.zeros(1000, device=unlabelled)
    optimizer.state[module.weight] = {
        "nested": {"history": [torch.ones(1000, device=unlabelled)]},
        "views": [storage[:500], storage[500:], storage],
        "not counted": [module.weight, torch.ones(1000), 3, None, "text"],
    }
    [uses] = memory_breakdown(module, optimizer).values()
    assert uses["optimizer state"] == 4096 + 4096
    assert uses["rest"] >= 0


def test_a_module_on_the_cpu_is_refused():
    with pytest.raises(ProbeError, match=r"no device of the model counts its memory: \['cpu'\]"):
        memory_breakdown(nn.Linear(2, 2))


def test_sparse_gradients_and_lazy_parameters(unlabelled):
    module = nn.ModuleList([nn.Embedding(1000, 8, sparse=True), nn.LazyLinear(3)])
    module[0].to(unlabelled)
    module[0](torch.arange(4, device=unlabelled)).sum().backward()
    [uses] = memory_breakdown(BalancedDataParallel(1, module, [unlabelled])).values()
    assert uses["gradient"] == 512 + 512  # four indices, four rows
    assert uses["parameter"] == 32256
