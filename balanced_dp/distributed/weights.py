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
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError, ArgumentTypeError, DistributedError

_ROUNDING = 1e-9
"""By which part factors may differ that are to be equal."""

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
    - Of ``fully_shard``, gradients are weighted where they are reduced, with all that has
      accumulated. So each rank must have the same share of all passes in between.

    Args:
        model: of ``DistributedDataParallel`` or ``fully_shard``, not yet compiled.
        process_group: the ranks that share a batch; by default those of
            ``DistributedDataParallel``, or all.
        timeout: how long to wait for another rank's weight; by default that of torch for gloo,
            half an hour. A rank that is stuck later is noticed by the group that averages.

    Raises:
        ArgumentTypeError: the model is of another kind.
        ArgumentError: it has weights already, gradients that are averaged past the weights
            (``delay_all_reduce_named_params``, or a mesh of ``fully_shard`` that does not shard),
            or a weight is no number of at least 0.
        DistributedError: in backward: a rank has not told its weight in time, and which; no weight
            was told at all; or weights differ where ``fully_shard`` cannot tell them apart.

    Source:
        ``DistributedDataParallel`` divides by the world size
        (https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html):
        the mean of ``world_size * n_r / sum(n) * gradient_r`` is that of the whole batch.
    """
    if isinstance(getattr(model, "local_weight", None), _LocalWeight):
        raise ArgumentError("this model has weights already")
    if isinstance(model, DistributedDataParallel):
        weight = _LocalWeight(process_group or model.process_group, timeout)
        _attach(model, weight)
    elif isinstance(model, FSDPModule):
        _check_sharded(model)
        weight = _LocalWeight(process_group, timeout)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(weight.reduce_scatter())
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


def _attach(model: DistributedDataParallel, weight: _LocalWeight) -> None:
    if model._delay_all_reduce_params:
        raise ArgumentError(
            "DistributedDataParallel averages delay_all_reduce_named_params by itself, without "
            "weights; leave that argument out"
        )
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in model.parameters_to_ignore:
            _WeightedGradient(weight).attach(parameter)


def _check_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
            continue
        mesh = parameter.device_mesh
        shards = [mesh.size(i) for i, p in enumerate(parameter.placements) if p.is_shard()]
        if 1 in shards:
            raise ArgumentError(
                f"{name} is replicated over {mesh.size()} ranks and not sharded, so fully_shard "
                "never scatters its gradient; use DistributedDataParallel, or a mesh that shards"
            )


class _Share:
    """What this rank counts of one batch, and when all ranks have told theirs, of how much."""

    def __init__(self, own: float, group: dist.ProcessGroup) -> None:
        self.own = own
        self._group = group
        self._total = torch.tensor(own, dtype=torch.float64, device="cpu")
        self._work = dist.all_reduce(self._total, group=group, async_op=True)

    @cached_property
    def factor(self) -> float:
        """What gradients are multiplied by before ranks average them; waits for all counts."""
        _wait(self._work, self._group)
        total = float(self._total)
        return self.own * self._group.size() / total if total else 0.0


class _LocalWeight:
    """Is ``model.local_weight``.

    Counts travel through a group of their own, of CPU tensors: whatever device trains does not have
    to wait for them, and they cannot get between the gradients.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
        self.group = dist.new_group(
            None if group is None else dist.get_process_group_ranks(group),
            timeout,
            backend="gloo",
            use_local_synchronization=group is not None,
        )
        self._share: _Share | None = None
        self._reduce_scatters: list[_WeightedReduceScatter] = []

    def __call__(self, n: float | Tensor) -> None:
        number: object = n.item() if isinstance(n, Tensor) and n.numel() == 1 else n
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ArgumentTypeError(f"n must be a number, got {n!r}")
        own = float(number)
        if not 0 <= own < math.inf:
            raise ArgumentError(f"n must be at least 0 and finite, got {own}")
        self._share = _Share(own, self.group)
        for reduce_scatter in self._reduce_scatters:
            reduce_scatter.shares.append(self._share)

    def factor(self) -> float:
        """Returns what the gradients of the present pass are multiplied by."""
        if self._share is None:
            raise DistributedError(
                "gradients are to be weighted, but no weight was told; call model.local_weight(n) "
                "before backward"
            )
        return self._share.factor

    def reduce_scatter(self) -> _WeightedReduceScatter:
        """Returns a new one, which is told each share."""
        self._reduce_scatters.append(_WeightedReduceScatter(self))
        return self._reduce_scatters[-1]


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
        self.shares: list[_Share] = []  # of the passes since the last reduction, and this one

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        factor = self._weight.factor()
        if len(self.shares) > 1:
            self._check_alike(factor)
        self.shares.clear()
        if factor == 0:  # what a rank without samples has computed may be NaN
            input_tensor.zero_()
        elif factor != 1:
            input_tensor.mul_(factor)
        return _reduce_scatter(output_tensor, input_tensor, op, group, async_op)

    def _check_alike(self, factor: float) -> None:
        unlike = max(abs(share.factor - factor) for share in self.shares)
        ratio = unlike / factor if factor else unlike
        largest = torch.tensor(ratio, dtype=torch.float64, device="cpu")
        group = self._weight.group
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group, async_op=True)
        _wait(work, group)  # all raise, or none
        if largest > _ROUNDING:
            raise DistributedError(
                "fully_shard reduces accumulated gradients at once, but shares of the ranks differ "
                f"between their passes: this one counts {factor:.6g} times the mean of all ranks, "
                f"and {unlike:.3g} more or less in another pass; reduce after each "
                "(set_requires_gradient_sync(True)), or give each rank the same share of all"
            )


def _wait(work: dist.Work, group: dist.ProcessGroup) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise DistributedError(f"{_who_is_lost(group)} ({error})") from error


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
