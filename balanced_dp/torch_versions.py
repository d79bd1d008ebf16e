"""Differences between versions of torch, and the private names of torch that are used.

Where torch lacks one, ``import balanced_dp`` or ``emulate_devices`` raises an error that names it.
docs/versions.md lists the versions that were tested.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

TESTED = ("2.5.1", "2.15.0")
"""The oldest and the newest version that the tests have passed on."""

NEEDED = """
    nn.Module._parameters nn.Module._buffers nn.Module._modules nn.Module._compiled_call_impl
    nn.Module._forward_pre_hooks nn.Module._forward_hooks nn.Module._backward_pre_hooks
    nn.Module._backward_hooks nn.Module._replicate_for_data_parallel nn.Module._save_to_state_dict
    nn.Module._load_from_state_dict nn.modules.batchnorm._BatchNorm Tensor._backward_hooks
    Tensor._post_accumulate_grad_hooks Tensor._version UntypedStorage._cdata
    _utils._flatten_dense_tensors _utils._unflatten_dense_tensors _foreach_copy_ _disable_dynamo
    utils._pytree.tree_leaves utils._pytree.tree_map_only
    jit._builtins._register_builtin _C._nn.cross_entropy_loss _C._nn.nll_loss_nd
    _C._functorch.peek_interpreter_stack _C._functions.SumBackward0._input_metadata
    _C._disabled_torch_function_impl _C._get_accelerator _C._FunctionBase._set_sequence_nr
"""
"""Without one of these, ``import balanced_dp`` raises an ImportError that names it."""

FOR_EMULATION = """
    Tensor._is_view Tensor._make_wrapper_subclass nn.Module._apply autograd._engine_run_backward
    _register_device_module random._seed_custom_device serialization._package_registry
    optim.optimizer._foreach_supported_types jit._builtins._get_builtin_table
    optim.optimizer._get_foreach_kernels_supported_devices
    optim.optimizer._get_fused_kernels_supported_devices utils._mode_utils.no_dispatch
    nn.parallel._functions._get_stream overrides._get_current_function_mode_stack
    utils._device._device_constructors cuda._exchange_device cuda._maybe_exchange_device
    cuda._cudart cuda._cached_device_count _C._nn._parse_to _C._jit_get_schemas_for_operator
    distributed.distributed_c10d._NCCL_AVAILABLE profiler.profiler._KinetoProfile
    _C._current_autograd_node _C._current_graph_task_id _C._dispatch_has_kernel_for_dispatch_key
    _C._is_autocast_available _C._ExcludeDispatchKeyGuard _C.DispatchKeySet
    _C.DispatchKey.AutocastPrivateUse1 _C.DispatchKey.CompositeImplicitAutograd
    ops.aten._conj.default._schema ops.aten._neg_view ops.aten._to_copy
    ops.aten._scaled_dot_product_attention_math _C._storage_Use_Count ops.aten._efficientzerotensor
    _C._dispatch_get_registrations_for_dispatch_key
"""
"""Without one of these, ``emulate_devices`` raises an EmulationError that names it."""

AWAITS_PRODUCERS = torch.__version__ >= "2.8"
"""Whether the user of a gradient waits for the node that sends it from another device.

Before, autograd assumes that the gradient was computed on the default stream of its device, which
is the current one in the threads of autograd.

Source: ``InputBuffer::add`` in torch/csrc/autograd/input_buffer.cpp.
"""


def exists(name: str) -> bool:
    """Return whether torch has a dotted name, or a class of it declares such an attribute."""
    path, _, last = f"torch.{name}".rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return hasattr(owner, last) or last in getattr(owner, "__annotations__", {})


def require(names: str, what: str, error: type[Exception]) -> None:
    """Check that torch has all names of a list separated by blanks.

    Raises:
        error: it lacks some.
    """
    missing = [f"torch.{name}" for name in names.split() if not exists(name)]
    if missing:
        raise error(
            f"{what} cannot be used with torch {torch.__version__}, which does not have "
            f"{', '.join(missing)}; install a torch from {TESTED[0]} to {TESTED[1]}"
        )


require(NEEDED, "balanced_dp", ImportError)


def run_at_once(node: Any) -> None:
    """Let a node run as early as possible in backward.

    Autograd runs nodes in the order of their sequence numbers, highest first. Only nodes that
    accumulate gradients have a higher one.
    """
    node._set_sequence_nr(2**64 - 2)
