"""Join the outputs of all replicas into one output, on one device."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..emulation.machine import is_symbolic
from ..errors import GatherError
from . import nested
from .losses.join import Call, has_means
from .losses.weights import joined, moved


@dataclass(frozen=True, slots=True)
class Gather:
    """Join the outputs of the replicas into one output on one device. Differentiable.

    The chunk size is the number of samples of a replica. A dimension of the tensors *fits* if its
    size is k times the chunk size on every replica, with the same whole number k.

    - Tensors whose shapes differ in one dimension are concatenated along this dimension. It must be
      the batch dimension, or a dimension that fits, such as dimension 1 of the states of an RNN,
      which have the shape ``(layers, N, *)``.
    - Tensors of equal shapes are concatenated along the batch dimension if it fits. If it does not,
      they are concatenated along the dimension whose size is the chunk size on every replica. If
      several dimensions have this size, the tensors cannot be concatenated. If no dimension has
      this size, but the batch dimension has size 1, the tensors are concatenated along the batch
      dimension.
    - The rows of concatenated tensors are in the order of the devices. If a replica's number of
      rows differs from its chunk size, a warning is issued. Tensors that cannot be concatenated
      must be equal on all replicas, and one of them is returned.
    - If ``squeeze()`` has removed the batch dimension of a chunk of one sample, this dimension is
      restored before the tensors are concatenated.
    - 0-dim tensors are joined into one value or, with ``scalar_outputs="stack"``, stacked into a
      vector. If any chunk has several samples, tensors of one element, such as those of shape
      ``(1,)``, are joined like 0-dim tensors. Integers and bools that differ between replicas are
      added up, with a warning. The sum of bools is True if any of them is True.
    - The items of a list or tuple (not a named tuple) may be *entries*, one for each sample. The
      entries of all replicas are put into one list or tuple. Lists and tuples of other items, such
      as ``(logits, states)``, are joined item by item, like the containers below.
    - If there is only one replica, or if the length of the list or tuple differs from the chunk
      size on any replica, the items are not entries.
    - If there are several replicas, and the length is the chunk size on each of them, the items may
      be entries. With chunks of different sizes, they are taken for entries. With chunks of equal
      size, the items of a tuple are not taken for entries. The items of a list are taken for
      entries, except in three cases: the list is equal on all replicas; the list has a tensor whose
      batch dimension has the chunk size; or the list has tensors, each of one element.
    - In each of these three cases, a warning is issued, since the items may still be entries. If
      the list has one item, the warning is issued only if the item is a dictionary.
    - Other containers are joined item by item: each item of the result is joined from the items
      with the same name or position. A key-value cache of Hugging Face's transformers becomes None,
      with a warning. Any other value must be equal on every replica and is returned unchanged.

    Args:
        device: the device of the joined tensors.
        call: the ``Call`` that computed the outputs. It holds the chunk sizes and the batch
            dimension, and says how 0-dim tensors are joined.

    Raises:
        GatherError: in each of these cases:

            - The outputs differ in structure, or in a value that is not a tensor.
            - No single dimension of a tensor holds the samples.
            - An output has a type that cannot be joined.
            - All replicas return the same list or dictionary object. Each must return a new one.
    """

    device: torch.device
    call: Call

    def join(self, outputs: Sequence[Any], path: str = "") -> Any:
        """Return the outputs of one or more replicas joined into one output.

        Args:
            outputs: the output of each replica or, if ``path`` is not empty, the part of each
                output at this path.
            path: the dotted path of the parts, such as ``"boxes.0"``. It is empty for whole
                outputs.
        """
        first, *others = outputs
        if all(isinstance(output, Tensor) for output in outputs):
            return self._tensors(outputs, path)
        if nested.is_cache(first):
            reason = f"it is None, because a {type(first).__name__} belongs to one model"
            self.call.warn(path, reason, "Call the model with use_cache=False")
            return None
        named = [dict(nested.checked_items(one, path, GatherError) or ()) for one in outputs]
        is_mutable = isinstance(first, MutableMapping | MutableSequence)
        if is_mutable and first and others and all(other is first for other in others):
            fact = f"is a single {type(first).__name__} that all replicas write to"
            raise _error(path, f"{fact}; return a new one from each call of forward")
        if self._are_entries(outputs, path):
            entries = [self.join([one], name) for own in named for name, one in own.items()]
            return nested.rebuild(first, entries)
        forms = [(type(one), items.keys()) for one, items in zip(outputs, named, strict=True)]
        if any(form != forms[0] for form in forms):
            raise _differ(path, outputs, "different structures")
        if nested.items(first) is None:
            if not all(_equal(first, other) for other in others):
                raise _differ(path, outputs, "different values")
            return first
        values = [self.join([items[name] for items in named], name) for name in named[0]]
        return nested.rebuild(first, values)

    def _are_entries(self, lists: Sequence[Any], path: str) -> bool:
        """Return whether each list has one entry for each sample of its replica's chunk.

        If so, ``join`` puts the entries of all lists into one list. If not, it joins the first
        items of all lists, then their second items, and so on.
        """
        sizes = self.call.chunk_sizes
        are_lists = all(isinstance(o, list | tuple) and not hasattr(o, "_fields") for o in lists)
        if not are_lists or tuple(map(len, lists)) != sizes or len(sizes) < 2:
            return False
        if len(set(sizes)) > 1:
            return True
        if isinstance(lists[0], tuple):
            return False
        columns = list(zip(*map(nested.tensors, lists), strict=False))
        dim, is_same = self.call.dim, all(_equal(lists[0], other) for other in lists)
        # A tensor of one element is taken for a number, such as a loss, not for a row of a sample.
        are_numbers = bool(columns) and all(t.numel() == 1 for own in columns for t in own)
        rows = [{t.shape[dim:][:1] for t in own if t.numel() > 1} for own in columns]
        if not (are_numbers or is_same or {sizes[:1]} in rows):
            return True
        # If each chunk has one sample, a list of one item is most likely a single output, so there
        # is no warning. But a list of one dictionary may be the detections of this sample.
        if sizes[0] > 1 or isinstance(lists[0][0], MutableMapping):
            reason = f"it is a list as long as each chunk, {sizes[0]}, but is joined item by item"
            remedy = "If items are samples, return a tensor with a row for each; if not, a tuple"
            self.call.warn(path, reason, remedy)
        return False

    def _tensors(self, tensors: Sequence[Tensor], path: str) -> Tensor:
        first, how = tensors[0], self.call.scalar_outputs
        sizes = self.call.chunk_sizes or (0,) * len(tensors)
        # A single tensor (the output of the only replica, or an entry of a list) is not joined. An
        # exception is a 0-dim output of the only replica: with "stack", it becomes a vector.
        if len(tensors) == 1 and (first.dim() or how != "stack" or len(sizes) > 1):
            return first.to(self.device)
        shapes = {tensor.shape for tensor in tensors}
        if len(shapes) == 1 and self.call.is_number(first, path):
            number = self._number([t.reshape(()) if t.dim() else t for t in tensors], path)
            return number if number.dim() else number.reshape(first.shape)
        rank = max(map(len, shapes))
        dim = self.call.dim + rank * (self.call.dim < 0)
        # In a chunk of one sample, squeeze() may have removed the batch dimension.
        at, pairs = min(dim, rank - 1), zip(tensors, sizes, strict=True)
        rows = [t.unsqueeze(at) if (size, t.dim()) == (1, rank - 1) else t for t, size in pairs]
        try:
            axis = self._axis([tensor.shape for tensor in rows], dim, path)
        except GatherError:
            values = [] if is_symbolic(first.device) else [tensor.cpu() for tensor in tensors]
            if len(shapes) > 1 or not all(_equal(values[0], value) for value in values):
                raise
            return first.to(self.device)  # a constant, such as the anchors of a detector
        # torch does not annotate Function.apply.
        return Concatenate.apply(self.device, axis, *rows)  # type: ignore[no-untyped-call, no-any-return]

    def _number(self, numbers: Sequence[Tensor], path: str) -> Tensor:
        how = self.call.scalar_outputs
        if how not in ("stack", "sum") and all(map(has_means, numbers)):
            return self.call.join(numbers, path, self.device)
        numbers = moved(numbers, self.device)
        if how == "stack":
            return torch.stack(numbers)
        if how != "sum":
            is_same = all(bool(number == numbers[0]) for number in numbers)
            if not is_same or (numbers[0] and numbers[0].dtype != torch.bool):
                reason = "it is an integer or bool, which is added up if the replicas differ"
                self.call.warn(path, reason, "Return a row per sample: squeeze(-1), not squeeze()")
            if is_same:
                return numbers[0]
        return joined(numbers, None, self.device)

    def _axis(self, shapes: Sequence[torch.Size], dim: int, path: str) -> int:
        """Return the dimension along which tensors of ``shapes`` are concatenated.

        Args:
            shapes: the shape of each replica's tensor.
            dim: the batch dimension.
            path: the dotted path of the tensors in the output.

        Raises:
            GatherError: no single dimension holds the samples.
        """
        sizes = self.call.chunk_sizes
        lengths = list(zip(*shapes, strict=True)) if len(set(map(len, shapes))) == 1 else []
        differing = [d for d, own in enumerate(lengths) if len(set(own)) > 1]
        # The rows per sample along each dimension: a set of the replicas' different numbers. The
        # sets are empty if the batch was not split.
        factors = [{n / size for n, size in zip(own, sizes, strict=False)} for own in lengths]
        following = [d for d, own in enumerate(factors) if len(own) < 2 and sum(own) % 1 == 0]
        exact = [d for d in following if lengths[d] == sizes]
        # The candidates, in order of preference: dimensions whose sizes differ; ``dim`` if its size
        # is a multiple of the chunk size; dimensions whose size is the chunk size; ``dim`` if each
        # replica has one row, such as its loss.
        one_row = [dim] if lengths[dim:] and set(lengths[dim]) == {1} else []
        axes = differing or ([dim] if dim in following else exact) or one_row
        if len(axes) != 1 or axes[0] not in (dim, *following):
            fact = f"has shapes {[*map(tuple, shapes)]} for chunks of {sizes}"
            remedy = "return a row per sample or a mean; pad to total_length=; compare afterwards"
            raise _error(path, f"{fact}, so no single dimension holds the samples: {remedy}")
        own = lengths[axes[0]]
        if sizes and own != sizes and any(own):
            reason = f"it has {own} rows for chunks of {sizes}, joined in the order of the devices"
            remedy = "Return shape (N, rows, ...), or several outputs; squeeze(-1), not squeeze()"
            self.call.warn(path, reason, remedy)
        return axes[0]


def _equal(first: Any, other: Any) -> bool:
    try:
        # Two NaN count as equal here, although NaN == NaN is False.
        same: Any = first is other or (first == other) | ((first != first) & (other != other))
        return bool(same.all() if hasattr(same, "all") else same)
    except Exception:  # arrays and unset fields raise exceptions of many kinds
        return False


def _error(path: str, message: str) -> GatherError:
    return GatherError(f"output {path or '(the whole)'} {message}")


def _differ(path: str, values: Sequence[Any], what: str) -> GatherError:
    shown = ", ".join(str(tuple(v.shape)) if isinstance(v, Tensor) else repr(v) for v in values)
    fact = f"cannot be joined: the replicas returned {what} ({shown[:200]})"
    return _error(path, f"{fact}; return tensors, or values equal on every replica")


class Concatenate(torch.autograd.Function):
    """Concatenate tensors of several devices into one tensor on one device.

    ``torch.cat`` would need a copy of each tensor on that device first. This function copies each
    tensor directly into the result.
    """

    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: Tensor) -> Tensor:
        """Return tensors concatenated on ``device``. Their shapes may differ only along ``dim``."""
        ctx.dim, ctx.devices, first = dim, [tensor.device for tensor in tensors], tensors[0]
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
        """Return each tensor's part of the gradient, on the device of the tensor."""
        return None, None, *map(Tensor.to, grad.split(ctx.sizes, ctx.dim), ctx.devices)
