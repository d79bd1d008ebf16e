"""What ``fully_shard`` reduces and scatters, weighted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import ArgumentError, DistributedError
from .local_weight import LocalWeight, wait

_ROUNDING = 1e-9
"""By which part factors may differ that are to be equal."""

# Its name from torch 2.13 on, where the older one warns.
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def weight_shards(
    model: nn.Module, group: dist.ProcessGroup | None, timeout: timedelta | None
) -> LocalWeight:
    """Weights what ``model`` reduces from now on, and returns what is told the weights."""
    _check_sharded(model)
    if group is not None:
        ranks = dist.get_process_group_ranks(group)
    else:
        meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        ranks = sorted(next(meshes).mesh.flatten().tolist())
    weight = LocalWeight(ranks, timeout)
    groups: dict[Any, list[nn.Module]] = {}  # several modules are one group where torch got a list
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups.setdefault(module._get_fsdp_state(), []).append(module)
    for modules in groups.values():
        reduce_scatter: Any = _WeightedReduceScatter(weight, modules)  # has what torch asks for
        cast(FSDPModule, modules[0]).set_custom_reduce_scatter(reduce_scatter)
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


def _modules_sharded_with(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _modules_sharded_with(child)


class _WeightedReduceScatter:
    """Reduces and scatters weighted gradients, as ``FSDPModule.set_custom_reduce_scatter`` has it.

    The gradients are in memory that is nobody else's.
    """

    def __init__(self, weight: LocalWeight, modules: list[nn.Module]) -> None:
        own = WeakSet(part for module in modules for part in _modules_sharded_with(module))

        def has_gradients() -> bool:
            return any(p.requires_grad for m in own for p in m.parameters(recurse=False))

        self._weight = weight
        # Of the passes since the last reduction, and this one.
        self._shares = weight.follow(has_gradients)

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
        if len(self._shares) > 1:
            self._check_alike(factor)
        self._shares.clear()
        if factor == 0:  # what a rank without samples has computed may be NaN
            input_tensor.zero_()
        elif factor != 1:
            input_tensor.mul_(factor)
        return _reduce_scatter(output_tensor, input_tensor, op, group, async_op)

    def _check_alike(self, factor: float) -> None:
        unlike = max(abs(share.factor - factor) for share in self._shares)
        ratio = unlike / factor if factor else unlike
        largest = torch.tensor(ratio, dtype=torch.float64, device="cpu")
        group = self._weight.group
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group, async_op=True)
        wait(work, group)  # all raise, or none
        if largest > _ROUNDING:
            raise DistributedError(
                "fully_shard reduces accumulated gradients at once, but shares of the ranks differ "
                f"between their passes: this one counts {factor:.6g} times the mean of all ranks, "
                f"and {unlike:.3g} more or less in another pass; reduce after each "
                "(set_requires_gradient_sync(True)), or give each rank the same share of all"
            )
