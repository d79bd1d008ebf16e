"""What differs between versions of torch, and the private names of torch that are used.

A name that a later torch lacks makes one of three differences: ``import balanced_dp`` raises an
error, ``emulate_devices`` does, or something is slower. What takes a name of torch from here need
not ask for it again. docs/versions.md lists the versions that were tested.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

TESTED = ("2.5.1", "2.15.0")
"""The oldest and the newest version that the tests have passed on."""

NEEDED = (
    # What torch.nn.parallel.replicate uses of modules, too, and what else a replica copies.
    *(f"nn.Module.{name}" for name in ("_parameters", "_buffers", "_modules")),
    *(f"nn.Module.{name}" for name in ("_forward_pre_hooks", "_forward_hooks")),
    *(f"nn.Module.{name}" for name in ("_backward_pre_hooks", "_backward_hooks")),
    "nn.Module._replicate_for_data_parallel",
    "nn.Module._compiled_call_impl",
    "nn.modules.batchnorm._BatchNorm",
    # What "auto" has found, in checkpoints.
    "nn.Module._save_to_state_dict",
    "nn.Module._load_from_state_dict",
    # Buckets of parameters and gradients.
    "_utils._flatten_dense_tensors",
    "_utils._unflatten_dense_tensors",
    "Tensor._backward_hooks",
    "Tensor._post_accumulate_grad_hooks",
    "Tensor._version",
    "Tensor._make_wrapper_subclass",
    "_C._disabled_torch_function_impl",
    "UntypedStorage._cdata",
    # How losses are computed: cross entropies are counted, and graphs are read.
    *(f"_C._nn.{name}" for name in ("cross_entropy_loss", "nll_loss_nd")),
    "_C._functorch.peek_interpreter_stack",
    "jit._builtins._register_builtin",
    "_C._functions.SumBackward0._input_metadata",
    "autograd.Function._backward_cls",
    # The type of this machine's accelerators.
    "_C._get_accelerator",
    # Nested containers.
    "utils._pytree.tree_leaves",
    "utils._pytree.tree_map_only",
)
"""Without one of these, ``import balanced_dp`` raises an ImportError that names it."""

FOR_EMULATION = (
    "_register_device_module",
    "Tensor._make_subclass",
    "Tensor._use_count",
    "Tensor._is_view",
    "nn.Module._apply",
    "random._seed_custom_device",
    "autograd._engine_run_backward",
    "optim.optimizer._foreach_supported_types",
    "optim.optimizer._get_foreach_kernels_supported_devices",
    "optim.optimizer._get_fused_kernels_supported_devices",
    "serialization._package_registry",
    "jit._builtins._get_builtin_table",
    "nn.parallel._functions._get_stream",
    "overrides._get_current_function_mode_stack",
    "utils._device._device_constructors",
    "utils._mode_utils.no_dispatch",
    *(f"cuda.{name}" for name in ("_exchange_device", "_maybe_exchange_device", "_cudart")),
    *(f"cuda.{name}" for name in ("_cached_device_count", "_get_pynvml_handler")),
    "_C._jit_get_schemas_for_operator",
    "_C._nn._parse_to",
    "_C._storage_Use_Count",
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._is_autocast_available",
    "_C._ExcludeDispatchKeyGuard",
    "_C.DispatchKey.AutocastPrivateUse1",
    "_C.DispatchKey.CompositeImplicitAutograd",
    "_C.DispatchKeySet",
    "ops.aten._conj.default._schema",
    "ops.aten._efficientzerotensor",
    "ops.aten._neg_view",
    "ops.aten._to_copy",
    "ops.aten._scaled_dot_product_attention_math",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
)
"""Without one of these, ``emulate_devices`` raises an EmulationError that names it."""

SLOWER_WITHOUT = {
    "_disable_dynamo": "torch.compiler.disable is used, which imports Dynamo at once",
    "_foreach_copy_": "gradients that arrive on a CUDA device are copied one by one",
    "_C._will_engine_execute_node": "gradients of a block of calls are brought home by each call",
    "_C._functions.SumBackward0._set_sequence_nr": "gradients leave for other devices later",
}
"""What is slower without one of these."""


def exists(name: str) -> bool:
    """Return whether torch has a dotted name, or a class of it declares such an attribute."""
    path, _, last = f"torch.{name}".rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return hasattr(owner, last) or last in getattr(owner, "__annotations__", {})


def require(names: Iterable[str], what: str, error: type[Exception]) -> None:
    """Check that torch has all names that something uses.

    Raises:
        error: it lacks some.
    """
    missing = [f"torch.{name}" for name in names if not exists(name)]
    if missing:
        raise error(
            f"{what} cannot be used with torch {torch.__version__}, which does not have "
            f"{', '.join(missing)}; install a torch from {TESTED[0]} to {TESTED[1]}"
        )


require(NEEDED, "balanced_dp", ImportError)

_ACCELERATOR = getattr(torch, "accelerator", None)
ACCELERATOR_MODULES: list[ModuleType] = [
    module for module in (_ACCELERATOR, getattr(_ACCELERATOR, "memory", None)) if module is not None
]
"""``torch.accelerator``, which is there from 2.6 on, and its ``memory``, from 2.9 on."""


def disable_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Dynamo does not trace. Dynamo is not imported for this."""
    disabled = getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return run


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerators; None if there are none."""
    # torch.accelerator is there from 2.6 on, and raises in 2.6 where there is no accelerator.
    device: torch.device = torch._C._get_accelerator()
    is_there = device.type != "cpu" and torch.get_device_module(device).is_available()
    return device.type if is_there else None


def accelerator_count() -> int:
    """Return the number of this machine's accelerators."""
    device_type = accelerator_type()
    return 0 if device_type is None else int(torch.get_device_module(device_type).device_count())


def run_at_once(node: Any) -> None:
    """Let a node run as soon as it can in backward.

    Autograd runs nodes by their sequence numbers, the highest first; only the nodes that accumulate
    gradients have a higher one.
    """
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(2**64 - 2)


def will_execute(node: Any) -> bool:
    """Return whether the running backward pass will run a node; False if torch does not tell.

    Raises:
        RuntimeError: ``torch.autograd.grad`` is running, which accumulates no gradients.
    """
    tells = getattr(torch._C, "_will_engine_execute_node", None)
    return tells is not None and bool(tells(node))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each tensor into another one."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
