from __future__ import annotations

import copy
import io
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from balanced_dp import BalanceWarning, SymbolicValueError, emulate_devices
from balanced_dp.emulation.machine import current_machine
from balanced_dp.emulation.symbolic import _how_to_make
from balanced_dp.emulation.tensor import operator

from .models import DROPOUT_MODELS, MODELS, Made, train

CASES = MODELS | {f"{name} with dropout": make for name, make in DROPOUT_MODELS.items()}


# The same bytes as with values.


def trained_bytes(make: Callable[[], Made], device: torch.device) -> list[int]:
    lazy = torch.get_device_module(device)
    module = train(make, device, torch.float32, num_steps=2).module
    num_bytes = [lazy.memory_allocated(device), lazy.max_memory_allocated(device)]
    torch.manual_seed(0)
    inputs = [x.to(device) for x in make()[1]]
    module.eval()
    for norm in [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]:
        norm.train()  # in evaluation its meta function returns two statistics, which are not used
    for mode in (torch.no_grad, torch.inference_mode):
        lazy.reset_peak_memory_stats(device)
        with mode():
            module(*inputs)
        num_bytes += [lazy.memory_allocated(device), lazy.max_memory_allocated(device)]
    return num_bytes


@pytest.mark.parametrize("name", CASES)
def test_models_take_the_bytes_with_numbers(name):
    def measured(symbolic):
        with emulate_devices(2, symbolic=symbolic) as devices:
            num_bytes = trained_bytes(CASES[name], devices[1])
            return num_bytes, devices.memory_breakdown(1), devices.copied_bytes()

    assert measured(symbolic=True) == measured(symbolic=False)


def test_a_model_larger_than_memory(symbolic_devices):
    resource = pytest.importorskip("resource")
    lazy = torch.get_device_module("lazy")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size, num_layers = 40_000, 9
    layers = [
        nn.Sequential(nn.Linear(size, size, device="lazy:1"), nn.GELU(), nn.Dropout(0.1))
        for _ in range(num_layers)
    ]
    module = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(module.parameters())
    weight_bytes = num_layers * (4 * size * size + -(-4 * size // 512) * 512)
    assert weight_bytes > 50 * 2**30
    module(torch.randn(4096, size, device="lazy:1")).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    now = symbolic_devices.memory_breakdown(1).now
    assert (now["parameter"], now["gradient"]) == (weight_bytes, weight_bytes)
    assert now["optimizer state"] == 2 * weight_bytes
    assert lazy.max_memory_allocated(1) > 4 * weight_bytes
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth * (1 if sys.platform == "darwin" else 1024) < 2**30


# Known and unknown values.

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool((x > 0).any()),
    "if": lambda x: 1 if torch.isfinite(x).all() else 0,
    "format": lambda x: f"{x.mean():.2f}",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(force=True),
    "cpu": lambda x: x.cpu(),
    "copy_ to the cpu": lambda x: torch.zeros(4, 3).copy_(x),
    "floats made of integers": lambda x: torch.arange(3, device=x.device).float().tolist(),
    "integers made of it": lambda x: x.argmax(1).tolist(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "index with a mask": lambda x: x[x > 0],
    "index rows with a mask": lambda x: x[x.sum(1) > 0],
    "write through a mask": lambda x: x.index_put_((x > 0,), x.new_ones(1)),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.argmax(1), 0),
    "bincount": lambda x: torch.bincount(x.argmax(1)),
    "to_sparse": lambda x: x.to_sparse(),
    "pickle": pickle.dumps,
    "save": lambda x: torch.save(x, io.BytesIO()),
}


@pytest.mark.parametrize("name", READS)
def test_unknown_values_cannot_be_read(symbolic_devices, name):
    x = torch.zeros(4, 3, device=symbolic_devices[0])
    with pytest.raises(SymbolicValueError) as error:
        READS[name](x)
    doing = {"cpu": "copying it to the CPU", "item": "aten._local_scalar_dense.default"}
    assert re.fullmatch(
        doing.get(name, ".*") + r" needs the value of a torch\.\w+ tensor of shape \(.*\), but "
        r"emulate_devices\(symbolic=True\) keeps shapes only; use symbolic=False \(plan and tune: "
        r"--numeric, run: without --symbolic\)",
        str(error.value),
    )


KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "itself": lambda x, i: i,
    "arithmetic": lambda x, i: (i + 1) * i,
    "comparison": lambda x, i: i > 1,
    "reduction": lambda x, i: i.sum(),
    "index": lambda x, i: i[i > 1],
    "nonzero": lambda x, i: (i > 1).nonzero()[:, 0],
    "written in place": lambda x, i: i.clone().masked_fill_(i > 1, 7),
    "one_hot": lambda x, i: F.one_hot(i).argmax(1),
    "copy to another device": lambda x, i: i.to("lazy:1"),
    "zeros_like": lambda x, i: torch.zeros_like(x, dtype=torch.int64)[0],
    "ones_like of bool": lambda x, i: torch.ones_like(x, dtype=torch.bool)[0],
    "full_like": lambda x, i: torch.full_like(x, 2, dtype=torch.int32)[0],
    "new_zeros": lambda x, i: x.new_zeros(2, dtype=torch.int64),
    "arange": lambda x, i: torch.arange(3, device=x.device),
    "eye": lambda x, i: torch.eye(2, dtype=torch.bool, device=x.device).sum(1),
    "triangle": lambda x, i: torch.ones(2, 2, dtype=torch.bool).to(x.device).tril()[0],
    "size": lambda x, i: torch.tensor(x.shape, device=x.device),
}
UNKNOWN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mask": lambda x, i: x[i > 1],
    "mask of a column": lambda x, i: x[i > 0, 1],
    "integers": lambda x, i: x[i[:3]],
    "mask on the cpu": lambda x, i: x[torch.tensor([True, False, True, True])],
    "write through a mask": lambda x, i: _written(x, i > 1),
    "embedding": lambda x, i: F.embedding(i[None], x),
    "repeat_interleave": lambda x, i: x.repeat_interleave(i, 0),
    "float of integers": lambda x, i: i.double(),
    "sort": lambda x, i: x.sort(1).indices,
    "unknown indices": lambda x, i: F.embedding(x.argmax(1), x),
    "cross entropy": lambda x, i: F.cross_entropy(x, i % 3),
    "random": lambda x, i: torch.randn_like(x).exponential_(),
    "random integers": lambda x, i: torch.randint_like(i, 5),
    "arange": lambda x, i: [torch.arange(0.0, end, device=x.device) for end in (9.0, 3.5)],
    "interpolate": lambda x, i: [F.interpolate(x[None], scale_factor=f) for f in (2.0, 4.0)],
    "fft": lambda x, i: torch.fft.rfft(x),
    "deepcopy": lambda x, i: copy.deepcopy(x),
    "float factory": lambda x, i: torch.zeros_like(i, dtype=torch.float16),
    "resize_": lambda x, i: x.resize_(7, 2),
    "unsqueeze_": lambda x, i: x.unsqueeze_(1),
    "add_": lambda x, i: x.add_(i[:3], alpha=2),
    "out": lambda x, i: torch.add(x, x, out=x.new_empty(0)),
    "of a list": lambda x, i: torch._foreach_sqrt([x, x[0]]),
    "written to a list": lambda x, i: torch._foreach_add_([x], 1),
    "linear": lambda x, i: F.linear(x[None, :, None], x),  # calls _unsafe_view
    "views": lambda x, i: [*x.t().unbind(1), *x.split(3), x[1:, ::2], x.expand(2, 4, 3)],
    "several": lambda x, i: torch.native_layer_norm(x, [3], None, None, 1e-5),
    "a transposed one": lambda x, i: [torch.relu(x.t()), x.t().contiguous(), x.t().exp_()],
    "other numbers": lambda x, i: [x.sum(d, keepdim=k) for d in (0, 1) for k in (True, False)],
    # The second linspace returned its first argument, a number.
    "linspace": lambda x, i: torch.linspace(0, 1, 5, device=x.device),
    "logspace": lambda x, i: torch.logspace(0, 1, 5, device=x.device),
}


def _written(x: Tensor, mask: Tensor) -> Tensor:
    x[mask] = torch.zeros(2, 3, device=x.device)
    x[mask, 0] = 1.0
    return x


def results_of(name: str, symbolic: bool) -> Any:
    """Return the layouts of what two calls return, and the values if they are known."""
    function = KNOWN.get(name) or UNKNOWN[name.removeprefix("unknown ")]
    results = []
    with emulate_devices(2, symbolic=symbolic):
        for _ in range(2):  # what the first call returns is remembered
            x = torch.arange(12.0, device="lazy:0").view(4, 3)
            for y in tree_leaves(function(x, torch.arange(4).to("lazy:0"))):
                layout = y.shape, y.stride(), y.dtype, y.storage_offset(), y.device
                num_bytes = y.untyped_storage().nbytes()
                results.append((*layout, num_bytes, y.tolist() if name in KNOWN else None))
            del x, y
    return results


@pytest.mark.parametrize("name", [*KNOWN, *(f"unknown {name}" for name in UNKNOWN)])
def test_layouts_and_integers_as_with_numbers(name):
    assert results_of(name, symbolic=True) == results_of(name, symbolic=False)


@pytest.mark.usefixtures("no_collector")
def test_remembered_outputs_hold_no_memory(symbolic_devices):
    remembered = operator(torch.ops.aten.cosh.default).on_shapes.make_outputs
    x, before = torch.zeros(5, 1, 7, device="lazy:0"), len(remembered)
    for _ in range(2):
        torch.cosh(x)
        assert torch.get_device_module("lazy").memory_allocated(0) == 512
        assert len(remembered) == before + 1
    a_part_of_a_new_one = torch.zeros(4, device="meta")[:2]
    assert _how_to_make(a_part_of_a_new_one, [], []) is None


def test_numbers_that_are_errors(symbolic_devices):
    x, y = (torch.zeros(n, 4, device=symbolic_devices[0]) for n in (3, 5))
    torch.cdist(x, y, p=1.5)
    with pytest.raises(RuntimeError, match="negative p"):
        torch.cdist(x, y, p=-1.0)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_what_is_written_in_place_is_returned(symbolic_devices, num_calls):
    for _ in range(num_calls):
        x, y = (torch.zeros(4, 3, device=symbolic_devices[0]) for _ in range(2))
        before = x._version, y._version
        assert x.addcmul_(y, y) is x
        torch._foreach_mul_([x, y], 2)
        assert (x._version, y._version) == (before[0] + 2, before[1] + 1)
        assert torch.get_device_module("lazy").memory_allocated(0) == 2 * 512
        assert x.set_(y).data_ptr() == y.data_ptr()
        assert torch.get_device_module("lazy").memory_allocated(0) == 512


def test_unknown_values_overwrite_none(symbolic_devices):
    x = torch.zeros(4, device=symbolic_devices[0])
    i = torch.arange(4).to(symbolic_devices[0])
    x.expand(4, 4).argmax(1).add_(x.argmax())  # is remembered, and laid out as the next one
    with pytest.raises(
        SymbolicValueError, match=r"aten.add_.Tensor, which writes to a torch.int64 tensor, needs"
    ):
        i.add_(x.argmax())
    with pytest.raises(SymbolicValueError, match="copying it into an integer tensor"):
        i.copy_(x)
    assert i.tolist() == [0, 1, 2, 3]


def test_text_of_symbolic_tensors(symbolic_devices):
    x = torch.zeros(2, 3, device=symbolic_devices[1])
    assert repr(x) == ("tensor(<symbolic>, size=(2, 3), dtype=torch.float32, device='lazy:1')")
    assert repr(torch.arange(2, device=symbolic_devices[1])) == "tensor([0, 1], device='lazy:1')"


def test_shapes_that_do_not_fit(symbolic_devices):
    x = torch.zeros(2, 3, device=symbolic_devices[0])
    with pytest.raises(RuntimeError) as error:
        x @ x
    assert not isinstance(error.value, SymbolicValueError)


def test_sparse_gradients_are_refused(symbolic_devices):
    """Meta functions lose the number of values of a sparse tensor."""
    for module in (
        nn.Embedding(10, 4, sparse=True),
        nn.EmbeddingBag(10, 4, mode="sum", sparse=True),
    ):
        module.to(symbolic_devices[0])
        index = torch.tensor([[1, 2]], device=symbolic_devices[0])
        with pytest.raises(SymbolicValueError, match="use symbolic=False"):
            module(index).sum().backward()


@pytest.mark.parametrize("name", ["pt", "safetensors"])
def test_files_stay_as_they_are(symbolic_devices, tmp_path, name):
    path = tmp_path / f"last.{name}"
    path.write_text("old")
    current_machine().reads_unknown_as_nan = True
    tensors = {"a": torch.ones(2, device="lazy:0"), "b": torch.ones(2, device="lazy:0")}
    save = torch.save if name == "pt" else pytest.importorskip("safetensors.torch").save_file
    with pytest.warns(BalanceWarning, match="is not saved: symbolic devices keep"):
        save(tensors, path)
    assert path.read_text() == "old"
