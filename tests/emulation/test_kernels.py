from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from balanced_dp import BalancedDataParallel
from balanced_dp.emulation.ledger import round_up

from ..at_once import at_once
from .models import assert_same_outcome, exact


def peak_growth(device: torch.device, work: Callable[[], Any]) -> int:
    """Call ``work``, and return its peak memory minus the memory allocated before, in bytes."""
    torch.lazy.reset_peak_memory_stats(device)
    before = torch.lazy.memory_allocated(device)
    work()
    return torch.lazy.max_memory_allocated(device) - before


@pytest.mark.parametrize("activation", [F.silu, F.mish])
def test_gradient_of_an_activation_takes_one_kernel(devices, activation):
    """As on CUDA it takes no temporary memory. Torch composes it for other backends."""
    values = torch.linspace(-3, 3, 4096, requires_grad=True)
    activation(values).sum().backward()
    x = values.detach().to(devices[0]).requires_grad_()
    loss = activation(x).sum()
    # The gradient of a sum is one number, expanded.
    assert peak_growth(devices[0], loss.backward) == x.nbytes + 512
    assert x.grad.tolist() == values.grad.tolist()


def strided(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[0], lambda x: x[0, 0], strided])
def test_linear_takes_the_memory_of_its_operators(devices, view, frozen):
    def outcome(linear):
        leaves = [_normal(*n).to(devices[0]) for n in ((8, 90, 40), (80, 40), (80,))]
        x, *weights = (t.requires_grad_(i != frozen).clone() for i, t in enumerate(leaves))
        output = linear(view(x), *weights)
        memory = [torch.lazy.memory_allocated()]
        del x, weights
        last = output.movedim(0, -1).contiguous()
        loss = (last * last.detach()).sum()
        memory += [torch.lazy.memory_allocated(), peak_growth(devices[0], loss.backward)]
        return memory, [loss.item()] + [t.grad.cpu() for t in leaves if t.requires_grad]

    memory, results = outcome(F.linear)
    expected_memory, expected = outcome(torch.ops.aten.linear.default.decompose)
    assert memory == expected_memory
    torch.testing.assert_close(results, expected, **exact)


def test_modes_see_torchs_operators(devices):
    weight = torch.ones(3, 4, device=devices[0], requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        F.linear(torch.ones(2, 4, device=devices[0], requires_grad=True), weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 3 * 4)


def test_peaks_include_gradients_that_were_not_yet_accumulated(devices):
    layer = nn.Linear(16, 16).to(devices[0])
    gradients = sum(round_up(p.nbytes) for p in layer.parameters())
    model = BalancedDataParallel(None, layer, devices[:2])
    for device in devices[:2]:
        peak_growth(device, model(torch.ones(8, 16, 16, device=devices[0])).sum().backward)
        assert devices.memory_breakdown(device).peak["gradient"] == gradients
        layer.zero_grad()


# Random numbers.

DRAWS: dict[str, Callable[[torch.device], Tensor]] = {
    "rand": lambda d: torch.rand(20, device=d),
    "randperm": lambda d: torch.randperm(50, device=d),
    "rand_like": lambda d: torch.rand_like(torch.zeros(20, device=d)),
    "randn_like": lambda d: torch.randn_like(torch.zeros(20, device=d)),
    "randint_like": lambda d: torch.randint_like(torch.zeros(20, device=d), 1000),
    "uniform_": lambda d: torch.zeros(20, device=d).uniform_(),
    "multinomial": lambda d: torch.multinomial(torch.ones(50, device=d), 20),
    "normal": lambda d: torch.normal(torch.zeros(20, device=d), 1.0),
    "dropout": lambda d: F.dropout(torch.ones(50, device=d)),
    "dropout, inferring": lambda d: torch.inference_mode()(F.dropout)(torch.ones(50, device=d)),
    "alpha_dropout": lambda d: F.alpha_dropout(torch.ones(50, device=d), training=True),
    "rrelu": lambda d: F.rrelu(-torch.ones(20, device=d), training=True),
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
    """The mask takes a byte for each element, as on CUDA."""
    x = torch.ones(4096, dtype=torch.float64, device=devices[0], requires_grad=True)
    taken = peak_growth(devices[0], lambda: F.dropout(x, p))
    output = F.dropout(x, p)
    output.sum().backward()
    assert taken == output.nbytes + 4096 or p in (0.0, 1.0)
    assert set(output.tolist()) <= {0.0, 1 / (1 - p) if p < 1 else 0.0}
    assert x.grad.tolist() == output.tolist()
    assert abs((output > 0).double().mean().item() - (1 - p)) < 0.05
    assert F.dropout(x, p, training=False).tolist() == x.tolist()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("as_cuda", "index"), [(False, 0), (False, 2), (True, 0)])
def test_checkpoint_repeats_the_dropout(emulate, use_reentrant, as_cuda, index):
    """The gradient of dropout is the mask, and so is what dropout makes of ones."""
    device = emulate(3, as_cuda=as_cuda)[index]
    x = torch.ones(64, 64, device=device, requires_grad=True)
    for preserves in (True, False):  # without it, so that the comparison can fail
        options = {"use_reentrant": use_reentrant, "preserve_rng_state": preserves}
        output = checkpoint(lambda x: F.dropout(x * 1.0), x, **options)
        F.dropout(output)  # advances the generator
        x.grad = None
        output.sum().backward()
        assert torch.equal(x.grad, output) == preserves


# Attention.

N, H, T, S, E = 2, 4, 6, 5, 8


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def _pads(q: Tensor) -> Tensor:
    padded = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
    return padded.view(N, 1, 1, S).to(q.device)


def _triangle(q: Tensor) -> Tensor:
    return torch.ones(T, S, dtype=torch.bool, device=q.device).tril()


ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "causal": lambda q, k, v: {"query": k + 1, "is_causal": True, "scale": 0.3},
    "causal, more queries": lambda q, k, v: {"is_causal": True},
    "key padding": lambda q, k, v: {"attn_mask": _pads(q)},
    "a row all masked": lambda q, k, v: {"attn_mask": _triangle(q).tril(-1)},
    "float mask with -inf": lambda q, k, v: {"attn_mask": _triangle(q).double().log()},
    "3-dim float mask": lambda q, k, v: {"attn_mask": _normal(H, T, S).to(q.device)},
    "a mask that learns": lambda q, k, v: {"attn_mask": q[0, 0, :, :S]},
    "grouped queries": lambda q, k, v: {"key": k[:, :2], "value": v[:, :2], "enable_gqa": True},
    "heads last": lambda q, k, v: {"query": q.transpose(1, 2).contiguous().transpose(1, 2)},
    "cut from one tensor": lambda q, k, v: dict(
        zip(("query", "key", "value"), torch.cat([q, q * 2, q + 1], -1).split(E, -1), strict=True)
    ),
    "expanded query": lambda q, k, v: {"query": q[:1].expand(N, H, T, E)},
    # Arguments that the fused kernels do not support.
    "batch to broadcast": lambda q, k, v: {"key": k[:1], "value": v[:1]},
    "heads to broadcast": lambda q, k, v: {"key": k[:, :1], "value": v[:, :1]},
    "values of another size": lambda q, k, v: {"value": v[..., :3]},
    "transposed values": lambda q, k, v: {"value": v.mT.contiguous().mT},
    "three dimensions": lambda q, k, v: {"query": q[0], "key": k[0], "value": v[0]},
    "no keys": lambda q, k, v: {"key": k[:, :, :0], "value": v[:, :, :0]},
}


def _leaves(device: Any) -> list[Tensor]:
    return [_normal(N, H, n, E).to(device).requires_grad_() for n in (T, S, S)]


def _attend(name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    arguments = {"query": q, "key": k, "value": v + 1} | ATTENTION[name](q, k, v) | options
    return F.scaled_dot_product_attention(**arguments)


# With dropout, kernels of the emulation run; a dropout that drops nothing has exact results.
@pytest.mark.parametrize("dropout_p", [0.0, 1e-12])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_that_of_the_math_kernel(devices, name, dropout_p):
    def results(device, dropout_p):
        leaves = _leaves(device)
        output = _attend(name, *leaves, dropout_p=dropout_p)
        weight = _normal(*output.shape).to(device)
        gradients = torch.autograd.grad((output * weight).sum(), leaves, materialize_grads=True)
        with torch.inference_mode():
            inferred = _attend(name, *leaves, dropout_p=dropout_p)
        return [t.detach().cpu() for t in (output, inferred, *gradients)]

    actual = results(devices[0], dropout_p)
    with sdpa_kernel(SDPBackend.MATH):
        expected = results("cpu", 0.0)
    torch.testing.assert_close(actual, expected, check_stride=False, **exact)
    assert not any(t.isnan().any() for t in actual)


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_of_attention_with_dropout(devices, name):
    def attend(*qkv: Tensor):
        torch.manual_seed(11)
        return _attend(name, *qkv, dropout_p=0.4)

    assert torch.autograd.gradcheck(attend, _leaves(devices[0]), fast_mode=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_keeps_layouts(device, dropout_p):
    q = torch.zeros(T, N, H, E, device=device, requires_grad=True).permute(1, 2, 0, 3)
    k = torch.zeros(N, S, H, E, device=device, requires_grad=True).transpose(1, 2)
    v = torch.zeros(N, H, S, E, device=device, requires_grad=True) * 1
    output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    gradients = torch.autograd.grad(output.sum(), [q, k, v])
    strides = [tensor.stride() for tensor in (output, *gradients)]
    assert strides == [tensor.stride() for tensor in (q, q, k, v)]


LONG: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "plain": lambda q: {},
    "causal": lambda q: {"is_causal": True},
    "bool mask": lambda q: {"attn_mask": torch.arange(q.shape[2], device=q.device)[None] > 3},
    "float mask": lambda q: {"attn_mask": torch.zeros(1, q.shape[2], device=q.device)},
    "grouped queries": lambda q: {"enable_gqa": True},
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("name", LONG)
def test_memory_of_attention_is_linear(device, name, dropout_p):

    def peak_of(length):
        q = torch.zeros(1, 2, length, 4, device=device, requires_grad=True)
        options = LONG[name](q) | {"dropout_p": dropout_p}
        num_heads = 1 if "enable_gqa" in options else 2
        k, v = torch.zeros(2, 1, num_heads, length, 4, device=device).requires_grad_()
        attend = partial(F.scaled_dot_product_attention, q, k, v, **options)
        return peak_growth(device, lambda: attend().sum().backward())

    short, long = peak_of(256), peak_of(512)
    one_matrix_bytes = 512 * 512 * 4
    assert long < one_matrix_bytes / 2
    constant_bytes = 16 * 512  # small tensors, rounded up
    assert long <= 2 * short + constant_bytes


# Other operators with a kernel of their own.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_one_kernel(devices, kind):
    """With dropout they run step by step, as all did; backward takes no more memory than that."""

    def run(d, **options):
        torch.manual_seed(1)
        # In float32 some CPUs use another kernel, which rounds in another way.
        net = kind(3, 5, 2, bidirectional=True, **options).to(d, torch.double)
        output, states = net(_normal(9, 4, 3).to(d))
        output.square().sum().backward()
        return output, states, [p.grad for p in net.parameters()]

    assert_same_outcome(run, devices[0])
    assert "Fused" in run(devices[0])[0].grad_fn.name()
    assert "Fused" not in run(devices[0], dropout=0.5)[0].grad_fn.name()
    net, x = kind(8, 8, 2).to(devices[0]), torch.zeros(99, 9, 8, device=devices[0])
    one_kernel = peak_growth(devices[0], lambda: net(x)[0].sum().backward())
    net(x)[1][0].mul_(2).sum().backward()  # no kernel keeps the final states
    state = net(x.requires_grad_())[1][0]
    with pytest.raises(RuntimeError, match="differentiate twice"):  # it left out terms
        torch.autograd.grad(state.sum(), x, create_graph=True)[0].sum().backward()
    net.dropout = 1e-9
    assert one_kernel < 1.2 * peak_growth(devices[0], lambda: net(x)[0].sum().backward())


@pytest.mark.parametrize("lengths", ["tuple", "cpu", "device"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_ctc_loss_takes_any_lengths(devices, lengths, mode):
    def loss(d):
        logits, targets = _normal(10, 2, 5).log_softmax(2), torch.tensor([[1, 2], [3, 4]])
        made = {"tuple": tuple, "cpu": torch.tensor, "device": partial(torch.tensor, device=d)}
        with mode():
            return F.ctc_loss(logits.to(d), targets.to(d), *map(made[lengths], ([10, 9], [2, 1])))

    assert_same_outcome(loss, devices[0])


def test_compiling(devices, caplog, recwarn):
    """Dynamo traced what emulated tensors do, and complained of it in dozens of lines."""
    module = nn.Sequential(nn.Linear(2, 2), nn.GELU()).to(devices[0])
    x = torch.ones(3, 2, device=devices[0])
    for backend in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(module, backend=backend)(x), module(x))
    assert caplog.records == [] and list(recwarn) == []
