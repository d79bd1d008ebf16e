from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from balanced_dp import BalancedDataParallel, BalanceWarning, SymbolicValueError, emulate_devices
from balanced_dp.emulation.machine import current_machine
from balanced_dp.emulation.symbolic import _how_to_make
from balanced_dp.emulation.tensor import operator

from ..modules import Case, Lambda
from ..versions import has_torch
from .models import MODELS, WITH_DROPOUT, inputs_of, train

# The same bytes as with values.


def trained_bytes(case: Case, dropout: float, device: torch.device) -> list[int]:
    lazy, module = torch.lazy, train(case, device, num_steps=2, dropout=dropout).module
    num_bytes = [lazy.memory_allocated(device), lazy.max_memory_allocated(device)]
    args, kwargs = inputs_of(case, device)
    module.eval()
    for norm in [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]:
        norm.train()  # in evaluation its meta function returns two statistics, which are not used
    for mode in (torch.no_grad, torch.inference_mode):
        lazy.reset_peak_memory_stats(device)
        with mode():
            module(*args, **kwargs)
        num_bytes += [lazy.memory_allocated(device), lazy.max_memory_allocated(device)]
    return num_bytes


# Older versions of torch have no meta function for the gradient of weight norm.
MEASURED = [name for name in MODELS if name != "weight norm" or has_torch("2.13")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dropout"), [*product(MEASURED, [0.0]), *product(WITH_DROPOUT, [0.2])]
)
def test_models_take_the_bytes_with_numbers(name, dropout):
    def measured(symbolic):
        with emulate_devices(2, symbolic=symbolic) as devices:
            num_bytes = trained_bytes(MODELS[name], dropout, devices[1])
            return num_bytes, devices.memory_breakdown(1), devices.copied_bytes()

    assert measured(symbolic=True) == measured(symbolic=False)


def test_a_model_larger_than_memory(symbolic_devices):
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size, num_layers = 40_000, 9
    layers = [nn.Linear(size, size, device="lazy:1") for _ in range(num_layers)]
    module = nn.Sequential(*layers, nn.GELU(), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4096, size, device="lazy:1")).pow(2).mean().backward()
    optimizer.step()
    assert torch.lazy.memory_allocated(1) > 4 * num_layers * 4 * size**2 > 200 * 2**30
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth * (1 if sys.platform == "darwin" else 1024) < 2**30


# Known and unknown values.

READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x[0, 0].item(),
    "bool": lambda x: bool((x > 0).any()),
    "numpy": lambda x: x.numpy(force=True),
    "cpu": lambda x: x.cpu(),
    "copy_ to the cpu": lambda x: torch.zeros(4, 3).copy_(x),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: (x > 0).nonzero(),
    "index with a mask": lambda x: x[x > 0],
    "write through a mask": lambda x: x.index_put_((x > 0,), x.new_ones(1)),
    "repeat_interleave": lambda x: x.repeat_interleave(x.argmax(1), 0),
    "to_sparse": lambda x: x.to_sparse(),
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("name", READS)
def test_unknown_values_cannot_be_read(symbolic_devices, name):
    x = torch.zeros(4, 3, device=symbolic_devices[0])
    with pytest.raises(SymbolicValueError) as error:
        READS[name](x)
    doing = {"cpu": "copying it to the CPU", "item": "aten._local_scalar_dense.default"}
    assert re.fullmatch(
        doing.get(name, ".*") + r" needs the value of a torch\.\w+ tensor of shape \(.*\), but "
        r"emulate_devices\(symbolic=True\) keeps shapes only; use symbolic=False "
        r"\(in balanced-dp run, leave out --symbolic or lower --steps\)",
        str(error.value),
    )


@pytest.mark.usefixtures("no_collector")
def test_remembered_outputs_hold_no_memory(symbolic_devices):
    remembered = operator(torch.ops.aten.cosh.default).on_shapes.make_outputs
    x, before = torch.zeros(5, 1, 7, device="lazy:0"), len(remembered)
    for _ in range(2):
        torch.cosh(x)
        assert torch.lazy.memory_allocated(0) == 512
        assert len(remembered) == before + 1
    a_part_of_a_new_one = torch.zeros(4, device="meta")[:2]
    assert _how_to_make(a_part_of_a_new_one, [], []) is None


def test_a_constant_is_an_output(symbolic_devices):
    model = BalancedDataParallel(1, Lambda(lambda _, x: x.new_ones(7)), symbolic_devices)
    assert model(torch.ones(8, 3)).shape == (7,)


@pytest.mark.parametrize("num_calls", [1, 2])
def test_what_is_written_in_place_is_returned(symbolic_devices, num_calls):
    for _ in range(num_calls):
        x, y = (torch.zeros(4, 3, device=symbolic_devices[0]) for _ in range(2))
        before = x._version, y._version
        assert x.addcmul_(y, y) is x
        torch._foreach_mul_([x, y], 2)
        assert (x._version, y._version) == (before[0] + 2, before[1] + 1)
        assert torch.lazy.memory_allocated(0) == 2 * 512
        assert x.set_(y).data_ptr() == y.data_ptr()
        assert torch.lazy.memory_allocated(0) == 512


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


def test_errors_of_torch_stay(symbolic_devices):
    x, y = (torch.zeros(n, 4, device=symbolic_devices[0]) for n in (3, 5))
    torch.cdist(x, y, p=1.5)  # is remembered
    pack = torch.nn.utils.rnn.pack_padded_sequence
    for call in (lambda: torch.cdist(x, y, p=-1.0), lambda: x @ y, lambda: pack(x, x)):
        with pytest.raises(RuntimeError, match=r"negative p|reduction dim|must be on the CPU"):
            call()


def test_sparse_gradients_are_refused(symbolic_devices):
    """Meta functions lose the number of values of a sparse tensor."""
    for make in (nn.Embedding, partial(nn.EmbeddingBag, mode="sum")):
        module = make(10, 4, sparse=True, device=symbolic_devices[0])
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
