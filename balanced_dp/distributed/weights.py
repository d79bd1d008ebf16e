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
from typing import Any, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

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
    - A communication hook that was registered before, such as bf16 compression, stays in place, and
      gradients are weighted before they reach it. Where there is none, this registers one, and
      torch takes no other.
    - Of ``fully_shard``, gradients are weighted where they are reduced, with all that has
      accumulated. So each rank must have the same share of all passes in between, and tell none
      for a pass without backward.

    Args:
        model: of ``DistributedDataParallel`` or ``fully_shard``, not yet compiled.
        process_group: the ranks that share a batch; by default those that average gradients.
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
        weight = _weight_buckets(model, process_group, timeout)
    elif isinstance(model, FSDPModule):
        weight = _weight_shards(model, process_group, timeout)
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


def _weight_buckets(
    model: DistributedDataParallel, group: dist.ProcessGroup | None, timeout: timedelta | None
) -> _LocalWeight:
    if model._delay_all_reduce_params:
        raise ArgumentError(
            "DistributedDataParallel averages delay_all_reduce_named_params by itself, without "
            "weights; leave that argument out"
        )
    ranks = dist.get_process_group_ranks(group or model.process_group)
    weight = _LocalWeight(ranks, timeout)
    has_hook = "comm_hook" in model._get_ddp_logging_data()
    gradients = _WeightedGradients(weight, model, takes_all=has_hook)
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in model.parameters_to_ignore:
            gradients.attach(parameter)
    if not has_hook:
        model.register_comm_hook(gradients, _average)
    return weight


def _weight_shards(
    model: nn.Module, group: dist.ProcessGroup | None, timeout: timedelta | None
) -> _LocalWeight:
    _check_sharded(model)
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
    else:
        meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        ranks = sorted(next(meshes).mesh.flatten().tolist())
    weight = _LocalWeight(ranks, timeout)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reduce_scatter: Any = weight.reduce_scatter()  # as torch asks for, not derived
            module.set_custom_reduce_scatter(reduce_scatter)
    return weight


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

    def __init__(self, ranks: list[int], timeout: timedelta | None) -> None:
        self.group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
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

    @property
    def share(self) -> _Share:
        """That of the present pass."""
        if self._share is None:
            raise DistributedError(
                "gradients are to be weighted, but no weight was told; call model.local_weight(n) "
                "before backward"
            )
        return self._share

    def __reduce__(self) -> Any:
        return _copied_weight, ()  # a process group cannot be copied

    def reduce_scatter(self) -> _WeightedReduceScatter:
        """Returns a new one, which is told each share."""
        self._reduce_scatters.append(_WeightedReduceScatter(self))
        return self._reduce_scatters[-1]


class _WeightedGradients:
    """Weights gradients of ``DistributedDataParallel`` where no memory is somebody else's.

    A gradient may share memory with one that still flows, so it cannot be weighted in place before
    it is in its bucket. There it can, if what the bucket holds is of one pass. Gradients that add
    up in ``no_sync()``, and all where another communication hook sees the buckets, are weighted
    one by one on their way, which takes memory for each.
    """

    def __init__(
        self, weight: _LocalWeight, model: DistributedDataParallel, *, takes_all: bool
    ) -> None:
        self._weight = weight
        self._model = weakref.ref(model)
        self._takes_all = takes_all
        self._has_accumulated = False
        self._decided: _Share | None = None
        self._is_by_bucket = False

    def attach(self, parameter: Tensor) -> None:
        """Has autograd call it with each gradient, and nobody who did this for another model."""
        if parameter in _HANDLES:
            _HANDLES[parameter].remove()
        _HANDLES[parameter] = parameter.register_hook(self._weighted)

    def _weighted(self, gradient: Tensor) -> Tensor | None:
        model = self._model()
        if model is None:  # its parameters are used without it
            return None
        share = self._decide(model)
        if self._is_by_bucket or share.factor == 1:
            return None
        return gradient * share.factor if share.factor else torch.zeros_like(gradient)

    def _decide(self, model: DistributedDataParallel) -> _Share:
        """Returns the share of this pass, once it is known where that is applied."""
        share = self._weight.share
        if self._decided is not share:
            is_reduced = model.require_forward_param_sync  # what the last forward prepared for
            self._is_by_bucket = is_reduced and not (self._takes_all or self._has_accumulated)
            self._has_accumulated = not is_reduced
            self._decided = share
        return share

    def __reduce__(self) -> Any:
        return _copied_weight, ()

    def bucket_factor(self, model: DistributedDataParallel) -> float:
        """Returns by what a bucket is still to be multiplied."""
        share = self._decide(model)
        return share.factor if self._is_by_bucket else 1.0


_HANDLES = WeakTensorKeyDictionary()
"""The hooks of parameters."""


def _average(
    state: _WeightedGradients,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # public, but not in the stubs
) -> torch.futures.Future[Tensor]:
    """Is the communication hook: the average over ranks, each bucket weighted."""
    model = state._model()
    assert model is not None
    buffer = bucket.buffer()
    _scale(buffer, state.bucket_factor(model) / model.process_group.size())
    work = dist.all_reduce(buffer, group=model.process_group, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return averaged


_average.__annotations__ = get_type_hints(_average)  # DDP looks at them, and not as text


def _scale(gradients: Tensor, factor: float) -> None:
    if factor == 0:  # what a rank without samples has computed may be NaN
        gradients.zero_()
    elif factor != 1:
        gradients.mul_(factor)


def _copied_weight() -> Callable[[float], None]:
    """Returns what a copy of a model has for ``local_weight``."""

    def local_weight(n: float | Tensor) -> None:
        raise DistributedError("copies of a model have no weights; call weight_gradients with it")

    return local_weight


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
        factor = self._weight.share.factor
        if len(self.shares) > 1:
            self._check_alike(factor)
        self.shares.clear()
        _scale(input_tensor, factor)
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
