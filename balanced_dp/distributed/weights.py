"""Gradients averaged over ranks as those of the whole batch, though ranks have unlike shares."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from numbers import Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError, ArgumentTypeError, DistributedError

_ROUNDING = 1e-9
"""By how much factors may differ that are to be equal."""

# Its name from torch 2.13 on, where the older one warns.
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_SEARCH_TIME_S = 5.0
"""How long ranks look for those that do not answer, once one does not."""


def weight_gradients(
    model: ModuleT,
    process_group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> ModuleT:
    """Returns the model, whose gradients are from now on those of the whole batch.

    ``DistributedDataParallel`` averages gradients over ranks, each counting the same, which is
    wrong where they have chunks of unlike size. Here each counts for what its loss is a mean over:
    ``model.local_weight(n)`` tells it, before each backward pass. Then gradients are those of the
    mean over the whole batch on one device.

    ``model.local_weight(n)`` takes a number of at least 0, or a tensor with one: samples, or tokens
    where the loss is a mean over tokens. All ranks call it, as often as each other and with the
    passes in the same order; before the forward pass is best, since ranks add up their counts while
    they compute. A rank with 0 counts nothing, whatever its loss (which may be NaN), but has to run
    forward and backward for the others. A weight holds until the next one.

    - Passes in ``no_sync()`` are weighted each by its own. Gradients are then what the same passes
      over whole batches would have accumulated on one device.
    - Communication hooks, such as bf16 compression, stay in place, and may be registered before or
      after: gradients are weighted before they reach any.
    - Of ``fully_shard``, each call of it is weighted where gradients are reduced, with all that
      accumulated since. So all passes in between must have the same weight.

    Args:
        model: of ``DistributedDataParallel`` or ``fully_shard``, not yet compiled.
        process_group: the ranks that share a batch; by default those of
            ``DistributedDataParallel``, or all.
        timeout: how long to wait for another rank's weight; by default that of torch for gloo,
            half an hour.

    Raises:
        ArgumentTypeError: the model is of another kind.
        ArgumentError: it has weights already, or a weight is no number of at least 0.
        DistributedError: in ``local_weight`` or backward: a rank does not answer, and which; no
            weight was told; or weights differ where ``fully_shard`` cannot tell them apart.

    Source:
        ``DistributedDataParallel`` divides by the world size
        (https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html):
        the mean of ``world_size * n_r / sum(n) * gradient_r`` is that of the whole batch.
    """
    if isinstance(getattr(model, "local_weight", None), _LocalWeight):
        raise ArgumentError("this model has weights already")
    if isinstance(model, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(process_group or model.process_group)
        weight = _LocalWeight(ranks, timeout)
        reduced = dict(model.module.named_parameters())
        for name in set(reduced) - set(model.parameters_to_ignore):
            if reduced[name].requires_grad:
                _WeightedGradient(weight).attach(reduced[name])
    elif isinstance(model, FSDPModule):
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        weight = _LocalWeight(ranks, timeout)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_WeightedReduceScatter(weight))
    else:
        remedy = "wrap it in one of them first, and compile it last"
        if isinstance(model, FullyShardedDataParallel):
            remedy = "FullyShardedDataParallel averages in one flat parameter; use fully_shard"
        raise ArgumentTypeError(
            f"model must be of DistributedDataParallel or fully_shard, got a "
            f"{type(model).__name__}: {remedy}"
        )
    object.__setattr__(model, "local_weight", weight)
    return model


class _Share:
    """What this rank counts of one batch, and when all ranks have told theirs, of how much."""

    def __init__(self, own: float, group: dist.ProcessGroup) -> None:
        self.own = own
        self._group = group
        self._total = torch.tensor(own, dtype=torch.float64)
        self._work = dist.all_reduce(self._total, group=group, async_op=True)

    @cached_property
    def factor(self) -> float:
        """What gradients are multiplied by before ranks average them; waits for all counts."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise DistributedError(f"{_who_is_lost(self._group)} ({error})") from error
        total = float(self._total)
        return self.own * self._group.size() / total if total else 0.0


class _LocalWeight:
    """Is ``model.local_weight``.

    Counts travel through a group of their own, of CPU tensors: whatever device trains does not have
    to wait for them, and they cannot get between the gradients.
    """

    def __init__(self, ranks: list[int] | None, timeout: timedelta | None) -> None:
        self._group = dist.new_group(
            ranks, timeout, backend="gloo", use_local_synchronization=ranks is not None
        )
        self._share: _Share | None = None
        self._is_used = False
        self._unused: list[_Share] = []

    def __call__(self, n: float | Tensor) -> None:
        number: object = n.item() if isinstance(n, Tensor) and n.numel() == 1 else n
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ArgumentTypeError(f"n must be a number, got {n!r}")
        own = float(number)
        if not 0 <= own < math.inf:
            raise ArgumentError(f"n must be at least 0 and finite, got {own}")
        if self._share is None or self._is_used:
            self._unused.clear()
        else:
            self._unused.append(self._share)
        self._share = _Share(own, self._group)
        self._is_used = False

    def factor(self) -> float:
        """Returns what the gradients of the present pass are multiplied by."""
        if self._share is None:
            raise DistributedError(
                "gradients are to be weighted, but no weight was told; call model.local_weight(n) "
                "before backward"
            )
        self._is_used = True
        return self._share.factor

    def common_factor(self) -> float:
        """Returns the same for all passes whose gradients were not asked about.

        Raises:
            DistributedError: there is no such factor, here or on another rank.
        """
        factor = self.factor()
        if self._unused:
            unlike = max(abs(share.factor - factor) for share in self._unused)
            largest = torch.tensor(unlike)
            dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)  # all raise, or none
            if largest > _ROUNDING:
                raise DistributedError(
                    "fully_shard reduces accumulated gradients at once, but shares of the ranks "
                    f"differ between their passes: this one counts {factor:.6g} times the mean of "
                    f"all ranks, and differs by {unlike:.3g} in another pass; reduce after each "
                    "(set_requires_gradient_sync(True)), or give each rank the same share of all"
                )
            self._unused.clear()
        return factor


class _WeightedGradient:
    """Weights the gradient of a parameter as soon as it is there.

    A fresh one in place, once the parameter has it; one that is added to others before that, and
    then it takes memory.
    """

    def __init__(self, weight: _LocalWeight) -> None:
        self._weight = weight
        self._is_fresh = False

    def attach(self, parameter: Tensor) -> None:
        """Has autograd call it, before the gradient is added up and after."""
        parameter.register_hook(self._before)
        parameter.register_post_accumulate_grad_hook(self._after)
        self._parameter = weakref.ref(parameter)

    def _before(self, gradient: Tensor) -> Tensor | None:
        factor = self._weight.factor()
        parameter = self._parameter()
        self._is_fresh = factor != 0 and (parameter is None or parameter.grad is None)
        if factor == 0:  # what a rank without samples has computed may be NaN
            return torch.zeros_like(gradient)
        return None if self._is_fresh or factor == 1 else gradient * factor

    def _after(self, parameter: Tensor) -> None:
        factor = self._weight.factor()
        if self._is_fresh and factor != 1 and parameter.grad is not None:
            parameter.grad.mul_(factor)
        self._is_fresh = False


class _WeightedReduceScatter:
    """Reduces and scatters weighted gradients, as ``FSDPModule.set_custom_reduce_scatter`` has it.

    The gradients are in memory that is nobody else's.
    """

    def __init__(self, weight: _LocalWeight) -> None:
        self._weight = weight

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        factor = self._weight.common_factor()
        if factor == 0:
            input_tensor.zero_()
        elif factor != 1:
            input_tensor.mul_(factor)
        return _reduce_scatter(output_tensor, input_tensor, op, group, async_op)


def _who_is_lost(group: dist.ProcessGroup) -> str:
    """Returns which ranks do not answer, asked by way of the store in which ranks met."""
    ranks = dist.get_process_group_ranks(group)
    try:
        store = group.get_group_store()
        # Attempts of torchrun may share a store.
        prefix = f"balanced_dp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        store.set(f"{prefix}/{dist.get_rank()}", "answers")
        deadline = time.monotonic() + _SEARCH_TIME_S
        lost = [rank for rank in ranks if not _is_there(store, f"{prefix}/{rank}", deadline)]
    except RuntimeError as error:
        return f"a rank does not answer, nor does the store that could tell which: {error}"
    if not lost:
        return "the weights of the ranks could not be added up, though all of them answer"
    return f"no answer from rank {', '.join(map(str, lost))} of {ranks}"


def _is_there(store: Any, key: str, deadline: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
