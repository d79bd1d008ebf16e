"""The buckets of ``DistributedDataParallel``, weighted."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ArgumentError
from .local_weight import LocalWeight

_SMALL_NUMEL = 2**14
"""A gradient of at most as many elements is weighted at once.

To have it multiplied on its way to the bucket costs more than the pass over memory that this saves.
"""


def weight_buckets(
    model: DistributedDataParallel, group: dist.ProcessGroup | None, timeout: timedelta | None
) -> LocalWeight:
    """Weights the gradients of ``model`` from now on, and returns what is told the weights."""
    _check(model)
    ranks = dist.get_process_group_ranks(group or model.process_group)
    weight = LocalWeight(ranks, timeout)
    parameters, _ = model._build_params_for_reducer()
    for parameter in parameters:
        if parameter in _WEIGHTED:
            _WEIGHTED[parameter].remove()
        _WEIGHTED[parameter] = _WeightedParameter(parameter, model, weight)
    return weight


def _check(model: DistributedDataParallel) -> None:
    """Raises an error if gradients are averaged past the weights."""
    if model._delay_all_reduce_params:
        raise ArgumentError(
            "DistributedDataParallel averages delay_all_reduce_named_params by itself, without "
            "weights; leave that argument out"
        )
    if model.mixed_precision is not None:
        raise ArgumentError(
            "DistributedDataParallel(mixed_precision=...) makes other parameters for each pass, "
            "whose gradients have no weights; use torch.autocast"
        )
    if model._use_python_reducer:
        raise ArgumentError(
            'torch._dynamo.config.optimize_ddp = "python_reducer" averages gradients before they '
            "have weights; set another mode before you make the DistributedDataParallel"
        )


class _WeightedParameter:
    """Weights the gradients of one parameter, as autograd adds them to ``.grad``.

    A gradient may share memory with one that still flows, so it is not weighted in place, but

    - where torch divides it into its bucket, in the same pass over memory;
    - before, if it is small, adds up with others, is sparse, or has hooks that look at ``.grad``.
    """

    def __init__(
        self, parameter: Tensor, model: DistributedDataParallel, weight: LocalWeight
    ) -> None:
        self._parameter = weakref.ref(parameter)
        self._model = weakref.ref(model)
        self._weight = weight
        self._left: float | None = None
        # Of the node, which the model keeps: torch.autograd.grad calls those of the parameter, too.
        self._handles = [get_gradient_edge(parameter).node.register_prehook(self._before)]
        hooks = parameter._post_accumulate_grad_hooks  # whose order cannot be changed
        self._is_early = parameter.numel() <= _SMALL_NUMEL or bool(hooks)
        if not self._is_early:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._after))

    def remove(self) -> None:
        """Leaves the parameter to another model."""
        for handle in self._handles:
            handle.remove()
        self._weight.is_replaced = True

    def _before(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...] | None:
        """Weights a gradient, or leaves a factor to ``_after``."""
        self._left = None
        parameter, model, (gradient,) = self._parameter(), self._model(), gradients
        if parameter is None or model is None or gradient is None:
            return None  # used without the model, or not used
        factor = self._weight.share.factor
        if factor == 1:
            return None
        if (
            self._is_early
            or not model.require_forward_param_sync  # it is not going to be averaged
            or parameter.grad is not None
            or gradient.layout != torch.strided
            or gradient.requires_grad
        ):
            return (_times(gradient, factor),)
        self._left = factor
        return None

    def _after(self, parameter: Tensor) -> None:
        """Has a gradient weighted on its way to the bucket."""
        factor, self._left = self._left, None
        if factor is not None:
            assert parameter.grad is not None  # no hook comes before this one
            parameter.grad = _WeightedGradient(parameter.grad, factor)
            # That is before torch copies averages to gradients, but in the first pass of a static
            # graph and in reentrant checkpoints.
            Variable._execution_engine.queue_callback(partial(_unwrap, parameter))


_WEIGHTED = WeakTensorKeyDictionary()
"""The ``_WeightedParameter`` of parameters."""


class _WeightedGradient(Tensor):
    """A gradient times a factor, multiplied when it is used.

    If that is torch's division into a bucket, it takes no pass over memory of its own.
    """

    _gradient: Tensor
    _factor: float
    _is_in_bucket: bool

    @staticmethod
    def __new__(cls, gradient: Tensor, factor: float) -> _WeightedGradient:
        self: _WeightedGradient = Tensor._make_wrapper_subclass(
            cls,
            gradient.size(),
            strides=gradient.stride(),
            dtype=gradient.dtype,
            device=gradient.device,
        )
        self._gradient = gradient
        self._factor = factor
        self._is_in_bucket = False
        return self

    # Torch's stubs declare both for plain tensors: a method here, any callable and any types there.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.mul.out and list(map(type, args)) == [cls, float]:
            return args[0]._multiply_into(args[1], **(kwargs or {}))
        args, kwargs = tree_map_only(cls, cls._multiplied, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return repr(self._multiplied())

    def _multiplied(self) -> Tensor:
        if self._factor != 1:
            self._gradient = _times(self._gradient, self._factor)
            self._factor = 1.0
        return self._gradient

    def _multiply_into(self, by: float, out: Tensor) -> Tensor:
        self._is_in_bucket = True
        factor = self._factor * by
        return torch.mul(self._gradient, factor, out=out) if factor else out.zero_()

    def unwrapped(self) -> Tensor:
        """Returns a plain tensor of the same value, or memory for the average over ranks."""
        if self._is_in_bucket:
            self._factor = 1.0
        return self._multiplied()


def _unwrap(parameter: Tensor) -> None:
    if isinstance(parameter.grad, _WeightedGradient):
        parameter.grad = parameter.grad.unwrapped()


def _times(gradient: Tensor, factor: float) -> Tensor:
    # What a rank without samples has computed may be NaN.
    return gradient * factor if factor else torch.zeros_like(gradient)
