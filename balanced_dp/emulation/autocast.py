"""Support for ``torch.autocast`` on emulated devices, with CUDA's lists of operators to cast.

Emulated devices have the device type "lazy". ``torch.autocast`` refuses device types that have no
dispatch key for autocast, and "lazy" has none. But a tensor can carry the autocast key of another
device type. So emulated tensors carry the autocast key of PrivateUse1 (the device type
"privateuseone"), and this file registers kernels for this key. The kernels cast the arguments of an
operator before autograd sees the operator, as torch's own autocast kernels do.

While an ``emulate_devices`` context is open, torch's functions for the autocast state of "lazy" use
the state of "privateuseone". If the emulated devices are named "cuda", torch's functions for the
autocast state of "cuda" use the state of "privateuseone", too. So code that reads the autocast
state, such as activation checkpointing, works unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKeySet
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from .machine import DEVICE_TYPE, Patches
from .tensor import AUTOCAST_KEY, EmulatedTensor

# Source: AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_PROMOTE of
# aten/src/ATen/autocast_mode.h, torch 2.13. All other operators that torch casts on CUDA run in
# float32 here. On CUDA, autocast treats two of these operators differently: it does not cast the
# input of norm, but passes dtype=torch.float32, and it raises an error for binary_cross_entropy.
_LOWER_PRECISION = """_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear
    addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention"""
_FLOAT32_RESULT = """prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm
    sum"""
_WIDEST = """addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot
    scatter_add"""

_STATE = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
"""The names of torch's functions that read and set the state of autocast."""

# A cache: for each weight that was cast to the autocast dtype, the cast copy. As in torch, all
# threads share this cache.
_cast_weights = WeakTensorKeyDictionary()


def patches_of_autocast(device_type: str) -> Patches:
    """Return patches that extend torch's autocast functions to emulated devices.

    If ``torch.is_autocast_enabled`` or ``torch.set_autocast_enabled`` is called without a device
    type, it uses the device type "cuda", as in torch.

    Args:
        device_type: the device type that the emulated devices report, "lazy" or "cuda".
    """
    emulated = {DEVICE_TYPE, device_type}

    def translated(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(device_type: str | bool = "cuda", *args: Any, **others: Any) -> Any:
            if isinstance(device_type, bool):  # older scripts call set_autocast_enabled(True)
                device_type, args = "cuda", (device_type, *args)
            if device_type in emulated:
                device_type = "privateuseone"
            return function(device_type, *args, **others)

        return call

    clear_cache = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _cast_weights.clear()
        clear_cache()

    state: dict[str, Any] = {name: translated(getattr(torch, name)) for name in _STATE}
    return {
        torch._C: {"_is_autocast_available": translated(torch._C._is_autocast_available)},
        torch: {"clear_autocast_cache": clear_autocast_cache, **state},
    }


@functools.cache
def register_casts() -> list[torch.library.Library]:
    """Register the autocast kernels of emulated tensors, unless this was done before.

    Each call returns the libraries that hold the kernels. Torch would remove the kernels if these
    libraries were deallocated, but the cache of this function keeps them.
    """
    library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, AUTOCAST_KEY.name)
    casts = (
        dict.fromkeys(_LOWER_PRECISION.split(), _to_lower_precision)
        | dict.fromkeys(_FLOAT32_RESULT.split(), _to_float32_result)
        | dict.fromkeys(_WIDEST.split(), _to_widest)
    )
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        namespace, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten":
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            kernel = functools.partial(_call, operator, casts.get(packet, _to_float32))
            library.impl(operator, kernel, AUTOCAST_KEY.name)
    return [library, others]


def _call(operator: Any, cast: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(AUTOCAST_KEY)):
        args, kwargs = cast(operator, args, kwargs)
        return operator(*args, **kwargs)


def _to_lower_precision(operator: Any, args: Any, kwargs: Any) -> Any:
    return tree_map_only(EmulatedTensor, _to_autocast_dtype, (args, kwargs))


def _to_float32(operator: Any, args: Any, kwargs: Any) -> Any:
    return tree_map_only(EmulatedTensor, lambda t: _cast(t, torch.float32), (args, kwargs))


def _to_float32_result(operator: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dtype" in names and given.get("dtype") is None and _is_eligible(args[0]):
        return (), {**given, "dtype": torch.float32}
    return args, kwargs


def _to_widest(operator: Any, args: Any, kwargs: Any) -> Any:
    dtypes = {t.dtype for t in tree_leaves((args, kwargs)) if _is_eligible(t)}
    if torch.float32 not in dtypes or len(dtypes) < 2:
        return args, kwargs
    return _to_float32(operator, args, kwargs)


def _is_eligible(tensor: Any) -> bool:
    is_floating = isinstance(tensor, EmulatedTensor) and tensor.is_floating_point()
    return is_floating and tensor.dtype != torch.float64


def _cast(tensor: EmulatedTensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if _is_eligible(tensor) else tensor


def _to_autocast_dtype(tensor: EmulatedTensor) -> torch.Tensor:
    """Return ``tensor`` cast to the autocast dtype, or unchanged if autocast does not cast it.

    As in torch, a weight (a float32 leaf tensor that requires a gradient and is not a view) is cast
    only once in an autocast context, and its cast copy is kept for later calls. While gradients or
    autocast's cache are disabled, weights are cast in each call.
    """
    dtype = torch.get_autocast_dtype(DEVICE_TYPE)
    is_weight = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
    uses_cache = torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
    if not (is_weight and uses_cache and tensor.dtype == torch.float32):
        return _cast(tensor, dtype)
    cached: torch.Tensor | None = _cast_weights.get(tensor)
    if cached is None or cached.dtype != dtype:
        cached = _cast_weights[tensor] = tensor.to(dtype)
    return cached
