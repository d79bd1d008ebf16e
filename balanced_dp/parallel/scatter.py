"""Split the inputs of a call into chunks, and move each to its device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import ScatterError, warn
from . import nested
from .call_inputs import Arguments, named_arguments
from .move import move


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

    If no tensor is split, it is the length of the first sequence that ``split`` names, or that of
    the first ``Scattered``. The arguments are those of ``scatter``, with a name for each input.

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
) -> tuple[str, Any]:
    """Return the path and value that determine the batch size; the value is None without any."""
    first_sequence: tuple[str, Any] | None = None
    for path, value in _all_to_split(inputs, broadcast, split):
        if isinstance(value, torch.Tensor):
            return path, value
        first_sequence = first_sequence or (path, value)
    return first_sequence or ("", None)


def _all_to_split(
    inputs: Iterable[tuple[str, Any]], broadcast: Collection[str], split: Collection[str]
) -> Iterator[tuple[str, Any]]:
    for path, value in inputs:
        if isinstance(value, torch.Tensor):
            if value.dim() > 0 and not _is_broadcast(path, broadcast):
                yield path, value
        elif isinstance(value, Scattered) or path in split:
            yield path, value
        else:
            children = nested.checked_items(value, path, ScatterError) or ()
            yield from _all_to_split(children, broadcast, split)


def scatter(
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
    """Return the arguments with which ``function`` is called on each device. Differentiable.

    Tensors of batch size along ``dim`` are split, and so are the sequences named in ``split``.
    0-dim tensors and those named in ``broadcast`` are copied whole to each device. Anything else is
    passed on, containers as shallow copies. A tensor is copied from its device directly to each
    destination. A chunk that stays on its device is a copy, too, unless the tensor is expanded and
    takes less memory than its chunks; then it is a view.

    Args:
        function: the function, whose parameters give the arguments their names.
        args: the positional arguments of the whole batch.
        kwargs: its keyword arguments.
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
    inputs = named_arguments(function, args, kwargs)
    warned = set() if warned is None else warned
    call = _Scatter(inputs, devices, chunk_sizes, dim, broadcast, split, warned)
    columns = [call.scatter(value, path) for path, value in inputs]
    chunks = [tuple(column[i] for column in columns) for i in range(len(devices))]
    count = len(args)
    return [(chunk[:count], dict(zip(kwargs, chunk[count:], strict=True))) for chunk in chunks]


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A call of ``scatter``, with its arguments."""

    inputs: Sequence[tuple[str, Any]]
    devices: Sequence[torch.device]
    chunk_sizes: Sequence[int] | None
    dim: int
    broadcast: Collection[str]
    split: Collection[str]
    warned: set[str]

    def scatter(self, value: Any, path: str) -> list[Any]:
        """Return the value for each device."""
        if isinstance(value, torch.Tensor):
            parts = self._parts(value, path)
            return [
                # Written to in place, a whole tensor would be written once for each replica.
                move(part, device, copy=part is value and device in self.devices[:i])
                for i, (part, device) in enumerate(zip(parts, self.devices, strict=True))
            ]
        if isinstance(value, Scattered):
            return self._checked_entries(value, path)
        if self.chunk_sizes is None:
            if isinstance(value, PackedSequence):
                # Torch's stubs know PackedSequence.to with a dtype only.
                return [value.to(device) for device in self.devices]  # type: ignore[arg-type]
        elif path in self.split:
            return self._scatter_sequence(value, path, self.chunk_sizes)
        elif self._looks_like_samples(value):
            self._warn(
                path,
                f"input {path} is a {type(value).__name__} as long as the batch, {len(value)}, "
                f"but is passed whole to each device; split=({path!r},) gives each the entries of "
                f"its samples, and broadcast=({path!r},) silences this warning",
            )
        children = nested.checked_items(value, path, ScatterError)
        if children is None:
            self._warn_if_it_hides_tensors(value, path)
            return [value] * len(self.devices)
        try:
            columns = [self.scatter(child, name) for name, child in children]
        except ScatterError as error:
            if not self._is_as_long_as_the_batch(value):
                raise
            raise ScatterError(
                f"{error}; if {path} has one entry for each sample, split=({path!r},) splits it, "
                "or stack or pad its tensors to one"
            ) from None
        return [
            nested.rebuild(value, [column[i] for column in columns])
            for i in range(len(self.devices))
        ]

    def _parts(self, tensor: torch.Tensor, path: str) -> Sequence[torch.Tensor]:
        """Return what each device gets of a tensor, not yet moved."""
        sizes = self.chunk_sizes
        if sizes is None or tensor.dim() == 0 or _is_broadcast(path, self.broadcast):
            return [tensor] * len(self.devices)
        size = _size(tensor, self.dim, path)
        if tensor.is_nested or tensor.layout != torch.strided:
            raise ScatterError(
                f"input {path} is a sparse or nested tensor, which is not split; pass a dense one, "
                "and convert it inside forward"
            )
        if size != sum(sizes):
            fact = (
                f"input {path} of shape {tuple(tensor.shape)} has size {size} along dim {self.dim}"
                f", but the batch has {sum(sizes)} samples"
            )
            remedy = (
                f"if {path} is not one entry a sample, broadcast=({path!r},) copies it whole to "
                "each device"
            )
            first, _ = _first_to_split(self.inputs, self.broadcast, self.split)
            if first != path:
                fact += f" by its first tensor, {first}"
                remedy += f", and if {first} is not, broadcast=({first!r},) does"
            raise ScatterError(f"{fact}; {remedy}")
        if len(sizes) == 1:
            return [tensor]
        parts = list(tensor.split(list(sizes), self.dim))
        staying = [i for i, device in enumerate(self.devices) if device == tensor.device]
        if tensor.untyped_storage().nbytes() >= sum(parts[i].nbytes for i in staying):
            # As views they would keep the whole batch there for as long as autograd needs them, and
            # an in-place operation on one would count as one on all. What is expanded stays so.
            for i in staying:
                parts[i] = move(parts[i], tensor.device, copy=True)
        return parts

    def _checked_entries(self, value: Scattered, path: str) -> list[Any]:
        """Return the entries of a ``Scattered`` that was split as in this call."""
        sizes = value.chunk_sizes if self.chunk_sizes is None else tuple(self.chunk_sizes)
        if (value.devices, value.chunk_sizes) != (tuple(self.devices), sizes):
            split = "does not split" if self.chunk_sizes is None else f"splits {sizes}"
            raise ScatterError(
                f"input {path} is {value!r}, but this call {split} on "
                f"{', '.join(map(str, self.devices))}; gather() it first"
            )
        return list(value)

    def _scatter_sequence(self, sequence: Any, path: str, sizes: Sequence[int]) -> list[Any]:
        """Return for each device the entries of its samples."""
        if _length(sequence) != sum(sizes):
            raise ScatterError(
                f"input {path} is in split, but it is a {type(sequence).__name__} of length "
                f"{_length(sequence)}, and the batch has {sum(sizes)} samples"
            )
        bounds = pairwise(accumulate(sizes, initial=0))
        parts = []
        for device, (start, end) in zip(self.devices, bounds, strict=True):
            whole = replace(self, devices=[device], chunk_sizes=None)
            parts += whole.scatter(sequence[start:end], path)
        return parts

    def _is_as_long_as_the_batch(self, value: Any) -> bool:
        """Return whether a list, tuple or array has as many entries as the batch has samples."""
        return self.chunk_sizes is not None and 1 < sum(self.chunk_sizes) == _length(value)

    def _looks_like_samples(self, value: Any) -> bool:
        return (
            self._is_as_long_as_the_batch(value)
            and any(item is not None for item in value)
            and next(nested.tensors(value), None) is None
        )

    def _warn_if_it_hides_tensors(self, value: Any, path: str) -> None:
        attributes = {} if isinstance(value, type) else getattr(value, "__dict__", {})
        hidden = [
            n for n, held in attributes.items() if isinstance(held, torch.Tensor) and held.dim()
        ]
        if hidden:
            self._warn(
                path,
                f"input {path} is a {type(value).__name__}, whose tensors ({', '.join(hidden)}) "
                "are neither split nor moved; pass a dataclass or dictionary of them to split "
                f"them, or silence this warning with broadcast=({path!r},)",
            )

    def _warn(self, path: str, message: str) -> None:
        """Warn once of an input, unless ``broadcast`` names it."""
        if path not in self.warned and not _is_broadcast(path, self.broadcast):
            self.warned.add(path)
            warn(message)


def _length(value: Any) -> int | None:
    """Return the length of a list, tuple or array, or None for anything else."""
    if isinstance(value, list | tuple):
        return None if hasattr(value, "_fields") else len(value)
    numpy = sys.modules.get("numpy")  # torch may be installed without
    is_array = numpy is not None and isinstance(value, numpy.ndarray) and value.ndim > 0
    return len(value) if is_array else None


def _is_broadcast(path: str, broadcast: Collection[str]) -> bool:
    return any(f"{path}.".startswith(f"{name}.") for name in broadcast)


def _size(tensor: torch.Tensor, dim: int, path: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ScatterError(
            f"input {path} of shape {tuple(tensor.shape)} has no dimension {dim} to split; "
            f"broadcast=({path!r},) copies it whole to each device"
        )
    return tensor.size(dim)
