"""Split the inputs of a call into chunks, and move each to its device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import ScatterError, warn
from . import nested
from .call_inputs import Arguments, named_arguments
from .move import move
from .nested import Path, checked_items


class Scattered(Sequence[Any]):
    """A sequence with one entry for each device, which ``scatter`` passes on as it is.

    Attributes:
        devices: the devices of the entries.
        chunk_sizes: how many samples each entry has; None if the batch was not split.
    """

    devices: tuple[torch.device, ...]
    chunk_sizes: tuple[int, ...] | None


def find_batch_size(
    inputs: Iterable[tuple[str, Any]],
    dim: int = 0,
    broadcast: Collection[str] = (),
    split: Collection[str] = (),
) -> int | None:
    """Return the size along ``dim`` of the first tensor to split, or None if there is none.

    Args:
        inputs: the names and values of the arguments, positional ones first.
        dim: the batch dimension.
        broadcast: dotted paths of tensors, or of containers of tensors, that are not split.
        split: dotted paths of sequences with an entry for each sample. If no tensor is split, the
            batch size is the length of the first of these, or that of the first ``Scattered``.

    Raises:
        ScatterError: the tensor has no dimension ``dim``.
    """
    path, value = _first_to_split(inputs, broadcast, split)
    if isinstance(value, torch.Tensor):
        return _size(value, dim, path)
    if isinstance(value, Scattered):
        return None if value.chunk_sizes is None else sum(value.chunk_sizes)
    return None if value is None else len(value)


def _first_to_split(
    inputs: Iterable[tuple[str, Any]], broadcast: Collection[str], split: Collection[str]
) -> tuple[Path, Any]:
    """Return the path and value that determine the batch size; the value is None without any."""
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
                items = checked_items(value, path, ScatterError) or ()
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
    """Split the arguments, and return their values for each device, in order. Differentiable.

    Tensors of batch size along ``dim`` are split, and so are the sequences named in ``split``.
    0-dim tensors and those named in ``broadcast`` are copied whole to each device. Anything else is
    passed on, containers as shallow copies. A tensor is copied from its device directly to each
    destination. A chunk that stays on its device is a view, unless the view would keep more memory
    alive than the chunks need; then it is a copy.

    Args:
        inputs: the names and values of the arguments.
        devices: the destinations.
        chunk_sizes: the number of samples for each device. If None, nothing is split, and every
            tensor is copied whole to each device.
        dim: the batch dimension.
        broadcast: dotted paths of tensors, or of containers of tensors, that are not split.
        split: dotted paths of sequences (lists, tuples, arrays) with an entry for each sample.
        warned: paths that do not warn again; others are added when they warn.

    Raises:
        ScatterError: the size of a tensor along ``dim``, or the length of a sequence in ``split``,
            is not the batch size.

    Warns:
        BalanceWarning: another sequence is as long as the batch, so it may have one entry for each
            sample; or an object that is no container has tensors as attributes.
    """
    inputs = list(inputs)
    first_path: Path = ()
    if chunk_sizes is not None:
        first_path, _ = _first_to_split(inputs, broadcast, split)
    warned = set() if warned is None else warned
    options = _Options(devices, chunk_sizes, dim, broadcast, split, warned, ".".join(first_path))
    columns = [_scatter(value, tuple(name.split(".")), options) for name, value in inputs]
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
    """Return the arguments with which ``function`` is called on each device; see ``scatter``."""
    named = named_arguments(function, args, kwargs)
    chunks = scatter(named, devices, chunk_sizes, dim, broadcast, split, warned)
    count = len(args)
    return [
        (tuple(chunk[:count]), dict(zip(kwargs, chunk[count:], strict=True))) for chunk in chunks
    ]


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of ``scatter``."""

    devices: Sequence[torch.device]
    chunk_sizes: Sequence[int] | None
    dim: int
    broadcast: Collection[str]
    split: Collection[str]
    warned: set[str]
    first_name: str
    """The path of the tensor that determines the batch size."""


def _scatter(value: Any, path: Path, options: _Options) -> list[Any]:
    """Return the value for each device."""
    if isinstance(value, torch.Tensor):
        return _scatter_tensor(value, path, options)
    if isinstance(value, Scattered):
        return _checked_entries(value, path, options)
    if _has_samples(value, path, options):
        return _scatter_sequence(value, path, options)
    if isinstance(value, PackedSequence) and options.chunk_sizes is None:
        # Torch's stubs know PackedSequence.to with a dtype only.
        return [value.to(device) for device in options.devices]  # type: ignore[arg-type]
    children = checked_items(value, path, ScatterError)
    if children is None:
        _warn_if_it_hides_tensors(value, path, options)
        return [value] * len(options.devices)
    try:
        columns = [_scatter(child, (*path, name), options) for name, child in children]
    except ScatterError as error:
        if not _is_as_long_as_the_batch(value, options):
            raise
        name = ".".join(path)
        raise ScatterError(
            f"{error}; if {name} has one entry for each sample, split=({name!r},) splits it, or "
            "stack or pad its tensors to one"
        ) from None
    return [
        nested.rebuild(value, [column[i] for column in columns])
        for i in range(len(options.devices))
    ]


def _scatter_tensor(tensor: torch.Tensor, path: Path, options: _Options) -> list[torch.Tensor]:
    sizes = options.chunk_sizes
    if sizes is None or tensor.dim() == 0 or _is_broadcast(path, options.broadcast):
        parts: Sequence[torch.Tensor] = [tensor] * len(options.devices)
    elif _size(tensor, options.dim, path) == sum(sizes):
        parts = _chunks(tensor, sizes, options)
    else:
        name, first = ".".join(path), options.first_name
        fact = (
            f"input {name} of shape {tuple(tensor.shape)} has size {tensor.size(options.dim)} "
            f"along dim {options.dim}, but the batch has {sum(sizes)} samples"
        )
        remedy = (
            f"if {name} is not one entry a sample, broadcast=({name!r},) copies it whole to "
            "each device"
        )
        if first != name:
            fact += f" by its first tensor, {first}"
            remedy += f", and if {first} is not, broadcast=({first!r},) does"
        raise ScatterError(f"{fact}; {remedy}")
    return [move(part, device) for part, device in zip(parts, options.devices, strict=True)]


def _chunks(
    tensor: torch.Tensor, sizes: Sequence[int], options: _Options
) -> Sequence[torch.Tensor]:
    """Return the chunks of a tensor, not yet moved."""
    parts = list(tensor.split(list(sizes), options.dim))
    staying = [i for i, device in enumerate(options.devices) if device == tensor.device]
    if tensor.untyped_storage().nbytes() > sum(parts[i].nbytes for i in staying):
        # As views they would keep the whole batch there for as long as autograd needs them.
        for i in staying:
            parts[i] = move(parts[i], tensor.device, copy=True)
    elif tensor.requires_grad:
        # Autograd forbids in-place operations on one of several outputs of split().
        starts = list(accumulate(sizes, initial=0))
        for i in staying:
            parts[i] = tensor.narrow(options.dim, starts[i], sizes[i])
    return parts


def _checked_entries(value: Scattered, path: Path, options: _Options) -> list[Any]:
    """Return the entries of a ``Scattered`` that was split as in this call."""
    sizes = value.chunk_sizes if options.chunk_sizes is None else tuple(options.chunk_sizes)
    if (value.devices, value.chunk_sizes) != (tuple(options.devices), sizes):
        split = "does not split" if options.chunk_sizes is None else f"splits {sizes}"
        raise ScatterError(
            f"input {'.'.join(path)} is {value!r}, but this call {split} on "
            f"{', '.join(map(str, options.devices))}; gather() it first"
        )
    return list(value)


def _scatter_sequence(sequence: Any, path: Path, options: _Options) -> list[Any]:
    """Return for each device the entries of its samples."""
    assert options.chunk_sizes is not None
    if _length(sequence) != sum(options.chunk_sizes):
        raise ScatterError(
            f"input {'.'.join(path)} is in split, but it is a {type(sequence).__name__} of "
            f"length {_length(sequence)}, and the batch has {sum(options.chunk_sizes)} samples"
        )
    bounds = pairwise(accumulate(options.chunk_sizes, initial=0))
    parts = []
    for device, (start, end) in zip(options.devices, bounds, strict=True):
        # The entries are cut already, and what is below them has no name.
        whole = _Options([device], None, options.dim, (), (), set(), "")
        parts += _scatter(sequence[start:end], path, whole)
    return parts


def _has_samples(value: Any, path: Path, options: _Options) -> bool:
    """Return whether ``split`` names a sequence; warn if it is not named but looks like samples."""
    name = ".".join(path)
    if options.chunk_sizes is None or isinstance(value, torch.Tensor):
        return False
    if name in options.split:
        return True
    if (
        _is_as_long_as_the_batch(value, options)
        and any(item is not None for item in value)
        and next(nested.tensors(value), None) is None
        and not _is_broadcast(path, options.broadcast)
        and name not in options.warned
    ):
        options.warned.add(name)
        warn(
            f"input {name} is a {type(value).__name__} as long as the batch, {_length(value)}, "
            f"but is passed whole to each device; split=({name!r},) gives each the entries of "
            f"its samples, and broadcast=({name!r},) silences this warning"
        )
    return False


def _warn_if_it_hides_tensors(value: Any, path: Path, options: _Options) -> None:
    name = ".".join(path)
    hidden = [
        attribute
        for attribute, held in getattr(value, "__dict__", {}).items()
        if isinstance(held, torch.Tensor) and held.dim() and not isinstance(value, type)
    ]
    if hidden and name not in options.warned and not _is_broadcast(path, options.broadcast):
        options.warned.add(name)
        warn(
            f"input {name} is a {type(value).__name__}, whose tensors ({', '.join(hidden)}) are "
            "neither split nor moved; pass a dataclass or dictionary of them to split them, or "
            f"silence this warning with broadcast=({name!r},)"
        )


def _is_as_long_as_the_batch(value: Any, options: _Options) -> bool:
    """Return whether a list, tuple or array has as many entries as the batch has samples."""
    return options.chunk_sizes is not None and 1 < sum(options.chunk_sizes) == _length(value)


def _length(value: Any) -> int | None:
    """Return the length of a list, tuple or array, or None for anything else."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return len(value)
    numpy = sys.modules.get("numpy")  # torch may be installed without
    is_array = numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0
    return len(value) if is_array else None


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
