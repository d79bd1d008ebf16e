"""Modules of many kinds with inputs, for tests that results equal those of a single device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Case:
    """A module, and how to make its inputs.

    Attributes:
        make_module: returns the module.
        make_inputs: returns positional and keyword arguments for a batch of the given size.
        options: keyword arguments of ``BalancedDataParallel`` for this module.
    """

    make_module: Callable[[], nn.Module]
    make_inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


class Lambda(nn.Module):
    """A module that is created in one expression, from its forward function and its members."""

    def __init__(self, forward: Callable[..., Any], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def assert_same_gradients(module: nn.Module, reference: nn.Module) -> None:
    """Assert that the gradients of two modules in float64 are equal up to rounding.

    A gradient must be None exactly where that of ``reference`` is None.
    """
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            pair = [gradient.cpu().to_dense() for gradient in (ours.grad, theirs.grad)]
            torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)


class KeywordOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, *, x: Tensor, scale: float = 1.0, flags: tuple[str, ...] = ()) -> Tensor:
        return self.layer(x) * scale + len(flags)


class Weights(nn.Module):
    """A module with parameters in a ParameterList, in a ParameterDict and as attributes.

    One of the parameters is complex, and one is None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(4))})
        self.unused = nn.Parameter(torch.randn(2))
        self.missing = nn.Parameter(torch.randn(4))
        self.register_parameter("missing", None)
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        total = sum(self.many) + self.named["a"] + torch.view_as_real(self.complex).sum(-1)
        return (x * total).tanh()


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Record:
    logits: Tensor
    note: str
    hidden: list[Tensor]
    nothing: None = None


def tied() -> nn.Module:
    module = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    module[1].weight = module[0].weight
    return module


def conv() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    with torch.no_grad():
        module[1].running_mean.uniform_(-1, 1)
        module[1].running_var.uniform_(1, 2)
    return module.eval()


def tensors(*shapes: tuple[int, ...]) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda n: (tuple(torch.randn(n, *shape) for shape in shapes), {})


def indices(*shape: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda n: ((torch.randint(0, 7, (n, *shape)),), {})


def linear() -> nn.Linear:
    return nn.Linear(4, 3)


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), tensors((4,))),
    "conv with BatchNorm in eval mode": Case(conv, tensors((2, 5, 5))),
    "lstm": Case(
        lambda: Lambda(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 3, 2, batch_first=True)),
        tensors((5, 4)),
    ),
    "lstm with its states, dim=1": Case(
        lambda: nn.LSTM(4, 3, 2), lambda n: ((torch.randn(5, n, 4),), {}), {"dim": 1}
    ),
    "transformer encoder with a padding mask": Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda n: (
            (torch.randn(n, 5, 8),),
            {"src_key_padding_mask": torch.arange(5).expand(n, 5) >= 3},
        ),
    ),
    "tied weights": Case(tied, indices(6)),
    "sparse embedding": Case(lambda: nn.Embedding(7, 4, sparse=True), indices(3)),
    "ParameterList, ParameterDict, complex and unused": Case(Weights, tensors((4,))),
    "dict outputs": Case(
        lambda: Lambda(lambda m, x: OrderedDict(a=m.a(x), b={"c": (x, [x * 2])}), a=linear()),
        tensors((4,)),
    ),
    "dataclass and named tuple outputs": Case(
        lambda: Lambda(
            lambda m, x: (Record(m.a(x), "same", [x]), Pair(x, m.a(x)), None, 3), a=linear()
        ),
        tensors((4,)),
    ),
    "several inputs": Case(lambda: nn.Bilinear(4, 5, 3), tensors((4,), (5,))),
    "keyword-only": Case(
        KeywordOnly, lambda n: ((), {"x": torch.randn(n, 4), "scale": 2.0, "flags": ("a", "b")})
    ),
    "nested inputs": Case(
        lambda: Lambda(lambda m, x, k: m.a(x[0]) + m.a(k["b"].first) + k["c"], a=linear()),
        lambda n: (
            ([torch.randn(n, 4), None],),
            {"k": {"b": Pair(torch.randn(n, 4), torch.randn(n)), "c": torch.tensor(0.5)}},
        ),
    ),
    "broadcast input": Case(
        lambda: Lambda(lambda m, mask, x: m.a(x) * mask, a=linear()),
        lambda n: ((torch.randn(3), torch.randn(n, 4)), {}),
        {"broadcast": ("args.0",)},
    ),
    "frozen layers": Case(
        lambda: nn.Sequential(linear().requires_grad_(False), nn.Tanh(), nn.Linear(3, 2)),
        tensors((4,)),
    ),
    "dim=-1": Case(
        lambda: Lambda(lambda m, x: m.a(x.T).T, a=linear()),
        lambda n: ((torch.randn(4, n),), {}),
        {"dim": -1},
    ),
    "summed scalar loss": Case(
        lambda: Lambda(lambda m, x, y: (m.a(x) - y).square().sum(), a=linear()),
        tensors((4,), (3,)),
        {"scalar_outputs": "sum"},
    ),
    "scalar loss, dim=1": Case(
        lambda: Lambda(lambda m, x: m.a(x.T).square().mean(), a=linear()),
        lambda n: ((torch.randn(4, n),), {}),
        {"dim": 1},
    ),
    "weight norm": Case(lambda: nn.utils.parametrizations.weight_norm(linear()), tensors((4,))),
}


def short_of_memory_in_backward(devices):
    """Return a model whose backward pass needs twice the memory of forward, and its optimizer."""
    layers = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(inplace=True))
    net = Lambda(lambda self, x: self.layers(x).sum(1), layers=layers).to(devices[0])
    return net, torch.optim.SGD(net.parameters(), lr=0.1)
