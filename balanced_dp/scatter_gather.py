"""Cutting the inputs into one chunk a device, and joining the replicas' outputs."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch.nn.parallel._functions import Scatter
from torch.nn.utils.rnn import PackedSequence

from . import containers
from .errors import GatherError, ScatterError

ScalarOutputs = Literal["mean", "sum", "stack"]
Path = tuple[str, ...]
Weights = Sequence[float] | Sequence[torch.Tensor]
"""Of a mean: numbers, or 0-dim tensors that add up to 1."""


def find_batch_size(
    inputs: Iterable[tuple[str, Any]], dim: int = 0, broadcast: Collection[str] = ()
) -> int | None:
    """Returns the size along ``dim`` of the first tensor that is to be cut, None if none is.

    Args:
        inputs: the arguments of the call and their names, positional ones first.
        dim: the batch dimension.
        broadcast: dotted paths of tensors, or of containers of tensors, that go whole.

    Raises:
        ScatterError: that tensor has no dimension ``dim``.
    """
    path, tensor = _first_to_cut(inputs, broadcast)
    return None if tensor is None else _size(tensor, dim, path)


def _first_to_cut(
    inputs: Iterable[tuple[str, Any]], broadcast: Collection[str]
) -> tuple[Path, torch.Tensor | None]:
    for name, value in inputs:
        for path, tensor in _tensors(value, tuple(name.split("."))):
            if tensor.dim() > 0 and not _is_broadcast(path, broadcast):
                return path, tensor
    return (), None


def scatter(
    inputs: Iterable[tuple[str, Any]],
    devices: Sequence[torch.device],
    chunk_sizes: Sequence[int] | None,
    dim: int = 0,
    broadcast: Collection[str] = (),
) -> list[list[Any]]:
    """Returns the values of the arguments for each device, in order. Differentiable.

    Tensors of batch size along ``dim`` are cut; 0-dim tensors and those named in ``broadcast`` go
    whole to each device; what is not a tensor is passed on, its containers as shallow copies. A
    tensor goes straight from where it is to each device. A chunk that is there already is a view
    if that keeps no more memory than the chunks do, else a copy.

    Args:
        inputs: the arguments of the call and their names.
        devices: where the chunks go.
        chunk_sizes: one for each device, the batch size in all. None means that nothing is cut:
            every tensor goes whole to each device.
        dim: the batch dimension.
        broadcast: dotted paths of tensors, or of containers of tensors, that go whole.

    Raises:
        ScatterError: the size of a tensor along ``dim`` is not the batch size.
    """
    inputs = list(inputs)
    first_path, _ = ((), None) if chunk_sizes is None else _first_to_cut(inputs, broadcast)
    cut = _Cut(devices, chunk_sizes, dim, broadcast, ".".join(first_path))
    columns = [_scatter(value, tuple(name.split(".")), cut) for name, value in inputs]
    return [[column[i] for column in columns] for i in range(len(devices))]


@dataclass(frozen=True, slots=True)
class _Cut:
    devices: Sequence[torch.device]
    chunk_sizes: Sequence[int] | None
    dim: int
    broadcast: Collection[str]
    first_name: str
    """The tensor that said what the batch size is."""

    def __call__(self, tensor: torch.Tensor, path: Path) -> list[torch.Tensor]:
        sizes = self.chunk_sizes
        if sizes is None or tensor.dim() == 0 or _is_broadcast(path, self.broadcast):
            parts: Sequence[torch.Tensor] = [tensor] * len(self.devices)
        elif _size(tensor, self.dim, path) == sum(sizes):
            parts = self._parts(tensor, sizes)
        else:
            name, first = ".".join(path), self.first_name
            fact = (
                f"input {name} of shape {tuple(tensor.shape)} has size {tensor.size(self.dim)} "
                f"along dim {self.dim}, but the batch has {sum(sizes)} samples"
            )
            remedy = (
                f"if {name} is not one entry a sample, broadcast=({name!r},) copies it whole to "
                "each device"
            )
            if first != name:
                fact += f" by its first tensor, {first}"
                remedy += f", and if {first} is not, broadcast=({first!r},) does"
            raise ScatterError(f"{fact}; {remedy}")
        return [move(part, device) for part, device in zip(parts, self.devices, strict=True)]

    def _parts(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        types = {device.type for device in self.devices}
        if tensor.device.type == "cpu" and types == {"cuda"}:
            # In streams of their own, so that what is queued already does not hold them up.
            on_devices: Sequence[torch.Tensor]
            indices = [device.index for device in self.devices]
            on_devices = Scatter.apply(indices, list(sizes), self.dim, tensor)
            return on_devices
        parts = list(tensor.split(list(sizes), self.dim))
        staying = [i for i, device in enumerate(self.devices) if device == tensor.device]
        if tensor.untyped_storage().nbytes() > sum(parts[i].nbytes for i in staying):
            # As views they would keep the whole batch there for as long as autograd needs them.
            for i in staying:
                parts[i] = move(parts[i], tensor.device, copy=True)
        elif tensor.requires_grad:
            # One of several views of a call cannot be written in place, and a module may begin so.
            starts = list(accumulate(sizes, initial=0))
            for i in staying:
                parts[i] = tensor.narrow(self.dim, starts[i], sizes[i])
        return parts


def _scatter(value: Any, path: Path, cut: _Cut) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return cut(value, path)
    if isinstance(value, PackedSequence) and cut.chunk_sizes is None:
        # Torch's stubs know PackedSequence.to with a dtype only.
        return [value.to(device) for device in cut.devices]  # type: ignore[arg-type]
    children = _items(value, path, ScatterError)
    if children is None:
        return [value] * len(cut.devices)
    columns = [_scatter(child, (*path, name), cut) for name, child in children]
    return [
        containers.rebuild(value, [column[i] for column in columns])
        for i in range(len(cut.devices))
    ]


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    else:
        for name, child in _items(value, path, ScatterError) or ():
            yield from _tensors(child, (*path, name))


def _items(value: Any, path: Path, error: type[Exception]) -> list[tuple[str, Any]] | None:
    items = containers.items(value)
    where = ".".join(path) or "the output"
    if isinstance(value, PackedSequence):
        raise error(
            f"{where} is a PackedSequence, which has no batch dimension to split; pass the padded "
            "batch and its lengths, and pack and unpack inside forward"
        )
    if any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__):
        raise error(
            f"{where} is a {type(value).__name__}, which belongs to one model and not to its "
            "replicas; call the model with use_cache=False"
        )
    if items is None and isinstance(value, Mapping | Set | Sequence) and not isinstance(value, str):
        held = value.values() if isinstance(value, Mapping) else value
        if any(isinstance(item, torch.Tensor) for item in held):
            raise error(
                f"{where} is a {type(value).__name__}, which cannot be built anew with other "
                "tensors; use a dict, list or tuple"
            )
    return items


def _is_broadcast(path: Path, broadcast: Collection[str]) -> bool:
    return any(".".join(path[:end]) in broadcast for end in range(1, len(path) + 1))


def _size(tensor: torch.Tensor, dim: int, path: Path) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        name = ".".join(path)
        raise ScatterError(
            f"input {name} of shape {tuple(tensor.shape)} has no dimension {dim} to split; "
            f"broadcast=({name!r},) copies it whole to each device"
        )
    return tensor.size(dim)


def move(tensor: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
    """Returns the tensor on ``device``, a new one if ``copy`` is set. Waits for nothing it may."""
    return move_all([tensor], device, copy)[0]


def move_all(
    tensors: Iterable[torch.Tensor], device: torch.device, copy: bool = False
) -> list[torch.Tensor]:
    """Returns each tensor as ``move`` does."""
    # A copy to the CPU that does not block could be read before it is there.
    non_blocking = device.type != "cpu"
    return [tensor.to(device, non_blocking=non_blocking, copy=copy) for tensor in tensors]


def gather(
    outputs: Sequence[Any],
    device: torch.device,
    dim: int = 0,
    scalar_outputs: ScalarOutputs = "mean",
    weights: Weights | None = None,
) -> Any:
    """Joins the outputs of the replicas into one on ``device``. Differentiable.

    Tensors are concatenated along ``dim``. 0-dim tensors become one 0-dim tensor, their mean
    weighted by ``weights`` (integers and bools have none, and must be equal), or their sum, or a
    vector of them. Mappings, dataclasses, named tuples, tuples and lists are joined item by item.
    Anything else must be equal on every replica and is passed on.

    Args:
        outputs: one output a replica, at least one.
        device: where the joined tensors go.
        dim: the batch dimension.
        scalar_outputs: what becomes of 0-dim tensors: ``"mean"``, ``"sum"`` or ``"stack"``.
        weights: one non-negative number a replica, by default all equal. A replica of weight 0 has
            no part in the mean, even if its value is NaN; if all are 0 they count as equal. 0-dim
            tensors are parts of the whole already, and are not read.

    Raises:
        GatherError: the outputs differ in structure, or in a value that is not a tensor.
    """
    weights = [1.0] * len(outputs) if weights is None else weights
    return _gather(list(outputs), (), _Join(device, dim, scalar_outputs, weights))


@dataclass(frozen=True, slots=True)
class _Join:
    device: torch.device
    dim: int
    scalar_outputs: ScalarOutputs
    weights: Weights

    def __call__(self, tensors: Sequence[torch.Tensor], path: Path) -> torch.Tensor:
        if all(tensor.dim() == 0 for tensor in tensors):
            return self._scalars([tensor.to(self.device) for tensor in tensors], path)
        if len(tensors) == 1:
            return tensors[0].to(self.device)
        if not _differ_along_only(self.dim, tensors):
            raise _differ(path, tensors, f"shapes that cannot be joined along dim {self.dim}")
        # torch gives its own autograd functions no types.
        joined: torch.Tensor = Gather.apply(self.device, self.dim, *tensors)  # type: ignore[no-untyped-call]
        return joined

    def _scalars(self, tensors: Sequence[torch.Tensor], path: Path) -> torch.Tensor:
        if self.scalar_outputs == "stack":
            return torch.stack(list(tensors))
        if self.scalar_outputs == "sum":
            return functools.reduce(torch.add, tensors)
        if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            if all(bool(tensor == tensors[0]) for tensor in tensors):
                return tensors[0]
            raise GatherError(
                f"output {'.'.join(path) or '(the whole)'} is a number of type {tensors[0].dtype} "
                "that differs between the replicas, and a count has no mean; return it as a "
                "tensor of one entry, or choose scalar_outputs='sum' or 'stack'"
            )
        shares = [weight for weight in self.weights if isinstance(weight, torch.Tensor)]
        if shares:
            pairs = zip(tensors, shares, strict=True)
            return functools.reduce(torch.add, [t * share.to(t.dtype) for t, share in pairs])
        weights = [float(weight) for weight in self.weights]
        weights = weights if any(weights) else [1.0] * len(tensors)
        total = sum(weights)
        parts = [t * (weight / total) for t, weight in zip(tensors, weights, strict=True) if weight]
        return functools.reduce(torch.add, parts)


def _differ_along_only(dim: int, tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0]
    if not -first.dim() <= dim < first.dim():
        return False
    axis = dim % first.dim()
    return all(
        tensor.dim() == first.dim()
        and tensor.shape[:axis] == first.shape[:axis]
        and tensor.shape[axis + 1 :] == first.shape[axis + 1 :]
        for tensor in tensors
    )


def _gather(outputs: list[Any], path: Path, join: _Join) -> Any:
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs) and not all(
        isinstance(output, torch.Tensor) for output in outputs
    ):
        raise _differ(path, outputs, "different types")
    if isinstance(first, torch.Tensor):
        return join(outputs, path)
    children = [_items(output, path, GatherError) for output in outputs]
    if children[0] is None:
        if not all(_equal(first, other) for other in outputs[1:]):
            raise _differ(path, outputs, "different values")
        return first
    named = [dict(items or ()) for items in children]
    if any(other.keys() != named[0].keys() for other in named):
        raise _differ(path, [list(items) for items in named], "different items")
    values = [_gather([items[name] for items in named], (*path, name), join) for name in named[0]]
    return containers.rebuild(first, values)


def _equal(first: Any, other: Any) -> bool:
    if first is other:
        return True
    try:
        # A NaN is equal to nothing, itself included, yet it is the same value on each replica.
        return bool(first == other) or bool(first != first and other != other)
    except (TypeError, ValueError, RuntimeError):
        return False


def _differ(path: Path, values: Sequence[Any], what: str) -> GatherError:
    shown = ", ".join(
        str(tuple(value.shape)) if isinstance(value, torch.Tensor) else repr(value)
        for value in values
    )
    if len(shown) > 200:
        shown = shown[:200] + " ..."
    return GatherError(
        f"output {'.'.join(path) or '(the whole)'} cannot be joined: the replicas returned {what} "
        f"({shown}); return tensors, or what is equal on every replica"
    )


class Gather(torch.autograd.Function):
    """Concatenates on one device. Unlike ``torch.cat`` it needs no copy of each chunk there."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Returns the tensors, which differ along ``dim`` only, as one on ``device``."""
        ctx.dim = dim
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        ctx.devices = [tensor.device for tensor in tensors]
        shape = list(tensors[0].shape)
        shape[dim] = sum(ctx.sizes)
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        output = torch.empty(shape, dtype=dtype, device=device)
        for part, tensor in zip(output.split(ctx.sizes, dim), tensors, strict=True):
            part.copy_(tensor)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns each tensor's part of the gradient, on the tensor's device."""
        parts = grad.split(ctx.sizes, ctx.dim)
        return None, None, *(part.to(d) for part, d in zip(parts, ctx.devices, strict=True))
