"""Nested containers: take inputs and outputs apart, and rebuild them with other values."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def items(container: object) -> list[tuple[str, Any]] | None:
    """Return the named items of a container, or None if ``container`` is a leaf.

    Containers are mutable mappings (``dict``, ``UserDict``, transformers' ``ModelOutput``),
    dataclass instances, named tuples, tuples, lists and deques, and subclasses of these.
    """
    if isinstance(container, MutableMapping):
        return [(str(key), value) for key, value in container.items()]
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        fields = [field.name for field in dataclasses.fields(container)]
        # Attributes that __post_init__ or a cached property has set hold tensors, too.
        names = dict.fromkeys([*fields, *getattr(container, "__dict__", ())])
        return [(name, getattr(container, name)) for name in names if hasattr(container, name)]
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return list(zip(container._fields, container, strict=True))
    if isinstance(container, tuple | list | deque):
        return [(str(index), value) for index, value in enumerate(container)]
    return None


def checked_items(value: object, path: str, error: type[Exception]) -> list[tuple[str, Any]] | None:
    """Return the items of the input or output at ``path``, each with its dotted path, or None.

    Raises:
        error: the value holds tensors but can be neither split nor joined.
    """
    where = path or "the output"
    if isinstance(value, PackedSequence):
        raise error(
            f"{where} is a PackedSequence, which has no batch dimension to split; pass the padded "
            "batch and its lengths, and pack and unpack inside forward"
        )
    if is_cache(value):
        raise error(
            f"{where} is a {type(value).__name__}, which belongs to one model and not to its "
            "replicas; call the model with use_cache=False"
        )
    found = items(value)
    if found is not None:
        return [(f"{path}.{name}".lstrip("."), child) for name, child in found]
    if isinstance(value, Mapping | Set | Sequence) and not isinstance(value, str):
        held = value.values() if isinstance(value, Mapping) else value
        if any(isinstance(item, torch.Tensor) for item in held):
            raise error(
                f"{where} is a {type(value).__name__}, which cannot be rebuilt with other "
                "tensors; use a dict, list or tuple"
            )
    return None


def is_cache(value: object) -> bool:
    """Return whether a value is a key-value cache of transformers."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what nested containers hold, each with its dotted path."""
    children = items(value)
    if children is None:
        yield path, value
    for name, child in children or ():
        yield from leaves(child, f"{path}.{name}".lstrip("."))


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def replaced(value: Any, tensors: Mapping[str, torch.Tensor], path: str = "") -> Any:
    """Return a value in which other tensors are at some dotted paths; containers are copied."""
    if path in tensors and isinstance(value, torch.Tensor):
        return tensors[path]
    children = items(value) if tensors else None
    if children is None:
        return value
    return rebuild(
        value, [replaced(child, tensors, f"{path}.{name}".lstrip(".")) for name, child in children]
    )


def rebuild(container: Any, values: Sequence[Any]) -> Any:
    """Return a container like ``container`` that holds ``values``, in the order of its items."""
    if isinstance(container, tuple):
        make = getattr(container, "_make", type(container))  # of named tuples
        return make(values)
    result = copy.copy(container)  # keeps attributes, and needs no constructor
    if isinstance(container, MutableMapping):
        attributes = getattr(container, "__dict__", {})
        if attributes is container:
            result.__dict__ = result
        for (key, old), new in zip(container.items(), values, strict=True):
            result[key] = new
            if key in attributes and attributes[key] is old:  # as those of ModelOutput are
                result.__dict__[key] = new
    elif dataclasses.is_dataclass(container):
        for (name, _), value in zip(items(container) or (), values, strict=True):
            object.__setattr__(result, name, value)  # works for frozen ones, too
    else:
        result.clear()
        result.extend(values)
    return result
