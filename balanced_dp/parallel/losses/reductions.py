"""Notice means and sums over samples where torch computes them.

While replicas run, the functions of torch that reduce are replaced by ones that do the same and
record the result. Python looks them up at each call, so it makes no difference how they are
reached: as a method, through ``torch.nn.functional``, or from a module of torch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from .trace import Trace, current_trace

MEAN, SUM = 1, 2
"""The reductions, as in ``torch.nn._reduction.get_enum``."""

_CROSS_ENTROPIES = ("cross_entropy_loss", "nll_loss_nd")

_LOSSES = {
    torch._C._nn: {
        "binary_cross_entropy": 3,
        "huber_loss": 2,
        "l1_loss": 2,
        "mse_loss": 2,
        "multi_margin_loss": 5,
        "multilabel_margin_loss": 2,
        "smooth_l1_loss": 2,
        "soft_margin_loss": 2,
    },
    torch: {
        "binary_cross_entropy_with_logits": 4,
        "cosine_embedding_loss": 4,
        "ctc_loss": 5,
        "hinge_embedding_loss": 3,
        "kl_div": 2,
        "margin_ranking_loss": 4,
        "poisson_nll_loss": 5,
        "triplet_margin_loss": 7,
    },
}
"""Loss functions by their names, and the positions of their argument ``reduction``."""

_REDUCTIONS = {
    **dict.fromkeys(("sum", "count_nonzero", "dot", "matmul"), "sum"),
    "mean": "mean",
    **dict.fromkeys(("max", "amax"), "amax"),
    **dict.fromkeys(("min", "amin"), "amin"),
    **{name: name for name in ("std", "var", "median", "nanmedian", "quantile", "nanquantile")},
    **{name: name for name in ("kthvalue", "topk", "sort", "argsort")},
}
"""Functions and methods, and how their results for chunks are joined; the last ten are not."""

_SECOND_ARGUMENTS = ("quantile", "nanquantile", "kthvalue", "topk")
"""Functions that have another argument between the tensor and the dimension."""

_HISTOGRAMS = ("bincount", "histc")

_count_nonzero, _sum = torch.count_nonzero, torch.sum
"""What counts targets is not recorded."""

_lock = threading.Lock()
_num_users = 0


@contextlib.contextmanager
def noticing() -> Iterator[None]:
    """Context manager in which reductions are recorded in the current trace.

    Methods of ``Tensor`` are replaced when it is entered for the first time and stay so: whenever a
    method of a class changes, Python forgets what it has cached about the class, which took 2 % of
    a small forward pass.
    """
    global _num_users
    with _lock:
        modules = _install()
        if not _num_users:
            for module, (_, versions) in modules.items():
                vars(module).update(versions)
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if not _num_users:
                for module, (functions, _) in modules.items():
                    vars(module).update(functions)


@functools.cache
def _install() -> dict[ModuleType, tuple[dict[str, Any], dict[str, Any]]]:
    """Replace methods of ``Tensor``; return functions of modules, and versions that record."""
    records: list[tuple[Any, str, Callable[..., Any]]] = []
    for owner in (torch, torch.Tensor):
        for name, join in _REDUCTIONS.items():
            records.append((owner, name, functools.partial(_reduced, join)))
        records += [(owner, name, _histogram) for name in _HISTOGRAMS]
    records.append((torch, "unique", _unique))
    records.append((torch.Tensor, "__matmul__", functools.partial(_reduced, "sum")))
    for module, losses in _LOSSES.items():
        for name, position in losses.items():
            records.append((module, name, functools.partial(_loss, position)))
    records += [(torch._C._nn, name, _cross_entropy) for name in _CROSS_ENTROPIES]
    modules: dict[Any, Any] = {torch: ({}, {}), torch._C._nn: ({}, {})}
    for owner, name, record in records:
        function = getattr(owner, name)
        version = _recording_version(function, record)
        if owner is torch.Tensor:
            version.__module__, version.__qualname__ = "torch", f"Tensor.{name}"  # for pickle
            setattr(owner, name, version)
        else:
            functions, versions = modules[owner]
            functions[name], versions[name] = function, version
    return modules


def _recording_version(
    function: Callable[..., Any], record: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that lets ``record`` call ``function``, while a replica is traced."""

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or (trace := current_trace.get()) is None
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return function(*args, **kwargs)
        return record(trace, function, *args, **kwargs)

    return call


def _reduced(join: str, trace: Trace, function: Any, *args: Any, **kwargs: Any) -> Any:
    value = function(*args, **kwargs)
    reduced = args[0] if args else kwargs["input"]
    is_pair = not isinstance(value, torch.Tensor)  # max(dim) returns indices, too
    name = function.__name__ if is_pair else join
    is_length = name not in ("mean", "sum") and not reduced.is_floating_point()
    if not reduced.dim() or is_length:  # the largest length decides on shapes
        return value
    dims = args[2:3] if join in _SECOND_ARGUMENTS else args[1:2]
    if (is_pair or value.dim()) and not _reduces_batch_dim(trace, reduced, *dims, **kwargs):
        return value
    for part in value if is_pair else (value,):
        trace.record(function, part, reduced, name)
    return value


def _reduces_batch_dim(
    trace: Trace, reduced: torch.Tensor, dim: Any = None, axis: Any = -1, **_: Any
) -> bool:
    """Return whether a reduction of some dimensions includes the first or the batch dimension."""
    dims = axis if dim is None else dim
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, tuple | list):
        return False  # a matrix product
    num_dims = reduced.dim()
    return any(dim % num_dims in (0, trace.dim % num_dims) for dim in dims)


def _histogram(trace: Trace, function: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return trace.record(function, function(input, *args, **kwargs), input, "sum")


def _unique(trace: Trace, function: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = function(input, *args, **kwargs)
    values = found[0] if isinstance(found, tuple) else found
    trace.record(function, values, input, "unique")
    if kwargs.get("return_counts", args[2:3] == (True,)):  # samples are weighted by these
        trace.record(function, found[-1], input, "unique", is_lost=True)
    return found


def _loss(position: int, trace: Trace, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    value: torch.Tensor = function(*args, **kwargs)
    reduction = args[position] if len(args) > position else kwargs.get("reduction", MEAN)
    if value.dim() or reduction not in (MEAN, SUM):
        return value
    count = None
    if function.__name__ == "ctc_loss":  # a mean over samples, whatever the length of the longest
        count = args[0].shape[1] if args[0].dim() > 2 else 1
    return trace.record(function, value, args[0], "mean" if reduction == MEAN else "sum", count)


def _cross_entropy(
    trace: Trace,
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute a cross entropy, and count the targets that are not ignored.

    Autograd saves the same tensors as without counting, since activation checkpointing computes a
    loss again, without counting, and compares them.
    """
    smoothing = (label_smoothing,) if label_smoothing else ()
    num_classes = input.shape[min(1, input.dim() - 1)]

    def record(value: torch.Tensor, name: str, count: torch.Tensor | None = None) -> torch.Tensor:
        return trace.record(function, value, target, name, count, num_classes)

    def loss_of(reduction: int) -> torch.Tensor:
        return function(input, target, weight, reduction, ignore_index, *smoothing)

    if reduction == SUM:
        return record(loss_of(SUM), "sum")
    if reduction != MEAN:
        return loss_of(reduction)
    if target.is_floating_point():  # probabilities of classes: all count
        return record(loss_of(MEAN), "mean")
    is_counted = target != ignore_index
    if weight is None:
        return record(loss_of(MEAN), "mean", _count_nonzero(is_counted))
    weights = weight.detach()[target.where(is_counted, 0).long()] * is_counted
    count = _sum(weights)
    if smoothing:  # then targets of weight 0 have a loss, too
        total = record(count, "sum")
        return record(loss_of(SUM), "sum") / total
    loss = record(loss_of(MEAN), "mean", count)
    if loss.grad_fn is not None:
        loss.grad_fn.register_hook(functools.partial(_without_nan, count))
    return loss


def _without_nan(count: torch.Tensor, grad_inputs: Any, grad_outputs: Any) -> Any:
    """Replace the gradients of a mean over ``count``, 0 / 0 if nothing counts, by 0."""
    first, *rest = grad_inputs
    return (None if first is None else first.masked_fill(count == 0, 0), *rest)
