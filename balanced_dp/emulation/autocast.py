"""Autocast on emulated devices, with CUDA's lists of operators.

``torch.autocast`` knows device types by name and "lazy" is none of them. But its dispatch keys work
for any tensor that has one: emulated tensors have that of PrivateUse1, and this file registers its
kernels, which cast the arguments above autograd, as torch's do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DispatchKeySet
from torch.utils._pytree import tree_map_only

from ..errors import ArgumentError
from .tensor import AUTOCAST_KEY, EmulatedTensor

# Source: AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and
# AT_FORALL_PROMOTE of aten/src/ATen/autocast_mode.h, torch 2.13.
_LOWER_PRECISION = """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    scaled_dot_product_attention"""
_FLOAT32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow
    softplus layer_norm native_layer_norm group_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss_nd nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp"""
_FLOAT32_RESULT = "prod softmax log_softmax cumprod cumsum sum"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put scatter_add"


@dataclass
class _State:
    """An open context: the dtype, and the weights that were cast already."""

    dtype: torch.dtype
    casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = field(default_factory=dict)


_state: ContextVar[_State | None] = ContextVar("autocast", default=None)


@contextmanager
def autocast(dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> Iterator[None]:
    """Runs operators on emulated devices in ``dtype`` where ``torch.autocast("cuda")`` would.

    Args:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        enabled: False leaves everything in the dtype it has, inside of another such context too.

    Raises:
        ArgumentError: autocast has no such dtype.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ArgumentError(f"autocast has torch.bfloat16 and torch.float16, got {dtype}")
    _register_kernels()
    state = _State(dtype) if enabled else None
    token = _state.set(state)
    try:
        with in_this_thread():
            yield
    finally:
        _state.reset(token)
        if state is not None:
            state.casts.clear()


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Gives this thread the autocast of its context variables: torch keeps a switch a thread."""
    before = torch.is_autocast_enabled("privateuseone")
    torch.set_autocast_enabled("privateuseone", _state.get() is not None)
    try:
        yield
    finally:
        torch.set_autocast_enabled("privateuseone", before)


@functools.cache
def _register_kernels() -> list[torch.library.Library]:
    """Registers a kernel for each operator of the lists; the libraries are to be kept."""
    library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, AUTOCAST_KEY.name)
    for names, cast in (
        (_LOWER_PRECISION, _to_lower_precision),
        (_FLOAT32, _to_float32),
        (_FLOAT32_RESULT, _to_float32_result),
        (_WIDEST, _to_widest),
    ):
        for packet in (getattr(torch.ops.aten, name) for name in names.split()):
            for overload in packet.overloads():
                operator = getattr(packet, overload)
                if not any(argument.is_out for argument in operator._schema.arguments):
                    kernel = functools.partial(_call, operator, cast)
                    library.impl(operator, kernel, AUTOCAST_KEY.name)
    return [library, others]


def _call(
    operator: torch._ops.OpOverload, cast: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(AUTOCAST_KEY)):
        args, kwargs = cast(operator, args, kwargs)
        return operator(*args, **kwargs)


def _to_lower_precision(operator: Any, args: Any, kwargs: Any) -> Any:
    return tree_map_only(EmulatedTensor, _lowered, (args, kwargs))


def _to_float32(operator: Any, args: Any, kwargs: Any) -> Any:
    return tree_map_only(EmulatedTensor, lambda t: _cast(t, torch.float32), (args, kwargs))


def _to_float32_result(operator: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dtype" in names and given.get("dtype") is None and _is_eligible(args[0]):
        return (), {**given, "dtype": torch.float32}
    return args, kwargs


def _to_widest(operator: Any, args: Any, kwargs: Any) -> Any:
    tensors: list[EmulatedTensor] = []
    tree_map_only(EmulatedTensor, tensors.append, (args, kwargs))
    dtypes = {t.dtype for t in tensors if _is_eligible(t)}
    if torch.float32 not in dtypes or len(dtypes) < 2:
        return args, kwargs
    return _to_float32(operator, args, kwargs)


def _is_eligible(tensor: Any) -> bool:
    return (
        isinstance(tensor, EmulatedTensor)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    )


def _cast(tensor: EmulatedTensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if _is_eligible(tensor) else tensor


def _lowered(tensor: EmulatedTensor) -> torch.Tensor:
    """Returns the tensor in lower precision; a weight is cast once in a context, as torch does."""
    state = _state.get()
    assert state is not None
    is_weight = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    if not (is_weight and tensor.dtype == torch.float32 and torch.is_autocast_cache_enabled()):
        return _cast(tensor, state.dtype)
    known = state.casts.get(id(tensor))
    if known is None or known[0]() is not tensor:
        known = state.casts[id(tensor)] = (weakref.ref(tensor), tensor.to(state.dtype))
    return known[1]
