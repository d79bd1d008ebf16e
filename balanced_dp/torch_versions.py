"""Differences between versions of torch, and the private names of torch that balanced_dp needs.

If the installed torch lacks one of these names, importing a public name from ``balanced_dp`` raises
an ``ImportError`` that gives the missing name. Emulated devices need more private names, and have
their own list of them. docs/versions.md lists the versions of torch that were tested.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

TESTED = ("2.5.1", "2.15.0")
"""The oldest and the newest version of torch with which the tests have passed."""

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
"""Names below ``torch``. Importing this module raises an ``ImportError`` if any is missing."""

AWAITS_PRODUCERS = torch.__version__ >= "2.8"
"""Whether autograd waits for the stream on which a node copies a gradient to another device.

Before torch 2.8, autograd assumes that the node copies the gradient on the default stream of the
destination, and does not wait for other streams. So before torch 2.8, balanced_dp copies gradients
on the destination's current stream. In autograd's threads, this is the default stream.

Source: ``InputBuffer::add`` in torch/csrc/autograd/input_buffer.cpp.
"""


def exists(name: str) -> bool:
    """Return whether torch has the attribute ``name``, such as ``"nn.Module._buffers"``.

    If a class assigns an attribute only to its instances, as ``nn.Module`` does with ``_buffers``,
    it is enough that the class declares the attribute's type.
    """
    path, _, last = f"torch.{name}".rpartition(".")
    try:
        owner = pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        return False
    return hasattr(owner, last) or last in getattr(owner, "__annotations__", {})


def require(names: str, what: str, error: type[Exception]) -> None:
    """Check that torch has all attributes that ``names`` lists.

    Args:
        names: dotted names below ``torch``, separated by blanks.
        what: the subject of the error message, such as ``"emulated devices"``.
        error: the class of the exception to raise.

    Raises:
        error: torch lacks some of the names.
    """
    missing = [f"torch.{name}" for name in names.split() if not exists(name)]
    if missing:
        raise error(
            f"{what} cannot be used with torch {torch.__version__}, which does not have "
            f"{', '.join(missing)}; install a torch from {TESTED[0]} to {TESTED[1]}"
        )


require(NEEDED, "balanced_dp", ImportError)


def run_at_once(node: Any) -> None:
    """Let an autograd node run as early as possible in the backward pass.

    Autograd runs the nodes that are ready in the order of their sequence numbers, highest first.
    This function sets the second-highest number possible. Only the nodes that accumulate the
    gradients of leaf tensors have a higher number.
    """
    node._set_sequence_nr(2**64 - 2)
