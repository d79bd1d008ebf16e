from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ..at_once import at_once
from .models import assert_same_outcome, exact


def peak_growth(device: torch.device, work: Callable[[], Any]) -> int:
    """Return how many bytes ``work`` raises the peak above the memory allocated before it."""
    lazy = torch.get_device_module(device)
    lazy.reset_peak_memory_stats(device)
    before = lazy.memory_allocated(device)
    work()
    return lazy.max_memory_allocated(device) - before


# Factories.

FACTORIES: dict[str, Callable[[Any], Tensor]] = {
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "as_tensor": lambda d: torch.as_tensor([1.5, 2.5], device=d),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones of bool": lambda d: torch.ones(3, dtype=torch.bool, device=d),
    "full": lambda d: torch.full((2, 2), 7, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange with start": lambda d: torch.arange(2, 7, 0.5, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "logspace": lambda d: torch.logspace(0, 1, 5, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "triu_indices": lambda d: torch.triu_indices(3, 3, device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(3.0, device=d),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(1.0),
    "channels_last": lambda d: torch.empty(
        1, 2, 3, 3, device=d, memory_format=torch.channels_last
    ).fill_(2.0),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 3, device=d), dtype=torch.int32),
    "new_full": lambda d: torch.ones(1, device=d).new_full((2,), 3.0),
    "new_tensor": lambda d: torch.ones(1, device=d).new_tensor([1.0, 2.0]),
    "default device": lambda d: _with_default_device(d),
}


def _with_default_device(device: Any) -> Tensor:
    with torch.device(device):
        return torch.ones(2)


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_factories_make_what_the_cpu_makes(devices, make):
    assert_same_outcome(make, devices[1])
    made = make(devices[1])
    assert made.device == devices[1]
    num_bytes = -(-made.nbytes // 512) * 512
    assert torch.get_device_module("lazy").memory_allocated(devices[1]) == num_bytes


# Random numbers.

DRAWS: dict[str, Callable[[torch.device], Tensor]] = {
    "rand": lambda d: torch.rand(20, device=d),
    "randn": lambda d: torch.randn(20, device=d),
    "randint": lambda d: torch.randint(1000, (20,), device=d),
    "randperm": lambda d: torch.randperm(50, device=d),
    "rand_like": lambda d: torch.rand_like(torch.zeros(20, device=d)),
    "rand_like of another device": lambda d: torch.rand_like(torch.zeros(20), device=d),
    "randn_like": lambda d: torch.randn_like(torch.zeros(20, device=d)),
    "randint_like": lambda d: torch.randint_like(torch.zeros(20, device=d), 1000),
    "randint_like from low": lambda d: torch.randint_like(torch.zeros(20, device=d), 10, 1000),
    "uniform_": lambda d: torch.zeros(20, device=d).uniform_(),
    "normal_": lambda d: torch.zeros(20, device=d).normal_(),
    "bernoulli": lambda d: torch.bernoulli(torch.full((50,), 0.5, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.ones(50, device=d), 20),
    "normal": lambda d: torch.normal(torch.zeros(20, device=d), 1.0),
    "dropout": lambda d: F.dropout(torch.ones(50, device=d)),
    "dropout in inference mode": torch.inference_mode()(
        lambda d: F.dropout(torch.ones(50, device=d))
    ),
    "dropout1d": lambda d: F.dropout1d(torch.ones(2, 50, 3, device=d)),
    "alpha_dropout": lambda d: F.alpha_dropout(torch.ones(50, device=d), training=True),
    "rrelu": lambda d: F.rrelu(-torch.ones(20, device=d), training=True),
    "gumbel_softmax": lambda d: F.gumbel_softmax(torch.zeros(20, device=d)),
    "init": lambda d: nn.init.kaiming_uniform_(torch.zeros(4, 5, device=d)),
    "attention": lambda d: F.scaled_dot_product_attention(
        *[torch.eye(8, device=d).expand(1, 1, 8, 8)] * 3, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_repeat_with_the_seed(devices, draw):
    torch.manual_seed(3)
    first, second = draw(devices[1]).tolist(), draw(devices[1]).tolist()
    assert first != second
    torch.manual_seed(3)
    torch.rand(7)
    torch.rand(7, device=devices[0])
    again = draw(devices[1]).tolist()
    F.dropout(torch.ones(50, device=devices[2]))
    torch.randperm(9)
    assert [again, draw(devices[1]).tolist()] == [first, second]


def test_threads_draw_what_one_draws(devices):
    def masks(i):
        return [F.dropout(torch.ones(30, device=devices[i])).tolist() for _ in range(50)]

    torch.manual_seed(5)
    expected = [masks(i) for i in range(3)]
    torch.manual_seed(5)
    assert at_once(masks, 3) == expected


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_dropout_and_its_gradient(devices, p):
    x = torch.ones(4000, dtype=torch.float64, device=devices[0], requires_grad=True)
    output = F.dropout(x, p)
    output.sum().backward()
    kept = 1 / (1 - p) if p < 1 else 0.0
    assert set(output.tolist()) <= {0.0, kept}
    assert x.grad.tolist() == output.tolist()
    share_kept = (output > 0).double().mean().item()
    assert abs(share_kept - (1 - p)) < 0.05
    assert torch.equal(F.dropout(x, p, training=False).cpu(), torch.ones_like(x, device="cpu"))


def test_dropout_masks_take_bytes(devices):
    lazy = torch.get_device_module("lazy")
    x = torch.ones(1024, device=devices[0], requires_grad=True)
    before = lazy.memory_allocated(devices[0])
    output = F.dropout(x, 0.5)
    assert lazy.memory_allocated(devices[0]) - before == output.nbytes + 1024
    assert lazy.max_memory_allocated(devices[0]) == lazy.memory_allocated(devices[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("as_cuda", "index"), [(False, 0), (False, 2), (True, 0)])
def test_checkpoint_repeats_the_dropout(emulate, use_reentrant, as_cuda, index):
    device = emulate(3, as_cuda=as_cuda)[index]
    get_rng_state = torch.get_device_module(device).get_rng_state
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 2))
    module.to(device, torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64, device=device)

    def gradients(forward):
        torch.manual_seed(7)
        module.zero_grad()
        input = x.clone().requires_grad_()
        output = forward(input)
        F.dropout(output)  # advances the generator
        output.pow(2).sum().backward()
        return [p.grad.tolist() for p in module.parameters()] + [input.grad.tolist()]

    expected = gradients(module)
    assert gradients(lambda x: checkpoint(module, x, use_reentrant=use_reentrant)) == expected
    state = get_rng_state(device)
    without = gradients(
        lambda x: checkpoint(module, x, use_reentrant=use_reentrant, preserve_rng_state=False)
    )
    assert without != expected  # so the comparison above can fail
    assert not torch.equal(state, get_rng_state(device))


# Attention.

N, H, T, S, E = 2, 4, 6, 5, 8
_some_masked = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
_whole_row_masked = torch.ones(N, 1, T, S, dtype=torch.bool).index_fill_(2, torch.tensor([2]), 0)


def _normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


_qkv = _normal(N, H, T, E), _normal(N, H, S, E), _normal(N, H, S, E) + 1
_grouped = _qkv[0], _qkv[1][:, :2], _qkv[2][:, :2]

ATTENTION: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": (_qkv, {}),
    "scaled": (_qkv, {"scale": 0.3}),
    "causal": ((_qkv[1], _qkv[1] + 1, _qkv[2]), {"is_causal": True}),
    "causal, more queries": (_qkv, {"is_causal": True}),
    "causal, more keys": ((_qkv[1], _qkv[0], _qkv[0]), {"is_causal": True}),
    "key padding": (_qkv, {"attn_mask": _some_masked.view(N, 1, 1, S)}),
    "a row all masked": (_qkv, {"attn_mask": _whole_row_masked}),
    "2-dim mask": (_qkv, {"attn_mask": torch.ones(T, S).tril().bool()}),
    "float mask": (_qkv, {"attn_mask": _normal(N, H, T, S)}),
    "3-dim float mask": (_qkv, {"attn_mask": _normal(H, T, S)}),
    "float mask with -inf": (
        _qkv,
        {"attn_mask": torch.zeros(T, S).double().masked_fill(torch.ones(T, S).triu(1) > 0, -1e400)},
    ),
    "a mask that learns": (_qkv, {"attn_mask": _normal(T, S).requires_grad_()}),
    "grouped queries": (_grouped, {"enable_gqa": True}),
    "grouped queries, masked": (
        _grouped,
        {"enable_gqa": True, "attn_mask": _some_masked.view(N, 1, 1, S)},
    ),
    "one group": (_qkv, {"enable_gqa": True}),
    "one query": ((_qkv[0][:, :, :1], *_qkv[1:]), {}),
    "sequence first": (tuple(_normal(T, N, H, E).permute(1, 2, 0, 3) + i for i in range(3)), {}),
    "heads last": (tuple(_normal(N, T, H, E).transpose(1, 2) + i for i in range(3)), {}),
    "cut from one tensor": (_normal(N, T, H, 3 * E).transpose(1, 2).split(E, -1), {}),
    "expanded query": ((_qkv[0][:1].expand(N, H, T, E), *_qkv[1:]), {}),
    # Arguments that the fused kernels do not support.
    "batch to broadcast": ((_qkv[0], _qkv[1][:1], _qkv[2][:1]), {}),
    "heads to broadcast": ((_qkv[0], _qkv[1][:, :1], _qkv[2][:, :1]), {}),
    "values of another size": ((*_qkv[:2], _normal(N, H, S, 3)), {}),
    "transposed values": ((*_qkv[:2], _normal(N, H, E, S).transpose(2, 3)), {}),
    "three dimensions": (tuple(t[0] for t in _qkv), {}),
    "no keys": (tuple(t[:, :, : T * (i == 0)] for i, t in enumerate(_qkv)), {}),
}


def _on(device: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in options.items()
    }


def _to_leaf(tensor: Tensor, device: Any) -> Tensor:
    """Copy a tensor to the device as a leaf, with its strides."""
    base = tensor if tensor._base is None else tensor._base
    copy = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device=device)
    view = copy.copy_(base).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return view.detach().requires_grad_()


def _attend(qkv: tuple[Tensor, ...], options: dict[str, Any], device: Any) -> list[Tensor]:
    leaves = [_to_leaf(t, device) for t in qkv]
    options = _on(device, options)
    learned = [o for o in options.values() if isinstance(o, Tensor) and o.requires_grad]
    output = F.scaled_dot_product_attention(*leaves, **options)
    weight = _normal(*output.shape).to(device)
    gradients = torch.autograd.grad((output * weight).sum(), leaves + learned)
    with torch.inference_mode():
        inferred = F.scaled_dot_product_attention(*leaves, **options)
    return [t.detach().cpu() for t in (output, inferred, *gradients)]


# With dropout, kernels of the emulation run; a dropout that drops nothing has exact results.
@pytest.mark.parametrize("dropout_p", [0.0, 1e-12])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_that_of_the_math_kernel(devices, name, dropout_p):
    qkv, options = ATTENTION[name]
    actual = _attend(qkv, options | {"dropout_p": dropout_p}, devices[0])
    with sdpa_kernel(SDPBackend.MATH):
        expected = _attend(qkv, options, "cpu")
    torch.testing.assert_close(actual, expected, check_stride=False, **exact)
    assert not any(t.isnan().any() for t in actual)


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_of_attention_with_dropout(devices, name):
    qkv, options = ATTENTION[name]
    options = _on(devices[0], options)

    def attend(*qkv: Tensor):
        torch.manual_seed(11)
        return F.scaled_dot_product_attention(*qkv, **options, dropout_p=0.4)

    leaves = [t.to(devices[0], copy=True).requires_grad_() for t in qkv]
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("symbolic", [False, True])
def test_attention_keeps_layouts(symbolic, dropout_p, emulate):
    def strides(device):
        q = torch.zeros(T, N, H, E, device=device, requires_grad=True).permute(1, 2, 0, 3)
        k = torch.zeros(N, S, H, E, device=device, requires_grad=True).transpose(1, 2)
        v = torch.zeros(N, H, S, E, device=device, requires_grad=True) * 1
        output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
        gradients = torch.autograd.grad(output.sum(), [q, k, v])
        for result, like in zip((output, *gradients), (q, q, k, v), strict=True):
            assert result.stride() == like.stride()
        return [result.stride() for result in gradients]

    devices = emulate(1, symbolic=symbolic)
    assert len(set(strides(devices[0]))) == 3


def _padding(length: int, device: torch.device) -> Tensor:
    return (torch.arange(length, device=device) < length - 3).view(1, 1, 1, length)


LONG: dict[str, Callable[[int, torch.device], dict[str, Any]]] = {
    "plain": lambda length, device: {},
    "causal": lambda length, device: {"is_causal": True},
    "bool mask": lambda length, device: {"attn_mask": _padding(length, device)},
    "float mask": lambda length, device: {"attn_mask": _padding(length, device).float().log()},
    "grouped queries": lambda length, device: {"enable_gqa": True},
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("symbolic", [False, True])
def test_memory_of_attention_is_linear(symbolic, name, dropout_p, emulate):
    def peak_of(length, device):
        options = LONG[name](length, device)
        num_kv_heads = 1 if "enable_gqa" in options else 2
        q = torch.zeros(1, 2, length, 4, device=device, requires_grad=True)
        k, v = torch.zeros(2, 1, num_kv_heads, length, 4, device=device).requires_grad_()

        def attend():
            F.scaled_dot_product_attention(q, k, v, **options, dropout_p=dropout_p).sum().backward()

        return peak_growth(device, attend)

    [device] = emulate(1, symbolic=symbolic)
    short, long = (peak_of(length, device) for length in (256, 512))
    one_matrix_bytes = 512 * 512 * 4
    assert long < one_matrix_bytes / 2
    constant_bytes = 16 * 512  # small tensors, rounded up
    assert long <= 2 * short + constant_bytes


# Other operators with a kernel of their own.


@pytest.mark.parametrize("lengths", ["tuple", "cpu", "device"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_ctc_loss_takes_any_lengths(devices, lengths, mode):
    def loss(d):
        logits, targets = _normal(10, 2, 5).log_softmax(2), torch.tensor([[1, 2], [3, 4]])
        made = {"tuple": tuple, "cpu": torch.tensor, "device": partial(torch.tensor, device=d)}
        with mode():
            return F.ctc_loss(logits.to(d), targets.to(d), *map(made[lengths], ([10, 9], [2, 1])))

    assert_same_outcome(loss, devices[0])


def test_quantization_aware_training(devices):
    """A fused kernel resizes the buffers of observers: their wrappers kept the old shape."""
    quantize = pytest.importorskip("torch.ao.quantization")

    def observed(device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated
            observer = quantize.get_default_qat_qconfig("fbgemm").weight().to(device)
        observer(torch.randn(4, 2).to(device))
        return dict(observer.state_dict())

    assert_same_outcome(observed, devices[0])


def test_compiling(devices, caplog, recwarn):
    """Dynamo traced what emulated tensors do, and complained of it in dozens of lines."""
    module = nn.Sequential(nn.Linear(2, 2), nn.GELU()).to(devices[0])
    x = torch.ones(3, 2, device=devices[0])
    for backend in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(module, backend=backend)(x), module(x))
    assert caplog.records == [] and list(recwarn) == []
