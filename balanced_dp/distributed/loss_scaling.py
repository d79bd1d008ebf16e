"""A loss scaled so that the average of gradients over ranks is the gradient of the whole batch."""

from __future__ import annotations

import math
import os
import time
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError, DistributedError

_SEARCH_TIME_S = 5.0
"""How long ranks have to say that they are there, once one does not answer."""


class TotalCount:
    """What all ranks count together; ``count_all_ranks`` gives it."""

    def __init__(self, count: float, group: dist.ProcessGroup | None) -> None:
        self.group = group
        # On the CPU if the group can, so that no device has to wait.
        devices = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
        device = "cpu" if "cpu" in devices else devices[0]
        self._sum = torch.tensor(count, dtype=torch.float64, device=device)
        self._work = dist.all_reduce(self._sum, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the sum, 0-dim and float64; with NCCL alone, the device waits and not the host.

        Raises:
            DistributedError: a rank does not answer within the group's timeout, and which. (NCCL
                has an end of its own, which does not come by here.)
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise DistributedError(f"{_who_is_lost(self.group)} ({error})") from error
        return self._sum


def count_all_ranks(count: float | Tensor, group: dist.ProcessGroup | None = None) -> TotalCount:
    """Return the sum of all ranks' counts, which is added up while the caller goes on.

    Args:
        count: as of ``scale_loss``; of all micro-batches whose gradients are reduced together.
        group: the ranks that average gradients, each of which calls this; by default all.

    Raises:
        ArgumentTypeError, ArgumentError: as of ``scale_loss``.
        ValueError: there is no process group.
    """
    return TotalCount(_number("count", count), group)


def scale_loss(
    loss: Tensor,
    count: float | Tensor,
    *,
    total: TotalCount | float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return a rank's loss times ``world_size * count / total``, which goes backward in its place.

    ``DistributedDataParallel``, ``fully_shard``, accelerate and DeepSpeed average gradients over
    ranks, each counting the same. From losses scaled so, that is the gradient of the mean over all
    that all ranks count. Micro-batches of any counts are exact with a total of all of them,
    ``scale_loss(loss_i, count_i, total=count_all_ranks(sum(counts)))``; where something divides the
    loss by their number (accelerate and DeepSpeed do), multiply by it.

    With a count of 0 the result is 0, and all parameters below get gradients of zeros from it, even
    if the loss is NaN: each node of its graph then turns zeros into zeros, whatever it divides by.
    Reentrant checkpoints hide their nodes; what divides 0 by 0 inside of one still gives NaN.

    Args:
        loss: this rank's mean over ``count`` things, one number of any floating dtype. (In bfloat16
            the factor has 8 bits, too.)
        count: samples or tokens or weights, at least 0. The host reads it, and waits for the
            device of a tensor: count labels before they move there.
        total: that of all ranks. By default they ask each other, and each has to call this.
        group: the ranks that average; by default all, or those of a total of ``count_all_ranks``.

    Raises:
        ArgumentTypeError: the loss is no tensor, or a count no number.
        ArgumentError: the loss is not one number, a count below 0, not finite or above the total.
        DistributedError: a rank does not answer, as of ``TotalCount.wait``.
        ValueError: there is no process group.

    Source:
        The mean over ranks of world_size * n_r / sum(n) * loss_r is sum(n_r * loss_r) / sum(n).
        ``DistributedDataParallel`` divides by the world size:
        https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """
    own = _number("count", count)
    if not isinstance(loss, Tensor):
        raise ArgumentTypeError(f"loss must be a tensor, got {loss!r}; give it before .item()")
    if loss.numel() != 1:
        raise ArgumentError(
            f"loss must be one number, got shape {tuple(loss.shape)}; give the mean over count"
        )
    if total is None:
        total = TotalCount(own, group)
    if isinstance(total, TotalCount):
        group, whole = total.group, total.wait()
    else:
        whole = torch.tensor(_number("total", total), dtype=torch.float64, device="cpu")
    if whole.device.type == "cpu" and whole < own:  # elsewhere the host would wait
        raise ArgumentError(
            f"count is {own:g}, but total is {float(whole):g}; a total is of all ranks and all "
            "micro-batches, as count_all_ranks gives it"
        )
    if own == 0:
        _keep_zeros(loss)
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0
    return loss * (dist.get_world_size(group) * own / whole).to(loss.dtype)


def _number(name: str, value: Any) -> float:
    number: object = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ArgumentTypeError(
            f"{name} must be a number or a tensor with one, got {value!r}; give how many samples "
            "or tokens the loss is a mean over"
        )
    if not 0 <= float(number) < math.inf:
        raise ArgumentError(
            f"{name} must be at least 0 and finite, got {number}; for nothing give 0"
        )
    return float(number)


def _keep_zeros(loss: Tensor) -> None:
    nodes = [loss.grad_fn]
    seen = {None, *nodes}
    while nodes:
        node = nodes.pop()
        if node is None or not node.next_functions:  # a parameter's, which outlives the graph
            continue
        node.register_hook(_zeros_of_zeros)
        following = {function for function, _ in node.next_functions} - seen
        seen |= following
        nodes += following


def _zeros_of_zeros(inputs: Any, outputs: Any) -> tuple[Tensor | None, ...] | None:
    """Return zeros for the gradients that a node gives, if it got nothing else.

    A node below two losses gets the other's gradients, too.
    """
    if any(bool(gradient.abs().sum()) for gradient in outputs if gradient is not None):
        return None
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in inputs)


def _who_is_lost(group: dist.ProcessGroup | None) -> str:
    """Return which ranks do not answer, asked by way of the store in which ranks met."""
    found: Any = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(found)
    # Attempts of torchrun may share a store.
    prefix = f"balanced_dp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    try:
        store = found.get_group_store()
        store.set(f"{prefix}/{dist.get_rank()}", "answers")
        time.sleep(_SEARCH_TIME_S)
        lost = [rank for rank in ranks if not store.check([f"{prefix}/{rank}"])]
    except RuntimeError as error:
        return f"a rank does not answer, nor does the store that could tell which: {error}"
    if not lost:
        return "the counts of the ranks could not be added up, though all of them answer"
    return (
        f"no answer from rank {', '.join(map(str, lost))} of {ranks}; every rank calls scale_loss "
        "or count_all_ranks for each step, with 0 where it has no samples"
    )
