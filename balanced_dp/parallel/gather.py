"""Join the outputs of the replicas on one device."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from ..errors import ArgumentError, GatherError, warn
from . import nested
from .losses.join import ChunkLosses, OutputHistory, is_loss
from .losses.sums import total

ScalarOutputs = Literal["auto", "mean", "sum", "stack"]


def check_scalar_outputs(scalar_outputs: str) -> None:
    """Raise ArgumentError unless ``scalar_outputs`` is one of ``ScalarOutputs``."""
    if scalar_outputs not in get_args(ScalarOutputs):
        raise ArgumentError(
            f"scalar_outputs must be one of {get_args(ScalarOutputs)}, got {scalar_outputs!r}"
        )


def gather(
    outputs: Sequence[Any],
    device: torch.device,
    dim: int = 0,
    scalar_outputs: ScalarOutputs = "auto",
    chunk_sizes: Sequence[int] | None = None,
    losses: ChunkLosses | None = None,
) -> Any:
    """Join the outputs of the replicas into one on ``device``. Differentiable.

    Tensors are concatenated along ``dim``, or along the only other dimension that has the size of
    the chunks. 0-dim tensors become one 0-dim tensor or a vector; integers that differ add up, with
    a warning, and bools must be equal. Mappings, dataclasses, named tuples, tuples and lists are
    joined item by item. A key-value cache of transformers becomes None. Anything else must be equal
    on every replica and is returned as it is.

    Args:
        outputs: the output of each replica; at least one.
        device: the device of the joined tensors.
        dim: the batch dimension.
        scalar_outputs: how 0-dim tensors are joined, as in ``BalancedDataParallel``.
        chunk_sizes: how many samples each replica had; None if the batch was not split.
        losses: how floating 0-dim tensors were computed; without it, they are averaged.

    Raises:
        GatherError: the outputs differ in structure, or in a value that is not a tensor; or a
            tensor does not have its samples along a dimension.
    """
    if losses is None:
        losses = ChunkLosses(OutputHistory(), gather, chunk_sizes, dim, is_auto=False)
    return _gather(list(outputs), "", _Join(device, dim, scalar_outputs, chunk_sizes, losses))


def _gather(outputs: list[Any], path: str, join: _Join) -> Any:
    first, *others = outputs
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return join(outputs, path)
    if any(type(other) is not type(first) for other in others):
        raise _differ(path, outputs, "different types")
    is_shared = others and all(other is first for other in others)
    if is_shared and isinstance(first, MutableMapping | MutableSequence) and len(first):
        raise GatherError(
            f"output {_named(path)} is the same {type(first).__name__} on every replica, which "
            "holds what the last one wrote to it; return a new one from each forward"
        )
    if nested.is_cache(first):
        join.leave_out_cache(first, path)
        return None
    children = [nested.checked_items(output, path, GatherError) for output in outputs]
    if children[0] is None:
        if not all(_equal(first, other) for other in others):
            raise _differ(path, outputs, "different values")
        return first
    named = [dict(items or ()) for items in children]
    if any(other.keys() != named[0].keys() for other in named):
        raise _differ(path, [list(items) for items in named], "different items")
    if len(named[0]) < len(children[0]):
        raise GatherError(
            f"output {_named(path)} has keys that are the same as text, among {list(first)}; "
            "rename them"
        )
    values = [_gather([items[name] for items in named], name, join) for name in named[0]]
    return nested.rebuild(first, values)


@dataclass(frozen=True, slots=True)
class _Join:
    """Join one tensor of each replica, by the arguments of ``gather``."""

    device: torch.device
    dim: int
    scalar_outputs: ScalarOutputs
    chunk_sizes: Sequence[int] | None
    losses: ChunkLosses

    def __call__(self, tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
        first = tensors[0]
        if self.scalar_outputs == "stack" and not first.is_nested and self._are_scalars(tensors):
            return torch.stack([tensor.to(self.device).reshape(()) for tensor in tensors])
        if len(tensors) == 1:
            return first.to(self.device)
        if any(t.is_nested or t.layout != torch.strided for t in tensors):
            raise GatherError(
                f"output {_named(path)} is a sparse or nested tensor, which is not joined; return "
                "a dense one"
            )
        if self._are_scalars(tensors):
            numbers = [tensor.reshape(()) if tensor.dim() else tensor for tensor in tensors]
            joined = self._scalars(numbers, path)
            return joined.reshape(first.shape) if first.dim() else joined
        # torch gives its own autograd functions no types.
        rows: torch.Tensor = Gather.apply(self.device, self._axis(tensors, path), *tensors)  # type: ignore[no-untyped-call]
        return rows

    def _are_scalars(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors are numbers: 0-dim, or with one entry for several samples."""
        if all(tensor.dim() == 0 for tensor in tensors):
            return True
        shape, most = tensors[0].shape, max(self.chunk_sizes or (1,))
        return most > 1 and shape.numel() == 1 and all(t.shape == shape for t in tensors)

    def leave_out_cache(self, cache: Any, path: str) -> None:
        """Warn, once for each model, that a cache of its replicas is not among the outputs."""
        warned = self.losses.history.warned
        if _named(path) not in warned:
            warned.add(_named(path))
            warn(
                f"output {_named(path)} is left out: a {type(cache).__name__} belongs to one model "
                "and not to its replicas; call the model with use_cache=False"
            )

    def _axis(self, tensors: Sequence[torch.Tensor], path: str) -> int:
        """Return the dimension of the samples.

        It is the only one whose size differs between the replicas, if that is the batch dimension
        or follows the number of samples, as in states of RNNs. In shapes that do not differ, it is
        the batch dimension if its size is a multiple of the chunk size; otherwise the only one that
        has this size.
        """
        shapes, sizes = [tensor.shape for tensor in tensors], self.chunk_sizes
        num_dims = len(shapes[0])
        dim = self.dim if self.dim >= 0 else self.dim + num_dims
        if not 0 <= dim < num_dims or any(len(shape) != num_dims for shape in shapes):
            raise _differ(path, tensors, f"shapes that cannot be joined along dim {self.dim}")
        differing = [d for d in range(num_dims) if len({shape[d] for shape in shapes}) > 1]
        if differing:
            lengths = [shape[differing[0]] for shape in shapes]
            if len(differing) == 1 and (differing[0] == dim or _follow(lengths, sizes)):
                return differing[0]
            if (
                len(differing) > 1
                and sizes
                and all([shape[d] for shape in shapes] == list(sizes) for d in differing)
            ):
                raise GatherError(
                    f"output {_named(path)} has an entry for each pair of samples of a chunk, and "
                    "pairs of samples of two chunks are missing; return a row for each sample and "
                    "compare them outside, or with gather=False keep each device's own pairs"
                )
            raise _differ(path, tensors, f"shapes that cannot be joined along dim {self.dim}")
        shape = shapes[0]
        if sizes is None:
            return dim
        if len(set(sizes)) == 1:
            others = [d for d in range(num_dims) if shape[d] == sizes[0]]
            if shape[dim] % sizes[0] == 0 or len(others) == 1:
                return dim if shape[dim] % sizes[0] == 0 else others[0]
        raise _without_rows(path, shapes, sizes)

    def _scalars(self, tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
        if self.scalar_outputs == "sum":
            return total(tensors, self.device)
        if all(map(is_loss, tensors)):
            return self.losses.join(tensors, path, self.device)
        moved = [tensor.to(self.device) for tensor in tensors]
        if all(bool(tensor == moved[0]) for tensor in moved):
            return moved[0]
        if any(tensor.dtype is torch.bool for tensor in moved):
            raise _differ(path, tensors, "different values")
        self.losses.history.warn(
            self.losses.described(path),
            "it is a whole number that differs between the replicas, so it is added up",
            "Return a row for each sample and count outside if that is not meant",
        )
        return total(moved, self.device)


def _follow(lengths: Sequence[int], chunk_sizes: Sequence[int] | None) -> bool:
    """Return whether lengths are the same multiple of the chunk sizes everywhere."""
    factors = {divmod(n, size) for n, size in zip(lengths, chunk_sizes or (), strict=False)}
    return len(factors) == 1 and factors.pop()[1] == 0


def _without_rows(
    path: str, shapes: Sequence[torch.Size], chunk_sizes: Sequence[int]
) -> GatherError:
    return GatherError(
        f"output {_named(path)} has shape {tuple(shapes[0])} on every replica, though these have "
        f"{', '.join(map(str, chunk_sizes))} samples, so it has no row for each of them: return a "
        "mean without dimensions (no unsqueeze, no keepdim), compute statistics outside, from "
        "gathered rows, and read parameters from model.module"
    )


def _equal(first: Any, other: Any) -> bool:
    if first is other:
        return True
    try:
        # A NaN is not equal to itself, yet it is the same value on each replica.
        return bool(first == other) or bool(first != first and other != other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _named(path: str) -> str:
    return path or "(the whole)"


def _differ(path: str, values: Sequence[Any], what: str) -> GatherError:
    shown = ", ".join(
        str(tuple(value.shape)) if isinstance(value, torch.Tensor) else repr(value)
        for value in values
    )
    shown = shown if len(shown) <= 200 else f"{shown[:200]} ..."
    return GatherError(
        f"output {_named(path)} cannot be joined: the replicas returned {what} ({shown}); return "
        "tensors, or what is equal on every replica"
    )


class Gather(torch.autograd.Function):
    """Concatenate on one device. Unlike ``torch.cat``, it needs no copy of each chunk there."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the concatenation on ``device`` of tensors that differ along ``dim`` only."""
        ctx.dim = dim
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        ctx.devices = [tensor.device for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        output = torch.empty(
            shape, dtype=dtype, device=device, memory_format=_memory_format(tensors)
        )
        for part, tensor in zip(output.split(ctx.sizes, dim), tensors, strict=True):
            part.copy_(tensor)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the part of the gradient for each tensor, on the tensor's device."""
        parts = grad.split(ctx.sizes, ctx.dim)
        return None, None, *(part.to(d) for part, d in zip(parts, ctx.devices, strict=True))


def _memory_format(tensors: Sequence[torch.Tensor]) -> torch.memory_format:
    """Return the channels-last format that all tensors have, or else the contiguous one."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        for memory_format in (torch.channels_last, torch.channels_last_3d):
            if all(tensor.is_contiguous(memory_format=memory_format) for tensor in tensors):
                return memory_format
    return torch.contiguous_format
