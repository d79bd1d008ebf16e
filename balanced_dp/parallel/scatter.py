"""Split the inputs of a call into chunks, and move each chunk to its device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from ..devices import is_cuda, on_stream, side_stream
from ..errors import ScatterError, warn
from . import nested
from .nested import Arguments

Named = Iterable[tuple[str, Any]]
"""Pairs of name and value, one for each input. A name is a dotted path such as "batch.mask"."""

Split = tuple[Sequence[torch.device], Sequence[int]]
"""The devices of a call, and how many samples each device gets.

The second sequence is empty if nothing is split.
"""


class Scattered(Sequence[Any]):
    """A sequence with one entry for each device, such as a model's outputs with ``gather=False``.

    If a ``Scattered`` is an argument of a call, it is not split. Each device gets its own entry.

    Attributes:
        devices: the device of each entry.
        chunk_sizes: how many samples each entry has; None if the batch was not split.
    """

    devices: tuple[torch.device, ...]
    chunk_sizes: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a call for the whole batch, with options that say how to split them.

    Tensors whose size along ``dim`` is the batch size are split, and so are the inputs named in
    ``split``. 0-dim tensors, and tensors named in ``broadcast``, are copied whole to each device.
    Containers, such as lists and dictionaries, are rebuilt for each device. Any other value is
    passed unchanged.

    Inputs are named by dotted paths: ``"batch.mask"`` is the entry ``mask`` of the argument
    ``batch``.

    Args:
        function: the function that each device calls. A positional argument has the name of its
            parameter in this function.
        args: the positional arguments.
        kwargs: the keyword arguments.
        dim: the batch dimension.
        broadcast: dotted paths of tensors, or of containers of tensors, that are not split.
        split: dotted paths of sequences (lists, tuples, arrays) and tensors with one or more
            entries for each sample. The entries of one sample are next to each other.
        warned: dotted paths of inputs about which a warning has been issued. No further warning
            about these inputs is issued.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dim: int = 0
    broadcast: Collection[str] = ()
    split: Collection[str] = ()
    warned: set[str] = field(default_factory=set)

    def batch_size(self) -> int | None:
        """Return the number of samples of the whole batch, or None if nothing is split.

        0-dim tensors, and tensors named in ``broadcast``, are ignored. The number is taken from the
        first of the following that is among the inputs:

        1. a tensor that is not named in ``split``: its size along ``dim``,
        2. a tensor named in ``split``: its size along ``dim``,
        3. a ``Scattered``: its number of samples,
        4. another sequence named in ``split``: its length.

        Raises:
            ScatterError: the first tensor that is split has no dimension ``dim``, or an input has a
                type that cannot be split.

        Warns:
            BalanceWarning: in each of these cases:

                - Nothing is split, but the inputs contain a list, tuple or array with several
                  entries.
                - All tensors that are split are in one list, and its items have the same type. If
                  the list has an item for each sample, the list should be split, and not its
                  tensors: name the list in ``split``.
        """
        named = self._named()
        found = list(self._all_to_split(named))
        for path, value in _sequences(named):
            if not found:
                fact = "and no input is split, so the call runs on one device"
                self._warn(path, value, fact)
            elif all(_is_below(one, [path]) for one, _ in found) and _are_alike(value):
                fact = f"of {len(value)} items, whose tensors are split along dim {self.dim}"
                self._warn(path, value, fact, silence="a tuple in its place")
        path, value = self._first(found)
        if isinstance(value, torch.Tensor):
            return self._size(value, path)
        if isinstance(value, Scattered):
            return None if value.chunk_sizes is None else sum(value.chunk_sizes)
        return self._entries(value, path) if path else None

    def scatter(
        self, devices: Sequence[torch.device], chunk_sizes: Sequence[int]
    ) -> list[Arguments]:
        """Return the positional and keyword arguments for each device. Differentiable.

        A tensor is copied from its device, here called A, directly to each of ``devices``. If the
        tensor is split, the chunk for A is a copy, too. If the whole tensor is sent to A, the first
        replica on A gets the tensor itself. If A repeats in ``devices``, the other replicas on A
        get copies of the tensor.

        Args:
            devices: the devices to which the arguments are sent.
            chunk_sizes: the number of samples for each device. If empty, nothing is split, and
                every tensor is sent whole to each device.

        Raises:
            ScatterError: in each of these cases:

                - The size of a tensor along ``dim`` is not the batch size.
                - The length of an input named in ``split`` is not a multiple of the batch size.
                - An input has a type or a layout that cannot be split.
                - A ``Scattered`` has other devices or chunk sizes than the call.

        Warns:
            BalanceWarning: in each of these cases:

                - A sequence whose length is the batch size is passed whole to each device, although
                  it may have one entry for each sample.
                - An object that is not a container has tensors as attributes. These tensors are
                  neither split nor moved.
        """
        rows, count = self._rows(self._named(), (devices, chunk_sizes)), len(self.args)
        return [(tuple(r[:count]), dict(zip(self.kwargs, r[count:], strict=True))) for r in rows]

    def _named(self) -> Named:
        return nested.named_arguments(self.function, (self.args, self.kwargs))

    def _all_to_split(self, inputs: Named) -> Iterator[tuple[str, Any]]:
        for path, value in inputs:
            is_tensor = isinstance(value, torch.Tensor)
            is_whole = is_tensor and (value.dim() == 0 or _is_below(path, self.broadcast))
            if is_whole or value is None:
                continue
            if is_tensor or isinstance(value, Scattered) or path in self.split:
                yield path, value
            else:
                yield from self._all_to_split(nested.checked_items(value, path, ScatterError) or ())

    def _first(self, found: Named) -> tuple[str, Any]:
        """Return the dotted path and the value of the input that determines the batch size.

        This is the first tensor that is not named in ``split``. A tensor named in ``split`` may
        have several rows for each sample, so it is chosen only if there is no other tensor. An
        input of another kind is chosen only if there are no tensors.
        """

        def rank(one: tuple[str, Any]) -> tuple[bool, bool]:
            return not isinstance(one[1], torch.Tensor), one[0] in self.split

        return min(found, key=rank, default=("", None))

    def _rows(self, inputs: Named, split: Split) -> list[list[Any]]:
        """Return a list for each device, with that device's part of each input."""
        columns = [self._parts(value, path, split) for path, value in inputs]
        return [[column[i] for column in columns] for i in range(len(split[0]))]

    def _parts(self, value: Any, path: str, split: Split) -> list[Any]:
        """Return the part of an input that each device gets: a chunk of it, or the whole."""
        devices, sizes = split
        if isinstance(value, torch.Tensor):
            return self._chunks(value, path, split)
        if isinstance(value, Scattered):
            if value.devices != tuple(devices) or (sizes and value.chunk_sizes != tuple(sizes)):
                call = f"has chunk sizes {tuple(sizes)}" if sizes else "splits nothing"
                call += f" on {', '.join(map(str, devices))}"
                raise _error(path, f"is {value!r}, but this call {call}; gather() the input first")
            return list(value)
        if sizes and path in self.split and value is not None:
            lengths = self._lengths(length := self._entries(value, path), path, sizes)
            if length != sum(lengths):
                fact = f"is named in split, but has {length} entries for {sum(sizes)} samples"
                raise _error(path, f"{fact}; it needs equally many entries for each sample")
            bounds = zip(devices, pairwise(accumulate(lengths, initial=0)), strict=True)
            return [self._parts(value[i:j], path, ([device], ()))[0] for device, (i, j) in bounds]
        if 1 < sum(sizes) == _length(value):
            held = [leaf for _, leaf in nested.leaves(value) if leaf is not None]
            if held and not any(isinstance(leaf, torch.Tensor) for leaf in held):
                fact = f"as long as the batch, {sum(sizes)}, but is passed whole to each device"
                self._warn(path, value, fact, f"split=({path!r},) splits it")
        children = nested.checked_items(value, path, ScatterError)
        if children is None:
            self._warn_if_it_hides_tensors(value, path)
            return [value] * len(devices)
        rows = self._rows(children, split)
        if len(rows) == 1 and all(map(operator.is_, rows[0], (child for _, child in children))):
            return [value]  # the container itself, so that the caller sees writes by forward
        return [nested.rebuild(value, row) for row in rows]

    def _lengths(self, length: int, path: str, sizes: Sequence[int]) -> list[int]:
        """Return how many entries of an input each device gets.

        The length of an input must be the batch size. The length of an input that is named in
        ``split`` may also be a multiple of the batch size. This method does not check the length.
        If the length is wrong, the returned numbers do not add up to ``length``, and the caller
        raises an error.

        Args:
            length: the number of entries of the input.
            path: the dotted path of the input.
            sizes: how many samples each device gets.
        """
        is_named = path in self.split and 0 < sum(sizes) < length
        per_sample = length // sum(sizes) if is_named else 1
        return [per_sample * size for size in sizes]

    def _entries(self, value: Any, path: str) -> int:
        """Return the length of an input that is named in ``split``.

        Raises:
            ScatterError: the input is not a list, tuple or array.
        """
        if (length := _length(value)) is None:
            fact = f"is named in split, but {type(value).__name__} is no list, tuple or array"
            raise _error(path, fact)
        return length

    def _chunks(self, tensor: torch.Tensor, path: str, split: Split) -> list[torch.Tensor]:
        """Return the part of a tensor that each device gets: its chunk, or the whole tensor."""
        devices, sizes = split
        if not sizes or tensor.dim() == 0 or _is_below(path, self.broadcast):
            # If several replicas run on one device, all but the first get copies. Without copies,
            # an in-place write in one replica would change the input of the others.
            return [move(tensor, d, copy=d in devices[:i]) for i, d in enumerate(devices)]
        lengths = self._lengths(length := self._size(tensor, path), path, sizes)
        if length != sum(lengths):
            first, _ = self._first(self._all_to_split(self._named()))
            source = f" (the size of its first tensor, {first})" if first != path else ""
            raise _error(
                path,
                f"of shape {tuple(tensor.shape)} has size {length} along dim {self.dim}, but the "
                f"batch has {sum(sizes)} samples{source}; broadcast=({path!r},) copies it whole to "
                "each device; the option split is for lists of samples, and for tensors with "
                "several rows per sample; if its samples are along another dimension, transpose it",
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            raise _error(path, "is sparse or nested, and cannot be split; pass a dense tensor")
        # Chunks are copies, not views. A view would keep the whole batch in memory for as long as
        # autograd needs the view. An in-place operation on one view would increment the version
        # counter that all views share, so that backward could raise an error for other views.
        parts = zip(tensor.split(lengths, self.dim), devices, strict=True)
        return [move(part, device, copy=True) for part, device in parts]

    def _size(self, tensor: torch.Tensor, path: str) -> int:
        if not -tensor.dim() <= self.dim < tensor.dim():
            fact = f"of shape {tuple(tensor.shape)} has no dimension {self.dim} to split"
            raise _error(path, f"{fact}; broadcast=({path!r},) copies it whole to each device")
        return tensor.size(self.dim)

    def _warn_if_it_hides_tensors(self, value: Any, path: str) -> None:
        held = {} if isinstance(value, type | nn.Module) else getattr(value, "__dict__", {})
        stores = [held, *(v for v in held.values() if isinstance(v, Mapping))]  # as in PyG's Data
        tensors = [(n, t) for one in stores for n, t in one.items() if isinstance(t, torch.Tensor)]
        if hidden := ", ".join(str(name) for name, tensor in tensors if tensor.dim()):
            fact = f"whose tensors ({hidden}) are neither split nor moved"
            remedy = "pass a dict of them; or split a list of objects, and move each in forward"
            self._warn(path, value, fact, remedy)

    def _warn(self, path: str, value: Any, fact: str, remedy: str = "", silence: str = "") -> None:
        """Warn once about an input and all inputs inside it, unless an option names it."""
        if not _is_below(path, [*self.warned, *self.broadcast, *self.split]):
            self.warned.add(path)
            remedy = remedy or f"if it has an entry for each sample, split=({path!r},) splits it"
            silence = silence or f"broadcast=({path!r},)"
            name = type(value).__name__
            warn(f"argument {path} is a {name} {fact}; {remedy}; {silence} silences this warning")


def _sequences(inputs: Named) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each list, tuple or array with several entries.

    Sequences inside such a list, tuple or array are not yielded.
    """
    for path, value in inputs:
        if _length(value) not in (None, 0, 1):
            yield path, value
        else:
            yield from _sequences(nested.items(value, path) or ())


def _length(value: Any) -> int | None:
    """Return the length of a list, tuple or array, or None for anything else."""
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    is_array = type(value).__module__.startswith("numpy") and bool(getattr(value, "ndim", 0))
    return len(value) if is_list or is_array else None


def _are_alike(value: Any) -> bool:
    """Return whether a value is a list of items of one type and with the same number of dimensions.

    The number of dimensions is the attribute ``ndim``, or 0 for an item without this attribute.
    """
    is_list = isinstance(value, list)
    return is_list and len({(type(item), getattr(item, "ndim", 0)) for item in value}) == 1


def _error(path: str, message: str) -> ScatterError:
    return ScatterError(f"argument {path} {message}")


def _is_below(path: str, others: Iterable[str]) -> bool:
    """Return whether a dotted path is one of ``others`` or inside one: ``a.b`` is inside ``a``."""
    return any(f"{path}.".startswith(f"{other}.") for other in others)


def move(tensor: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
    """Return ``tensor`` on ``device``. Differentiable.

    If ``copy`` is True, the result is a new tensor even if ``tensor`` is on ``device``.
    """
    if not is_cuda(device) or tensor.device.type != "cpu":
        # A transfer to the CPU must block, or the result could be read before the transfer ends.
        return tensor.to(device, non_blocking=device.type != "cpu", copy=copy)
    stream = side_stream(device, "copies")  # so that the copy does not wait for queued kernels
    with on_stream(stream):
        copied = tensor.to(device, non_blocking=True)
    current = torch.get_device_module(device).current_stream(device)
    current.wait_stream(stream)
    copied.record_stream(current)
    return copied
