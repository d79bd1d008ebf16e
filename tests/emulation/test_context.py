from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from balanced_dp import EmulationError, emulate_devices
from balanced_dp.emulation import EmulatedDevices

CPU = torch.device("cpu")
KIB = 1024


def cost(tensors: Iterable[Tensor]) -> int:
    return sum(-(-t.nbytes // 512) * 512 for t in tensors)


# Opening and closing.


def test_contexts_do_not_nest(devices):
    message = r"cannot be nested.* has 3 devices"
    with pytest.raises(EmulationError, match=message), emulate_devices(1):
        pass
    assert torch.ones(1, device="lazy:1").item() == 1.0  # the open one still works


# Tensors that outlive a context.


def test_tensors_that_outlive_the_context():
    with pytest.warns(ResourceWarning) as record, emulate_devices(3) as devices:
        kept = [torch.zeros(2, 1000, device=devices[1])]
        kept += [nn.Parameter(torch.zeros(100, device=devices[1])) * 1, kept[0][1]]
    assert [str(warning.message).partition(". They can no longer")[0] for warning in record] == [
        "tensors outlive their emulate_devices context: parameter 512 B on lazy:1, "
        "activation 512 B on lazy:1, other 8.00 KiB on lazy:1"
    ]
    assert record[0].filename == __file__


@pytest.mark.parametrize("as_cuda", [False, True])
def test_huge_tensors_that_outlive_it(as_cuda):
    with (
        pytest.warns(ResourceWarning, match=r"other 4.00 TiB on (lazy|cuda):0"),
        emulate_devices(1, symbolic=True, as_cuda=as_cuda) as devices,
    ):
        huge = torch.zeros(2**40, device=devices[0])
    with pytest.raises(EmulationError):
        huge.sum()


def test_an_error_in_the_body_is_not_masked(emulate):
    with pytest.raises(KeyError, match="the body's own"), emulate_devices(1) as devices:
        raise KeyError(f"the body's own, with {torch.zeros(3, device=devices[0])}")
    emulate(1)
    assert torch.lazy.memory_allocated() == 0


# Capacity.


@pytest.mark.parametrize(
    ("memory", "sizes"), [((0, "2KiB"), [0, 2048]), (4096, [4096] * 2), (None, [sys.maxsize] * 2)]
)
def test_capacity_of_all_or_of_each(memory, sizes, emulate):
    emulate(2, memory=memory)
    assert [torch.lazy.mem_get_info(i)[1] for i in range(2)] == sizes


ALLOCATIONS: dict[str, Callable[[Tensor], Any]] = {
    "factory": lambda x: torch.ones(1025, device=x.device),
    "operator": lambda x: (x + x) + (x + x),
    "copy from the cpu": lambda x: torch.ones(5000).to(x.device),
    "copy from a device": lambda x: torch.ones(5000, device="lazy:0").to(x.device),
    "tensor": lambda x: torch.tensor([1.0] * 4000, device=x.device),
    "resize_": lambda x: torch.ones(10, device=x.device).resize_(5000),
    "out": lambda x: torch.cat([x, x, x], out=torch.empty(0, device=x.device)),
    "dropout": lambda x: F.dropout(x.repeat(2)),
}


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS)
def test_what_does_not_fit_raises_as_on_cuda(allocate, symbolic, emulate):
    devices = emulate(2, memory=["1MiB", 8 * KIB], symbolic=symbolic)
    lazy = torch.lazy
    x = torch.ones(1000, device=devices[1])
    with pytest.raises(torch.OutOfMemoryError) as error:
        allocate(x)
    assert re.fullmatch(
        r"CUDA out of memory. Tried to allocate \d+.\d\d KiB. GPU 1 has a total capacity of 8.00 "
        r"KiB of which (\d.\d\d KiB|0 B) is free. \(This is the emulated device lazy:1.\)",
        str(error.value),
    )
    del error
    assert [lazy.memory_allocated(device) for device in devices] == [0, 4096]
    assert [lazy.memory_stats(device)["num_ooms"] for device in devices] == [0, 1]
    assert lazy.max_memory_allocated(devices[1]) <= 8 * KIB
    assert torch.ones(1024, device=devices[1]).shape == (1024,)  # all that is left


# Copies between devices.


def test_copies_between_devices_are_counted(devices):
    x = torch.zeros(10)
    a = x.to(devices[0])
    b = a.to(devices[1])
    assert a.to(devices[0], torch.float64).device == devices[0]
    assert b.clone().add_(b).device == devices[1]
    expected = Counter({(CPU, devices[0]): 40, (devices[0], devices[1]): 40})
    for copying, source, target, num_bytes in (
        (lambda: b.to(devices[2], torch.float64), devices[1], devices[2], 80),
        (b.tolist, devices[1], CPU, 40),
        (lambda: x.copy_(a), devices[0], CPU, 40),
        (lambda: a.copy_(x), CPU, devices[0], 40),
        (lambda: a.copy_(b), devices[1], devices[0], 40),
        (lambda: b[0].item(), CPU, CPU, 0),  # a number, not a copy of a tensor
        (lambda: a.requires_grad_().to(devices[1]), devices[0], devices[1], 40),
        (lambda: (a.to(devices[1]) * 2).sum().backward(), devices[0], devices[1], 40),
    ):
        copying()
        expected[source, target] += num_bytes
    expected[devices[1], devices[0]] += 40  # the gradient
    assert devices.copied_bytes() == +expected


# Memory by use.


def used(devices: EmulatedDevices, index: int = 0, when: str = "now") -> dict[str, int]:
    """Return the bytes of each use of memory on a device, without the uses of 0 bytes.

    Also check that the bytes add up to the allocated memory, now and at the peak.
    """
    breakdown = devices.memory_breakdown(index)
    assert sum(breakdown.now.values()) == torch.lazy.memory_allocated(index)
    assert sum(breakdown.peak.values()) == torch.lazy.max_memory_allocated(index)
    return {use: num_bytes for use, num_bytes in getattr(breakdown, when).items() if num_bytes}


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01), 2),
    "AMSGrad": (lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), 3),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.01), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_is_broken_down_to_the_byte(name, symbolic, emulate):
    make_optimizer, num_states = OPTIMIZERS[name]
    devices = emulate(1, symbolic=symbolic)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 100)
    module = nn.Sequential(*layers)
    loaded = copy.deepcopy(module.state_dict())
    optimizer = make_optimizer(module.to(devices[0]).parameters())
    weights = {"parameter": cost(module.parameters()), "buffer": 3 * 512}
    assert used(devices) == weights

    x = torch.zeros(4, 3, 8, 8).to(devices[0])
    target = torch.zeros(4, dtype=torch.int64).to(devices[0])
    held = fixed = weights | {"input": cost([x, target])}
    gradients = {"gradient": weights["parameter"]}
    states = {"optimizer state": num_states * weights["parameter"]} if num_states else {}
    for _ in range(3):
        output = module(x)
        assert used(devices).keys() - held.keys() == {"activation"}
        F.cross_entropy(output, target).backward()
        del output
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        assert used(devices) == held | gradients
        torch.lazy.reset_peak_memory_stats(devices[0])
        optimizer.step()
        held = fixed | states
        assert used(devices) == held | gradients
        at_peak = used(devices, when="peak")
        assert at_peak.pop("other", 0) < 3 * weights["parameter"]
        assert at_peak == held | gradients
        optimizer.zero_grad(set_to_none=False)
        assert used(devices) == held | gradients
        optimizer.zero_grad()
        assert used(devices) == held
        module.load_state_dict(loaded)
        assert used(devices) == held

    optimizer.step(lambda: F.cross_entropy(module(x), target).backward())
    assert used(devices) == held | gradients


def test_copies_keep_their_use(devices):
    module = nn.Linear(100, 50).to(devices[0])
    replica = {name: p.to(devices[1]) for name, p in module.named_parameters()}
    weights = {"parameter": cost(module.parameters())}
    assert used(devices, 0) == used(devices, 1) == weights
    x = (torch.zeros(8, 100).to(devices[0]) + 1).to(devices[1])
    with_input = weights | {"input": cost([x])}
    assert used(devices, 1) == with_input

    output = F.linear(x, replica["weight"], replica["bias"])
    assert used(devices, 1) == with_input | {"activation": cost([output])}
    gathered = output.to(devices[0])
    assert used(devices, 0) == weights | {"gathered output": cost([output])}

    gathered.sum().backward()
    del gathered
    gradients = {"gradient": cost(module.parameters())}
    assert used(devices, 0) == weights | gradients
    assert used(devices, 1) == with_input | {"activation": cost([output])}


TEMPORARY: list[tuple[Callable[[Any], torch.optim.Optimizer], float]] = [
    (torch.optim.AdamW, 1),
    (partial(torch.optim.AdamW, foreach=False), 3 / 8),
    (partial(torch.optim.AdamW, fused=True), 0),
    (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 0),
    (partial(torch.optim.SGD, lr=0.1, fused=True), 0),
]
"""Optimizers, each with its temporary memory as a fraction of the memory of the parameters."""


@pytest.mark.parametrize(("make", "temporary"), TEMPORARY)
def test_temporary_memory_of_optimizers(make, temporary, symbolic, device):
    """For all parameters by default, for one with foreach=False, none if fused."""
    values = [torch.zeros(256, 256, device=d) for d in (*[device] * 8, "cpu")]
    parameters = [torch.nn.Parameter(value) for value in values]
    optimizer, reference = make(parameters[:8]), make(parameters[8:])
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        reference.step()
        torch.lazy.reset_peak_memory_stats()
        held, version = torch.lazy.memory_allocated(), parameters[0]._version
        optimizer.step()
    taken = torch.lazy.max_memory_allocated() - held
    assert taken == pytest.approx(temporary * 8 * 256 * 256 * 4, abs=4096)
    if not symbolic:
        torch.testing.assert_close(parameters[0].detach().cpu(), parameters[8].detach())
    assert parameters[0]._version > version or "fused" in getattr(make, "keywords", {})
