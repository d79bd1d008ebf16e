"""Join the outputs of the replicas on one device."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import ArgumentError, GatherError
from . import nested
from .losses.join import ChunkLosses, is_loss
from .losses.weights import total

ScalarOutputs = Literal["auto", "mean", "sum", "stack"]


def check_scalar_outputs(scalar_outputs: str) -> None:
    """Raise ArgumentError unless ``scalar_outputs`` is one of ``ScalarOutputs``."""
    kinds = get_args(ScalarOutputs)
    if scalar_outputs not in kinds:
        raise ArgumentError(f"scalar_outputs must be one of {kinds}, got {scalar_outputs!r}")


@dataclass(frozen=True, slots=True)
class Gather:
    """Join the outputs of the replicas into one. Differentiable.

    - Tensors are concatenated along the batch dimension if its size is the same whole multiple of
      the chunk size on every replica, or if the shapes differ in it alone. Otherwise they are
      concatenated along the only other dimension that follows the chunk sizes, as in states of
      RNNs. If a sample has several rows, or none, the rows are in the order of the devices, with a
      warning.
    - If ``squeeze()`` has removed the batch dimension of a chunk of one sample, it is restored.
    - 0-dim tensors become one 0-dim tensor or a vector; integers that differ add up, with a
      warning, and bools must be equal.
    - A list or tuple that is as long as the chunk on every replica has an entry for each sample;
      lists are concatenated. In chunks of one size, tensors with a batch dimension mean items of
      all samples instead. If both are possible, a warning names the choice.
    - Other containers are joined item by item. A key-value cache of transformers becomes None.
      Anything else must be equal on every replica and is returned as it is.

    Args:
        device: the device of the joined tensors.
        losses: the chunk sizes, the batch dimension and how 0-dim tensors were computed.
        scalar_outputs: how 0-dim tensors are joined, as in ``BalancedDataParallel``.

    Raises:
        GatherError: the outputs differ in structure, or in a value that is not a tensor; or a
            tensor does not have its samples along a dimension.
    """

    device: torch.device
    losses: ChunkLosses
    scalar_outputs: ScalarOutputs = "auto"

    def join(self, outputs: Sequence[Any], path: str = "") -> Any:
        """Return one output for the outputs of the replicas, at least one."""
        first, *others = outputs
        if all(isinstance(output, Tensor) for output in outputs):
            return self._tensors(outputs, path)
        if any(type(other) is not type(first) for other in others):
            raise _differ(path, outputs, "different types")
        is_mutable = isinstance(first, MutableMapping | MutableSequence) and len(first) > 0
        if is_mutable and others and all(other is first for other in others):
            fact = f"is one {type(first).__name__} that all replicas share and write"
            raise _error(path, f"{fact}; return a new one from each forward")
        if nested.is_cache(first):
            reason = f"a {type(first).__name__} belongs to one model, so it is left out"
            self._warn(path, reason, "Call the model with use_cache=False")
            return None
        children = [nested.checked_items(output, path, GatherError) or [] for output in outputs]
        if nested.items(first) is None:
            if not all(_equal(first, other) for other in others):
                raise _differ(path, outputs, "different values")
            return first
        if isinstance(first, list | tuple) and self._are_entries(outputs, path):
            entries = [self.join([entry], name) for items in children for name, entry in items]
            return nested.rebuild(first, entries)
        named = [dict(items) for items in children]
        if any(other.keys() != named[0].keys() for other in named):
            raise _differ(path, [list(items) for items in named], "different items")
        values = [self.join([items[name] for items in named], name) for name in named[0]]
        return nested.rebuild(first, values)

    def _are_entries(self, lists: Sequence[Any], path: str) -> bool:
        """Return whether lists have an entry for each sample, rather than items for all of them."""
        sizes = list(self.losses.chunk_sizes or ())
        if hasattr(lists[0], "_fields") or [len(one) for one in lists] != sizes or len(sizes) < 2:
            return False
        if len(set(sizes)) > 1:
            return True
        size, dim = sizes[0], self.losses.dim
        columns = zip(*map(nested.tensors, lists), strict=False)
        lengths = [{n for t in own for n in t.shape[dim:][:1]} for own in columns]
        if any(lengths):
            are_items = {size} in lengths
        else:  # numbers, or other values
            are_items = bool(lengths) or all(_equal(lists[0], one) for one in lists)
        may_be_entries = size > 1 or isinstance(lists[0][0], MutableMapping)  # as of detections
        if are_items and isinstance(lists[0], list) and may_be_entries and lengths:
            reason = f"it is as long as each chunk, {size}, and is joined item by item"
            remedy = "Return a tensor of entries of samples, or a tuple of items of all samples"
            self._warn(path, reason, remedy)
        return not are_items

    def _tensors(self, tensors: Sequence[Tensor], path: str) -> Tensor:
        first, dim = tensors[0], self.losses.dim
        sizes = self.losses.chunk_sizes or [0] * len(tensors)
        if len(tensors) == 1 and (first.dim() or self.scalar_outputs != "stack"):
            return first.to(self.device)
        shapes = {tensor.shape for tensor in tensors}
        # A tensor with one entry for several samples counts as a number.
        if shapes == {()} or (len(shapes) == 1 and first.numel() == 1 < max(sizes)):
            numbers = [tensor.reshape(()) if tensor.dim() else tensor for tensor in tensors]
            if self.scalar_outputs == "stack":
                return torch.stack([number.to(self.device) for number in numbers])
            joined = self._number(numbers, path)
            return joined.reshape(first.shape) if first.dim() else joined
        rank = max(map(len, shapes))
        dim += rank if dim < 0 else 0
        rows = [  # squeeze() has removed the batch dimension of a chunk of one sample
            tensor.unsqueeze(dim) if size == 1 and dim <= tensor.dim() == rank - 1 else tensor
            for tensor, size in zip(tensors, sizes, strict=True)
        ]
        axis = self._axis([tensor.shape for tensor in rows], dim, path)
        # torch gives its own autograd functions no types.
        return Concatenate.apply(self.device, axis, *rows)  # type: ignore[no-untyped-call, no-any-return]

    def _number(self, numbers: Sequence[Tensor], path: str) -> Tensor:
        if self.scalar_outputs == "sum":
            return total(numbers, self.device)
        if all(map(is_loss, numbers)):
            return self.losses.join(numbers, path, self.device)
        moved = [number.to(self.device) for number in numbers]
        if all(bool(number == moved[0]) for number in moved):
            return moved[0]
        if any(number.dtype is torch.bool for number in moved):
            raise _differ(path, numbers, "different values")
        reason = "it is an integer that differs between the replicas, so it is added up"
        self._warn(
            path, reason, "If unintended, return rows, with squeeze(-1) instead of squeeze()"
        )
        return total(moved, self.device)

    def _axis(self, shapes: Sequence[torch.Size], dim: int, path: str) -> int:
        """Return the dimension along which tensors are concatenated."""
        sizes = list(self.losses.chunk_sizes or ())
        has_one_rank = len(set(map(len, shapes))) == 1
        lengths = [list(own) for own in zip(*shapes, strict=True)] if has_one_rank else []
        differing = [d for d, own in enumerate(lengths) if len(set(own)) > 1]
        following = [d for d, own in enumerate(lengths) if _follow(own, sizes)]
        if differing:
            axes = [d for d in differing if d in (dim, *following)]
        else:
            axes = [dim] if dim in following else [d for d in following if lengths[d] == sizes]
        if len(axes) == 1 >= len(differing):
            own = lengths[axes[0]]
            if sizes and own != sizes and any(own):
                reason = f"it has {own} rows for chunks of {sizes}, in the order of the devices"
                remedy = "Return (N, rows, ...) or several outputs, and squeeze(-1), not squeeze()"
                self._warn(path, reason, remedy)
            return axes[0]
        shown = [tuple(shape) for shape in shapes]
        raise _error(
            path,
            f"has shapes {shown} for chunks of {sizes}; its samples are not along one dimension: "
            "return a row for each sample, or a mean without dimensions; pad to one length for all "
            "chunks, as total_length= of pad_packed_sequence does; compare each pair of samples "
            "outside, or on its device with gather=False; and write squeeze(-1), not squeeze()",
        )

    def _warn(self, path: str, reason: str, remedy: str) -> None:
        self.losses.history.warn(self.losses.described(path), reason, remedy)


def _follow(lengths: Sequence[int], chunk_sizes: Sequence[int]) -> bool:
    """Return whether lengths are the same multiple of the chunk sizes, if they are known."""
    factors = {n / size for n, size in zip(lengths, chunk_sizes, strict=False)}
    return not factors or (len(factors) == 1 and factors.pop().is_integer())


def _equal(first: Any, other: Any) -> bool:
    try:
        # A NaN is not equal to itself, yet it is the same value on each replica.
        same = (first == other) | ((first != first) & (other != other))
        return first is other or bool(same.all() if hasattr(same, "all") else same)
    except Exception:  # those of arrays and of unset fields are of many kinds
        return False


def _error(path: str, message: str) -> GatherError:
    return GatherError(f"output {path or '(the whole)'} {message}")


def _differ(path: str, values: Sequence[Any], what: str) -> GatherError:
    shown = ", ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else repr(v) for v in values)
    fact = f"cannot be joined: the replicas returned {what} ({shown[:200]})"
    return _error(path, f"{fact}; return tensors, or values equal on every replica")


class Concatenate(torch.autograd.Function):
    """Concatenate on one device. Unlike ``torch.cat``, it needs no copy of each chunk there."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: Tensor) -> Tensor:
        """Return the concatenation on ``device`` of tensors that differ along ``dim`` only."""
        first = tensors[0]
        ctx.dim, ctx.devices = dim, [tensor.device for tensor in tensors]
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        shape = [*first.shape[:dim], sum(ctx.sizes), *first.shape[dim + 1 :]]
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        # Keep channels_last, or the next convolution would copy the tensor.
        layout = sorted(range(first.dim()), key=first.stride, reverse=True)
        output = torch.empty_permuted(shape, layout, dtype=dtype, device=device)
        for part, tensor in zip(output.split(ctx.sizes, dim), tensors, strict=True):
            part.copy_(tensor)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the part of the gradient for each tensor, on the tensor's device."""
        parts = grad.split(ctx.sizes, ctx.dim)
        return None, None, *(part.to(d) for part, d in zip(parts, ctx.devices, strict=True))
