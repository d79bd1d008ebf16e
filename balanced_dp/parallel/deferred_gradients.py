"""Defer gradients to the end of a block in which several calls use the same weights.

Inside the block, each device adds up its own gradients: the home of a parameter in a placeholder in
``.grad``, which is an error to use, and other devices in the nodes of their buckets. When the block
ends, all sums are added to the parameters. Parameters with hooks are exempt, since a hook expects
the whole gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from ..devices import copy_stream, gradient_stream, is_cuda, on_stream
from .coalesced_copy import bring_to, has_hooks

_REMEDY = "clip, read or zero gradients and step the optimizer outside of it"


class DeferredGradients:
    """The placeholders in ``.grad`` and the nodes that add up gradients, of one block."""

    def __init__(self) -> None:
        self._nodes: list[list[Any]] = []
        self._placeholders: list[tuple[torch.Tensor, _Placeholder]] = []

    def begin(self, parameters: Sequence[torch.Tensor], nodes: Sequence[Sequence[Any]]) -> None:
        """Defer the gradients of parameters from now on.

        Args:
            parameters: all parameters of the module.
            nodes: for each bucket, its nodes on the devices that the block did not have yet.
        """
        self._nodes += map(list, nodes)
        for node in chain.from_iterable(nodes):
            if not any(map(has_hooks, node.originals)):
                node.gathered = [None] * len(node.originals)
        known = {id(parameter) for parameter, _ in self._placeholders}
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in known and not has_hooks(parameter):
                placeholder = _Placeholder(parameter)
                self._placeholders.append((parameter, placeholder))
                parameter.grad = placeholder

    def check_hooks(self) -> None:
        """Raise RuntimeError if a parameter has got a hook whose gradient is deferred."""
        if any(has_hooks(parameter) for parameter, _ in self._placeholders):
            raise RuntimeError(
                "a hook was registered on a parameter inside shared_weights() or accumulate(), "
                "where its gradient is deferred; register it before the block"
            )

    def end(self) -> None:
        """Add the deferred gradients to those of the parameters, through autograd.

        Raises:
            RuntimeError: before anything is added, if gradients were replaced in the block.
        """
        is_replaced = any(parameter.grad is not p for parameter, p in self._placeholders)
        for parameter, placeholder in self._placeholders:
            if parameter.grad is placeholder:
                parameter.grad = placeholder.before
        if is_replaced:
            raise RuntimeError(
                "gradients were replaced inside shared_weights() or accumulate(), where they are "
                f"deferred until the block ends; {_REMEDY}"
            )
        accumulate((parameter, placeholder.total) for parameter, placeholder in self._placeholders)
        for nodes in self._nodes:
            brought: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            for node in nodes:
                if node.gathered is not None:
                    brought += zip(node.originals, _bring(node), strict=True)
                    node.gathered = None
            accumulate(brought)


def on_copy_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context manager in which the copy stream is current, if ``device`` is a CUDA device.

    Autograd runs a node's backward on the stream that was current when the node was made, and lets
    that stream wait for the gradients. So computing goes on while they are copied.
    """
    return on_stream(copy_stream(device)) if is_cuda(device) else contextlib.nullcontext()


def _bring(node: Any) -> Sequence[torch.Tensor | None]:
    """Return the gradients of a node, ready for the current stream of the originals' device."""
    home = node.originals[0].device
    source = next((g.device for g in node.gathered if g is not None), home)
    with on_copy_stream(source):
        brought = bring_to(home, node.gathered)
    if is_cuda(source) and is_cuda(home):
        current = torch.get_device_module(home).current_stream(home)
        current.wait_stream(gradient_stream(home, source))
        for gradient in brought:
            if gradient is not None:
                gradient.record_stream(current)
    return brought


def accumulate(pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Accumulate gradients into ``.grad`` of their parameters, as autograd does."""
    trained = []
    for parameter, gradient in pairs:
        if gradient is None:
            continue
        if parameter.requires_grad:
            trained.append((parameter, gradient))
        else:  # it was frozen since
            old = parameter.grad
            parameter.grad = gradient if old is None else old + gradient
    if trained:
        torch.autograd.backward([p for p, _ in trained], [g for _, g in trained])


class _Placeholder(torch.Tensor):
    """Placeholder for ``.grad`` while gradients are deferred: autograd may accumulate into it.

    Any other operation on it raises a RuntimeError.

    Attributes:
        before: the gradient before the block.
        total: the sum of the gradients that were accumulated since.
    """

    before: torch.Tensor | None
    total: torch.Tensor | None

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> _Placeholder:
        self: _Placeholder = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self.before, self.total = parameter.grad, None
        return self

    # Torch's stubs declare both for plain tensors: a method here, any callable and any types there.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], cls) and not kwargs:
            self, gradient = args
            self.total = gradient.clone() if self.total is None else added(self.total, gradient)
            return self
        raise RuntimeError(
            "a gradient was used inside shared_weights() or accumulate(), where gradients are "
            f"deferred until the block ends; {_REMEDY}"
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return "<a gradient that is deferred until shared_weights() ends>"


def added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two gradients, either of which may be sparse."""
    # Torch adds a sparse tensor to a dense one, and not the other way round.
    return other + one if one.is_sparse and not other.is_sparse else one + other
