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

_FEW = 2**14
"""A gradient of at most as many elements is weighted at once.

To have it multiplied on its way to the bucket costs more than the pass over memory that this saves.
"""


def weight_buckets(
    model: DistributedDataParallel, group: dist.ProcessGroup | None, timeout: timedelta | None
) -> LocalWeight:
    """Weights the gradients of ``model`` from now on, and returns what is told the weights."""
    if model._delay_all_reduce_params:
        raise ArgumentError(
            "DistributedDataParallel averages delay_all_reduce_named_params by itself, without "
            "weights; leave that argument out"
        )
    ranks = dist.get_process_group_ranks(group or model.process_group)
    weight = LocalWeight(ranks, timeout)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in model.parameters_to_ignore:
            _attach(parameter, _Hooks(parameter, model, weight))
    return weight


class _Hooks:
    """Weights the gradients of one parameter, as autograd adds them to ``.grad``.

    A gradient may share memory with one that still flows, so it is not weighted in place, but

    - where torch divides it into its bucket, in the same pass over memory;
    - before, if it is small, adds up with others, or is not divided like that.
    """

    def __init__(
        self, parameter: Tensor, model: DistributedDataParallel, weight: LocalWeight
    ) -> None:
        self._parameter = weakref.ref(parameter)
        self._model = weakref.ref(model)
        self._weight = weight
        self._is_left = False

    def before(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Weights a gradient, or leaves that to ``after``."""
        parameter = self._parameter()
        if parameter is None or self._model() is None:  # it is used without the model
            return None
        factor = self._weight.share.factor
        if factor == 1:
            return None
        (gradient,) = gradients
        self._is_left = (
            gradient.numel() > _FEW
            and parameter.grad is None
            and gradient.layout == torch.strided
            and not gradient.requires_grad
        )
        return None if self._is_left else (_times(gradient, factor),)

    def after(self, parameter: Tensor) -> None:
        """Has a gradient weighted on its way to the bucket."""
        is_left, self._is_left = self._is_left, False
        if is_left and parameter.grad is not None:
            parameter.grad = _WeightedGradient(parameter.grad, self._weight.share.factor)
            # This comes before torch copies from buckets, which it queues with the last gradient.
            Variable._execution_engine.queue_callback(partial(_unwrap, parameter))


def _attach(parameter: Tensor, hooks: _Hooks) -> None:
    """Has autograd call them, and none that did this for another model."""
    for handle in _HANDLES.get(parameter, ()):
        handle.remove()
    # A hook of the node, which the model keeps: torch.autograd.grad calls those of the parameter.
    node = get_gradient_edge(parameter).node
    handles = [node.register_prehook(hooks.before)]
    if parameter.numel() > _FEW:
        handles.append(parameter.register_post_accumulate_grad_hook(hooks.after))
    _HANDLES[parameter] = handles


_HANDLES = WeakTensorKeyDictionary()
"""The hooks of parameters."""


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
        if func is torch.ops.aten.mul.out and isinstance(args[0], cls):
            return args[0]._divide_into(*args[1:], **(kwargs or {}))
        args, kwargs = tree_map_only(cls, cls.multiplied, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return repr(self.multiplied())

    def multiplied(self) -> Tensor:
        if self._factor != 1:
            self._gradient = _times(self._gradient, self._factor)
            self._factor = 1.0
        return self._gradient

    def _divide_into(self, by: Tensor, out: Tensor) -> Tensor:
        self._is_in_bucket = True
        factor = self._factor * float(by)
        return torch.mul(self._gradient, factor, out=out) if factor else out.zero_()

    def unwrapped(self) -> Tensor:
        """Returns a plain tensor of the same value, or memory for the average over ranks."""
        if self._is_in_bucket:
            self._factor = 1.0
        return self.multiplied()


def _unwrap(parameter: Tensor) -> None:
    if isinstance(parameter.grad, _WeightedGradient):
        parameter.grad = parameter.grad.unwrapped()


def _times(gradient: Tensor, factor: float) -> Tensor:
    # What a rank without samples has computed may be NaN.
    return gradient * factor if factor else torch.zeros_like(gradient)
