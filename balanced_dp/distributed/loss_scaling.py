"""Scale a rank's loss, so that gradients averaged over ranks are those of the whole batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# This import is needed although nothing here uses it. When torch.distributed.nn is imported, the
# default arguments of its functions store the process group that exists at that time. Without this
# import, the first optimizer would import the module, usually after init_process_group. Then the
# stored group would keep the threads of gloo running even after destroy_process_group, and the
# process could abort at exit.
import torch.distributed.nn  # noqa: F401
from torch import Tensor

from ..errors import ArgumentError


class TotalCount:
    """The number of samples or tokens of all ranks together, which is computed asynchronously.

    ``count_all_ranks`` returns this object.
    """

    def __init__(self, count: float, group: dist.ProcessGroup | None) -> None:
        self.group = group
        # The sum is on the CPU if the group has a backend for the CPU, so that no device waits.
        devices = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
        device = "cpu" if "cpu" in devices else devices[0]
        self._sum = torch.tensor(count, dtype=torch.float64, device=device)
        self._work = dist.all_reduce(self._sum, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the counts of all ranks, and return their sum as a 0-dim float64 tensor.

        The sum is on the CPU if the group has a backend for the CPU, such as gloo. With NCCL alone,
        the sum is on this rank's GPU. Then the GPU, not the host, waits for the counts.

        Raises:
            RuntimeError: a rank did not report its count within the group's timeout. With NCCL,
                there is no error: NCCL's watchdog ends the process.
        """
        self._work.wait()
        return self._sum


def count_all_ranks(count: float | Tensor, group: dist.ProcessGroup | None = None) -> TotalCount:
    """Add up the numbers of samples or tokens of all ranks, asynchronously.

    Every rank of the group must call this function.

    Args:
        count: this rank's number of samples or tokens, as for ``scale_loss``. With gradient
            accumulation, give the sum over all micro-batches of the step.
        group: the process group that averages gradients; None means torch's default group.

    Returns:
        The sum, as an object to be passed to ``scale_loss`` as ``total``.

    Raises:
        ValueError: there is no process group.
    """
    return TotalCount(float(count), group)


def scale_loss(
    loss: Tensor,
    count: float | Tensor,
    *,
    total: TotalCount | float | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale a rank's loss by ``world_size * count / total``; call ``backward`` on the result.

    ``DistributedDataParallel``, ``fully_shard``, accelerate and DeepSpeed average gradients over
    ranks with equal weights. With scaled losses, the averaged gradients are those of the mean loss
    of the whole batch. With gradient accumulation, ``total`` must include the counts of all
    micro-batches, as in ``scale_loss(loss_i, count_i, total=count_all_ranks(sum(counts)))``. If
    the framework divides the loss by the number of micro-batches, as accelerate and DeepSpeed do,
    multiply the scaled loss by this number.

    If ``count`` is 0, the scaled loss and its gradients are 0, even if ``loss`` is NaN. To make the
    gradients 0, each inner node of the loss's autograd graph gets a hook. If a node receives only
    zeros in the backward pass, the gradients that it computes should be 0, but may be NaN (0 / 0,
    for example). Then the hook replaces the computed gradients with zeros. The nodes inside a
    reentrant checkpoint get no hooks, so a 0 / 0 there still makes gradients NaN.

    Args:
        loss: this rank's mean over its ``count`` samples or tokens. It is a tensor of one element,
            with any floating-point dtype. The factor ``world_size * count / total`` is rounded to
            this dtype; in bfloat16, 8 significant bits remain.
        count: the number of samples or tokens of which ``loss`` is the mean, at least 0. If
            ``loss`` is a weighted mean, ``count`` is the sum of the weights. The host reads this
            number, so a tensor on a device makes the host wait. To avoid this, count labels before
            they are moved to the device.
        total: the sum of the counts of all ranks, as a number or as the result of
            ``count_all_ranks``. If None, the ranks add up their counts in ``scale_loss``, so every
            rank must call ``scale_loss``.
        group: the process group that averages gradients; None means torch's default group. If
            ``total`` is a result of ``count_all_ranks``, the group given there is used instead.

    Raises:
        ArgumentError: ``count`` is higher than ``total``. The two are not compared if the ranks
            compute ``total`` and NCCL is the group's only backend, because reading ``total`` from
            the GPU would make the host wait.
        RuntimeError: a rank did not report its count within the group's timeout.
        ValueError: there is no process group.

    Source:
        Let rank r have the count n_r and the loss loss_r. Its scaled loss is
        world_size * n_r / sum(n) * loss_r. The mean of the scaled losses over all ranks is
        sum(n_r * loss_r) / sum(n), which is the mean loss of the whole batch.
        ``DistributedDataParallel`` takes this mean: it divides the sum of the gradients by the
        world size.
        https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """
    own = float(count)
    if total is None:
        total = TotalCount(own, group)
    if isinstance(total, TotalCount):
        group, sum_of_counts = total.group, total.wait()
    else:
        sum_of_counts = torch.tensor(float(total), dtype=torch.float64, device="cpu")
    # A sum on a GPU is not compared, because reading it would make the host wait.
    if sum_of_counts.device.type == "cpu" and sum_of_counts < own:
        raise ArgumentError(
            f"count is {own:g}, but total is {float(sum_of_counts):g}; total must be the sum "
            "of the counts of all ranks and micro-batches, which count_all_ranks computes"
        )
    if own == 0:
        _keep_zero_gradients(loss)
        return loss.nan_to_num(0.0, 0.0, 0.0) * 0
    return loss * (dist.get_world_size(group) * own / sum_of_counts).to(loss.dtype)


def _keep_zero_gradients(loss: Tensor) -> None:
    """Register the hook ``_zeros_of_zeros`` on all autograd nodes of ``loss`` except leaf nodes."""
    nodes = [loss.grad_fn]
    seen = {None, *nodes}
    while nodes:
        node = nodes.pop()
        if node is None or not node.next_functions:  # a hook on a leaf outlives the graph
            continue
        node.register_hook(_zeros_of_zeros)
        following = {function for function, _ in node.next_functions} - seen
        seen |= following
        nodes += following


def _zeros_of_zeros(inputs: Any, outputs: Any) -> tuple[Tensor | None, ...] | None:
    """Return zeros to replace the gradients that a node has computed from zeros only.

    These gradients may be NaN, since the backward of a node may compute 0 / 0 or 0 * inf. If
    another loss uses the node, too, the node may receive gradients other than zeros. Then return
    None, which leaves the computed gradients as they are.

    Args:
        inputs: the gradients that the node has computed, with respect to its forward inputs.
        outputs: the gradients that the node has received, with respect to its forward outputs.
    """
    if any(bool(gradient.abs().sum()) for gradient in outputs if gradient is not None):
        return None
    return tuple(None if gradient is None else torch.zeros_like(gradient) for gradient in inputs)
