"""Autocast: operators run in the dtypes of CUDA."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from balanced_dp import emulate_devices
from balanced_dp.emulation import autocast as autocasting

from ..versions import has_torch

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def autocast(dtype=BF16, **options):
    return torch.autocast("lazy", dtype, **options)


OPERATORS = {
    "linear": (lambda x: functional.linear(x, x), BF16),
    "attention": (lambda x: functional.scaled_dot_product_attention(*[x[None]] * 3), BF16),
    "softmax": (lambda x: x.bfloat16().softmax(-1), F32),
    "softmax with a dtype": (lambda x: x.softmax(-1, dtype=F64), F64),
    "cross_entropy": (lambda x: functional.cross_entropy(x.bfloat16(), x[:, 0].long()), F32),
    "addcmul": (lambda x: torch.addcmul(x, x.bfloat16(), x.bfloat16()), F32),
    "add": (lambda x: x + x.bfloat16(), F32),
    "gelu": (lambda x: functional.gelu(x.bfloat16()), BF16),
    "double": (lambda x: x.double() @ x.double(), F64),
    "integers": (lambda x: x.bool().sum(), torch.int64),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_run_in_cudas_dtypes(name, device):
    operate, dtype = OPERATORS[name]
    x = torch.zeros(8, 8, device=device)
    with autocast():
        assert operate(x).dtype == dtype
    with autocast(F16):
        assert operate(x).dtype == (F16 if dtype == BF16 and name != "gelu" else dtype)
        with autocast(enabled=False):
            assert (x @ x).dtype == F32
    assert (x @ x).dtype == F32


def test_a_weight_is_cast_once(emulate):
    """A cast without gradients is not kept for those that have them."""
    emulate(1)
    weight, x = (torch.zeros(256, 256, device="lazy:0", requires_grad=i == 0) for i in range(2))
    held = torch.lazy.memory_allocated()
    with autocast():
        with torch.no_grad():
            x @ weight
        for _ in range(2):
            (x @ weight).sum().backward()
            assert weight.grad is not None
            weight.grad = None
            assert torch.lazy.memory_allocated() == held + weight.nbytes // 2
    assert torch.lazy.memory_allocated() == held


def test_torch_knows_of_it():
    with emulate_devices(1):
        assert torch.amp.is_autocast_available("lazy")
        assert torch.get_autocast_dtype("lazy") == F16
        with autocast():
            assert torch.is_autocast_enabled("lazy")
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_enabled()
        if has_torch("2.10"):
            with pytest.warns(UserWarning, match="only supports dtypes of torch.bfloat16"):
                torch.autocast("lazy", F32)
    with pytest.raises(RuntimeError, match="unsupported autocast device_type 'lazy'"):
        autocast()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_keeps_the_dtype(use_reentrant, device):
    layers, dtypes = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).to(device), []
    layers[0].register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))
    x = torch.ones(6, 8, device=device, requires_grad=True)
    with autocast():
        output = checkpoint(layers, x, use_reentrant=use_reentrant)
    output.float().sum().backward()
    assert dtypes == [BF16, BF16]  # in forward, and again in backward
    assert {p.grad.dtype for p in layers.parameters()} == {F32}


def test_the_lists_are_torchs():
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    for macro, names in (
        ("LOWER_PRECISION_FP", autocasting._LOWER_PRECISION),
        ("FP32_SET_OPT_DTYPE", autocasting._FLOAT32_RESULT),
        ("PROMOTE", autocasting._WIDEST),
    ):
        defined = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)*.*)", text)[1]
        assert set(re.findall(r"_\((\w+)", defined)) == set(names.split())
