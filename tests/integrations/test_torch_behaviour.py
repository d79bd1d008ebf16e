"""Run the cases of PyTorch's tests of DataParallel with torch's class and with ours in its place.

The tests run on two emulated devices that are named "cuda". If torch's class passes them, emulated
devices behave as CUDA devices do. If our class passes them, a script does not notice that torch's
class has been replaced. The cases are those of torch's ``test/distributed/test_data_parallel.py``.
``tests/parallel`` tests our class in detail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only

from balanced_dp import emulate_devices
from balanced_dp.integrations.replacements import replaced_data_parallel

from .. import modules
from ..modules import Case, tensors
from .test_replacements import AfterTheEvenSplit

CUDA0, CUDA1 = torch.device("cuda:0"), torch.device("cuda:1")
DOUBLE = torch.float64


@pytest.fixture(params=["torch", "ours", "ours, uneven"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """The class behind the name nn.DataParallel: torch's, ours, or ours with an uneven split.

    With the uneven split, the first device gets one sample of each batch.
    """
    with emulate_devices(2, as_cuda=True) as devices:
        value = 1 if "uneven" in request.param else None
        ours = replaced_data_parallel(AfterTheEvenSplit(value, devices))
        with nullcontext() if request.param == "torch" else ours:
            del ours  # else it would keep the model's memory
            yield request.param


def device_of(name: Any) -> torch.device:
    return torch.device("cpu" if name == -1 else f"cuda:{name}" if isinstance(name, int) else name)


def both_forms(module: nn.Module, ids: Any, options: Any = None) -> list[Callable[..., Tensor]]:
    """Return a call of ``module`` by nn.DataParallel, and one by nn.parallel.data_parallel."""
    options, function = options or {}, nn.parallel.data_parallel
    return [
        lambda *args, **named: nn.DataParallel(module, ids, **options)(*args, **named),
        lambda *args, **named: function(module, args or None, ids, module_kwargs=named, **options),
    ]


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.randn(4, dtype=DOUBLE, device="cuda").requires_grad_())
        self.register_buffer("shift", torch.randn(4, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


IDS = [(0, 1), (CUDA0, CUDA1), ["cuda:0", "cuda:1"], range(2)]
CASES: dict[str, Case] = {
    **{name: modules.CASES[name] for name in ("mlp", "lstm", "tied weights", "sparse embedding")},
    **{name: modules.CASES[name] for name in ("several inputs", "keyword-only", "dict outputs")},
    "buffers": Case(Buffers, tensors((4,))),
}


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU:FutureWarning")  # by torch's gather
@pytest.mark.parametrize(
    ("name", "ids", "options"),
    [
        *((name, None, {}) for name in CASES),
        *(("mlp", ids, {"output_device": ids[1]}) for ids in IDS),
        *((name, (1, 0), {}) for name in ("mlp", "several inputs", "lstm")),
        *((name, [0], {}) for name in ("mlp", "several inputs")),
        ("mlp", None, {"output_device": -1}),
    ],
)
def test_outputs_and_gradients_are_the_modules(
    kind: str, name: str, ids: Any, options: dict[str, Any]
) -> None:
    first, where = device_of((ids or [0])[0]), options.get("output_device")
    module = CASES[name].make_module().to(first).double()
    leaves = [t for t in (*module.parameters(), *module.buffers()) if t.requires_grad]

    def results(call: Callable[..., Any], device: Any, output_device: torch.device) -> list[Any]:
        def leaf(x: Tensor) -> Tensor:
            x = x.to(device, DOUBLE if x.is_floating_point() else x.dtype, copy=True)
            return x.requires_grad_(x.is_floating_point())

        torch.manual_seed(0)
        args, named = tree_map_only(Tensor, leaf, CASES[name].make_inputs(24))
        outputs = tree_leaves(call(*args, **named))
        assert {output.device for output in outputs} == {output_device}
        for tensor in leaves:
            tensor.grad = None
        sum(output.sum() for output in outputs).backward()
        gradients = (t.grad for t in (*leaves, *args, *named.values()) if hasattr(t, "grad"))
        return [None if t is None else t.to_dense().cpu() for t in (*outputs, *gradients)]

    expected = results(module, first, first)
    for device, call in itertools.product(["cpu", "cuda:1"], both_forms(module, ids, options)):
        found = results(call, device, first if where is None else device_of(where))
        if kind == "torch":  # which has zeros for what is unused
            found = [f if e is not None else None for f, e in zip(found, expected, strict=True)]
        assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for tensor in leaves:
        assert tensor.grad is None or tensor.grad.is_sparse == (name == "sparse embedding")


@pytest.mark.parametrize(("places", "ids"), [(["cpu"], None), ([0], [1, 0]), ([0, 1], None)])
def test_a_module_must_be_on_the_first_device(kind: str, places: list[Any], ids: Any) -> None:
    net = nn.Sequential(*(nn.Linear(2, 2).to(place) for place in places))
    before = [p.device for p in net.parameters()]
    message = f"parameters and buffers on device cuda:{(ids or [0])[0]}"
    for call in both_forms(net, ids):
        with pytest.raises(RuntimeError, match=message):
            call(torch.ones(4, 2))
    assert [p.device for p in net.parameters()] == before


def test_gathering_takes_the_memory_of_the_result() -> None:
    with emulate_devices(2, as_cuda=True):
        model, x = nn.DataParallel(nn.Identity()), torch.ones(8, 1024, device="cuda")
        assert torch.equal(model(x), x) and torch.cuda.max_memory_allocated() == 2 * x.nbytes
        del x
