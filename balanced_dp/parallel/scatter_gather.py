"""Cutting the inputs into one chunk a device, and joining the replicas' outputs."""

from __future__ import annotations

import functools
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
    Set,
)
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import PackedSequence

from ..devices import copy_stream, is_cuda
from ..errors import GatherError, ScatterError, warn
from . import nested
from .call_inputs import Arguments, named_arguments
from .losses.join import ChunkLosses, is_loss
from .losses.terms import weighted_mean

ScalarOutputs = Literal["auto", "mean", "sum", "stack"]
Path = tuple[str, ...]


class Scattered(Sequence[Any]):
    """A value with an entry for each device, cut already.

    Attributes:
        devices: where the entries are.
        chunk_sizes: how many samples each has; None where nothing was cut.
    """

    devices: tuple[torch.device, ...]
    chunk_sizes: tuple[int, ...] | None


def find_batch_size(
    inputs: Iterable[tuple[str, Any]],
    dim: int = 0,
    broadcast: Collection[str] = (),
    split: Collection[str] = (),
) -> int | None:
    """Returns the size along ``dim`` of the first tensor that is to be cut, None if none is.

    Args:
        inputs: the arguments of the call and their names, positional ones first.
        dim: the batch dimension.
        broadcast: dotted paths of tensors, or of containers of tensors, that go whole.
        split: dotted paths of sequences with an entry for each sample; the first of them, or of
            what is cut already, counts where there is no tensor.

    Raises:
        ScatterError: that tensor has no dimension ``dim``.
    """
    path, value = _first_to_cut(inputs, broadcast, split)
    if isinstance(value, torch.Tensor):
        return _size(value, dim, path)
    if isinstance(value, Scattered):
        return None if value.chunk_sizes is None else sum(value.chunk_sizes)
    return None if value is None else len(value)


def _first_to_cut(
    inputs: Iterable[tuple[str, Any]], broadcast: Collection[str], split: Collection[str]
) -> tuple[Path, Any]:
    sequences: list[tuple[Path, Any]] = []
    for name, argument in inputs:
        routes: list[tuple[Path, Any]] = [(tuple(name.split(".")), argument)]
        while routes:
            path, value = routes.pop(0)
            is_named = ".".join(path) in split and not isinstance(value, torch.Tensor)
            if is_named or isinstance(value, Scattered):
                sequences.append((path, value))
            elif isinstance(value, torch.Tensor):
                if value.dim() > 0 and not _is_broadcast(path, broadcast):
                    return path, value
            else:
                items = _items(value, path, ScatterError) or ()
                routes[:0] = [((*path, name), child) for name, child in items]
    return sequences[0] if sequences else ((), None)


def scatter(
    inputs: Iterable[tuple[str, Any]],
    devices: Sequence[torch.device],
    chunk_sizes: Sequence[int] | None,
    dim: int = 0,
    broadcast: Collection[str] = (),
    split: Collection[str] = (),
    warned: set[str] | None = None,
) -> list[list[Any]]:
    """Returns the values of the arguments for each device, in order. Differentiable.

    Tensors of batch size along ``dim`` are cut, and so are the sequences named in ``split``; 0-dim
    tensors and those named in ``broadcast`` go whole to each device; what is not a tensor is passed
    on, its containers as shallow copies. A tensor goes straight from where it is to each device. A
    chunk that is there already is a view if that keeps no more memory than the chunks do, else a
    copy.

    Args:
        inputs: the arguments of the call and their names.
        devices: where the chunks go.
        chunk_sizes: one for each device, the batch size in all. None means that nothing is cut:
            every tensor goes whole to each device.
        dim: the batch dimension.
        broadcast: dotted paths of tensors, or of containers of tensors, that go whole.
        split: dotted paths of sequences (lists, tuples, arrays) with an entry for each sample.
        warned: paths that have been warned of, to which others are added.

    Raises:
        ScatterError: the size of a tensor along ``dim`` is not the batch size, nor is the length of
            a sequence in ``split``.

    Warns:
        BalanceWarning: another sequence is as long as the batch, so it may have an entry a sample.
    """
    inputs = list(inputs)
    first_path, _ = ((), None) if chunk_sizes is None else _first_to_cut(inputs, broadcast, split)
    warned = set() if warned is None else warned
    cut = _Cut(devices, chunk_sizes, dim, broadcast, split, warned, ".".join(first_path))
    columns = [_scatter(value, tuple(name.split(".")), cut) for name, value in inputs]
    return [[column[i] for column in columns] for i in range(len(devices))]


def scatter_arguments(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    devices: Sequence[torch.device],
    chunk_sizes: Sequence[int] | None,
    dim: int = 0,
    broadcast: Collection[str] = (),
    split: Collection[str] = (),
    warned: set[str] | None = None,
) -> list[Arguments]:
    """Returns what ``function`` is called with on each device; see ``scatter``."""
    named = named_arguments(function, args, kwargs)
    chunks = scatter(named, devices, chunk_sizes, dim, broadcast, split, warned)
    count = len(args)
    return [
        (tuple(chunk[:count]), dict(zip(kwargs, chunk[count:], strict=True))) for chunk in chunks
    ]


@dataclass(frozen=True, slots=True)
class _Cut:
    devices: Sequence[torch.device]
    chunk_sizes: Sequence[int] | None
    dim: int
    broadcast: Collection[str]
    split: Collection[str]
    warned: set[str]
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

    def check_scattered(self, value: Scattered, path: Path) -> list[Any]:
        """Returns the entries of what is cut already, if that is as here."""
        sizes = value.chunk_sizes if self.chunk_sizes is None else tuple(self.chunk_sizes)
        if (value.devices, value.chunk_sizes) != (tuple(self.devices), sizes):
            raise ScatterError(
                f"input {'.'.join(path)} is {value!r}, but this call splits {sizes} on "
                f"{', '.join(map(str, self.devices))}; gather() it first"
            )
        return list(value)

    def is_sequence_of_samples(self, value: Any, path: Path) -> bool:
        """Returns whether a sequence is to be cut; warns where it may have been meant to be."""
        name = ".".join(path)
        if self.chunk_sizes is None or isinstance(value, torch.Tensor):
            return False
        if name in self.split:
            return True
        if (
            self.is_as_long_as_the_batch(value)
            and any(item is not None for item in value)
            and next(nested.tensors(value), None) is None
            and not _is_broadcast(path, self.broadcast)
            and name not in self.warned
        ):
            self.warned.add(name)
            warn(
                f"input {name} is a {type(value).__name__} as long as the batch, {_length(value)}, "
                f"but goes whole to each device; split=({name!r},) gives each the entries of "
                f"its samples, and broadcast=({name!r},) says that all of it is meant"
            )
        return False

    def is_as_long_as_the_batch(self, value: Any) -> bool:
        """Returns whether a list, tuple or array may have an entry for each sample."""
        return self.chunk_sizes is not None and 1 < sum(self.chunk_sizes) == _length(value)

    def entries(self, sequence: Any, path: Path) -> list[Any]:
        """Returns each device's part of a sequence with an entry for each sample."""
        assert self.chunk_sizes is not None
        if _length(sequence) != sum(self.chunk_sizes):
            raise ScatterError(
                f"input {'.'.join(path)} is in split, but it is a {type(sequence).__name__} of "
                f"length {_length(sequence)}, and the batch has {sum(self.chunk_sizes)} samples"
            )
        starts = list(accumulate(self.chunk_sizes, initial=0))
        whole = _Cut(self.devices, None, self.dim, (), (), set(), "")
        return [
            _scatter(sequence[start:end], path, whole)[index]
            for index, (start, end) in enumerate(pairwise(starts))
        ]

    def _parts(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
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
    if isinstance(value, Scattered):
        return cut.check_scattered(value, path)
    if cut.is_sequence_of_samples(value, path):
        return cut.entries(value, path)
    if isinstance(value, PackedSequence) and cut.chunk_sizes is None:
        # Torch's stubs know PackedSequence.to with a dtype only.
        return [value.to(device) for device in cut.devices]  # type: ignore[arg-type]
    children = _items(value, path, ScatterError)
    if children is None:
        return [value] * len(cut.devices)
    try:
        columns = [_scatter(child, (*path, name), cut) for name, child in children]
    except ScatterError as error:
        if not cut.is_as_long_as_the_batch(value):
            raise
        name = ".".join(path)
        raise ScatterError(
            f"{error}; if {name} has an entry for each sample, split=({name!r},) cuts it, or stack "
            "or pad its tensors to one"
        ) from None
    return [
        nested.rebuild(value, [column[i] for column in columns]) for i in range(len(cut.devices))
    ]


def _length(value: Any) -> int | None:
    """Returns the length of a list, tuple or array; None for anything else."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return len(value)
    numpy = sys.modules.get("numpy")  # torch may be installed without
    is_array = numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0
    return len(value) if is_array else None


def _items(value: Any, path: Path, error: type[Exception]) -> list[tuple[str, Any]] | None:
    items = nested.items(value)
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
    return [
        _upload(tensor, device)
        if is_cuda(device) and tensor.device.type == "cpu"
        # A copy to the CPU that does not block could be read before it is there.
        else tensor.to(device, non_blocking=device.type != "cpu", copy=copy)
        for tensor in tensors
    ]


def _upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a copy on a CUDA device that does not wait for what is queued there already."""
    stream, module = copy_stream(device), torch.get_device_module(device)
    with module.stream(stream):
        copied = tensor.to(device, non_blocking=True)
    current = module.current_stream(device)
    current.wait_stream(stream)
    copied.record_stream(current)
    return copied


def gather(
    outputs: Sequence[Any],
    device: torch.device,
    dim: int = 0,
    scalar_outputs: ScalarOutputs = "auto",
    chunk_sizes: Sequence[int] | None = None,
    losses: ChunkLosses | None = None,
) -> Any:
    """Joins the outputs of the replicas into one on ``device``. Differentiable.

    Tensors are concatenated along ``dim``, or, where their samples are along exactly one other
    dimension, along that. 0-dim tensors become one 0-dim tensor or a vector; integers and bools
    must be equal, or added up. Mappings, dataclasses, named tuples, tuples and lists are joined
    item by item. Anything else must be equal on every replica and is passed on.

    Args:
        outputs: one output a replica, at least one.
        device: where the joined tensors go.
        dim: the batch dimension.
        scalar_outputs: what becomes of 0-dim tensors: ``"auto"``, the value of the whole batch, as
            ``losses`` finds it; their ``"mean"``, weighted by chunk size or what ``losses`` was
            given; their ``"sum"``; or all of them (``"stack"``).
        chunk_sizes: how many samples each replica had, None where nothing was cut.
        losses: what is known of the 0-dim ones.

    Raises:
        GatherError: the outputs differ in structure, or in a value that is not a tensor; or a
            tensor does not have its samples along a dimension.
    """
    return _gather(list(outputs), (), _Join(device, dim, scalar_outputs, chunk_sizes, losses))


@dataclass(frozen=True, slots=True)
class _Join:
    device: torch.device
    dim: int
    scalar_outputs: ScalarOutputs
    chunk_sizes: Sequence[int] | None
    losses: ChunkLosses | None

    def __call__(self, tensors: Sequence[torch.Tensor], path: Path) -> torch.Tensor:
        if all(tensor.dim() == 0 for tensor in tensors):
            if self.scalar_outputs == "stack":
                return torch.stack([tensor.to(self.device) for tensor in tensors])
            if len(tensors) == 1:
                return tensors[0].to(self.device)
            return self._scalars(tensors, path)
        if len(tensors) == 1:
            return tensors[0].to(self.device)
        # torch gives its own autograd functions no types.
        joined: torch.Tensor = Gather.apply(self.device, self._axis(tensors, path), *tensors)  # type: ignore[no-untyped-call]
        return joined

    def _axis(self, tensors: Sequence[torch.Tensor], path: Path) -> int:
        """Returns the dimension along which the tensors have their samples."""
        shapes, sizes = [tensor.shape for tensor in tensors], self.chunk_sizes
        known = {} if self.losses is None else self.losses.looks.axes
        name = ".".join(path)
        fits = [d for d in range(-tensors[0].dim(), 0) if _differ_along_only(d, tensors)]
        along_dim = [d for d in fits if d in (self.dim, self.dim - tensors[0].dim())]
        if sizes is None:
            found = along_dim
        else:
            exact = [d for d in fits if all(s[d] == c for s, c in zip(shapes, sizes, strict=True))]
            found = [d for d in along_dim if d in exact]
            if not found and (len(shapes[0]) > 2 or not along_dim):  # states of an RNN
                found = exact[:1]
            if not found:
                found = [d for d in along_dim if _is_of_rows([s[d] for s in shapes], sizes)]
            if known.get(name) in fits:
                found = [known[name]]
            elif found and len(fits) == 1:  # the shapes leave no choice
                known[name] = found[0]
        if len(found) == 1:
            return found[0]
        if along_dim:
            raise GatherError(
                f"output {_named(path)} has shape {tuple(shapes[0])} on every replica, though "
                f"these have {', '.join(map(str, sizes or ()))} samples, so it has no row for each "
                "of them: return a mean without dimensions (no unsqueeze), compute statistics "
                "outside, from gathered rows, and read parameters from model.module"
            )
        raise _differ(path, tensors, f"shapes that cannot be joined along dim {self.dim}")

    def _scalars(self, tensors: Sequence[torch.Tensor], path: Path) -> torch.Tensor:
        if self.scalar_outputs == "sum":
            return weighted_mean(tensors, None, self.device)
        if all(map(is_loss, tensors)):
            if self.losses is not None:
                return self.losses.join(tensors, ".".join(path), self.device)
            return weighted_mean(tensors, self.chunk_sizes or [1] * len(tensors), self.device)
        moved = [tensor.to(self.device) for tensor in tensors]
        if all(bool(tensor == moved[0]) for tensor in moved):
            return moved[0]
        raise GatherError(
            f"output {_named(path)} is a number of type {tensors[0].dtype} that differs between "
            "the replicas, and a count has no mean; return it as a tensor of one entry, or choose "
            "scalar_outputs='sum' or 'stack'"
        )


def _named(path: Path) -> str:
    return ".".join(path) or "(the whole)"


def _differ_along_only(dim: int, tensors: Sequence[torch.Tensor]) -> bool:
    first, axis = tensors[0], dim % tensors[0].dim()
    return all(
        tensor.dim() == first.dim()
        and tensor.shape[:axis] == first.shape[:axis]
        and tensor.shape[axis + 1 :] == first.shape[axis + 1 :]
        for tensor in tensors
    )


def _is_of_rows(lengths: Sequence[int], chunk_sizes: Sequence[int]) -> bool:
    """Returns whether lengths are as many rows a sample for each chunk, or differ otherwise."""
    return len(set(lengths)) > 1 or (
        len(set(chunk_sizes)) == 1 and lengths[0] % chunk_sizes[0] == 0
    )


def _gather(outputs: list[Any], path: Path, join: _Join) -> Any:
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs) and not all(
        isinstance(output, torch.Tensor) for output in outputs
    ):
        raise _differ(path, outputs, "different types")
    if isinstance(first, torch.Tensor):
        return join(outputs, path)
    if (
        len(outputs) > 1
        and isinstance(first, MutableMapping | MutableSequence)
        and len(first)
        and all(output is first for output in outputs)
    ):
        raise GatherError(
            f"output {_named(path)} is the same {type(first).__name__} on every replica, which "
            "holds what the last one wrote to it; return a new one from each forward"
        )
    children = [_items(output, path, GatherError) for output in outputs]
    if children[0] is None:
        if not all(_equal(first, other) for other in outputs[1:]):
            raise _differ(path, outputs, "different values")
        return first
    named = [dict(items or ()) for items in children]
    if any(other.keys() != named[0].keys() for other in named):
        raise _differ(path, [list(items) for items in named], "different items")
    values = [_gather([items[name] for items in named], (*path, name), join) for name in named[0]]
    return nested.rebuild(first, values)


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
        f"output {_named(path)} cannot be joined: the replicas returned {what} "
        f"({shown}); return tensors, or what is equal on every replica"
    )


def _memory_format(tensors: Sequence[torch.Tensor]) -> torch.memory_format:
    """Returns how all of the tensors lie in memory: with their channels last, or in order."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        for memory_format in (torch.channels_last, torch.channels_last_3d):
            if all(tensor.is_contiguous(memory_format=memory_format) for tensor in tensors):
                return memory_format
    return torch.contiguous_format


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
        output = torch.empty(
            shape, dtype=dtype, device=device, memory_format=_memory_format(tensors)
        )
        for part, tensor in zip(output.split(ctx.sizes, dim), tensors, strict=True):
            part.copy_(tensor)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns each tensor's part of the gradient, on the tensor's device."""
        parts = grad.split(ctx.sizes, ctx.dim)
        return None, None, *(part.to(d) for part, d in zip(parts, ctx.devices, strict=True))
