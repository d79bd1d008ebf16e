"""Walking the containers that inputs and outputs are nested in, and building them anew."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, cast

import torch


def items(container: object) -> list[tuple[str, Any]] | None:
    """Returns the named items of a container, or None where ``container`` is a leaf.

    Containers are mutable mappings (``dict``, ``UserDict``, transformers' ``ModelOutput``),
    dataclass instances, named tuples, tuples, lists and deques, and subclasses of these.
    """
    if isinstance(container, MutableMapping):
        return [(str(key), value) for key, value in container.items()]
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        fields = [field.name for field in dataclasses.fields(container)]
        # What __post_init__ or a cached property derived from the fields is cut and joined, too.
        names = dict.fromkeys([*fields, *getattr(container, "__dict__", ())])
        return [(name, getattr(container, name)) for name in names if hasattr(container, name)]
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return list(zip(container._fields, container, strict=True))
    if isinstance(container, tuple | list | deque):
        return [(str(index), value) for index, value in enumerate(container)]
    return None


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, child in items(value) or ():
            yield from tensors(child)


def rebuild(container: Any, values: Sequence[Any]) -> Any:
    """Returns a container like ``container`` that holds ``values`` in the order of its items."""
    if isinstance(container, MutableMapping):
        return _rebuilt_mapping(container, values)
    if dataclasses.is_dataclass(container):
        result = copy.copy(cast(Any, container))
        for (name, _), value in zip(items(container) or (), values, strict=True):
            object.__setattr__(result, name, value)  # works for frozen ones, too
        return result
    if hasattr(container, "_fields"):
        return container._make(values)
    if isinstance(container, list | deque):
        result = copy.copy(container)  # keeps attributes, and needs no constructor
        result.clear()
        result.extend(values)
        return result
    return type(container)(values)


def _rebuilt_mapping(container: MutableMapping[Any, Any], values: Sequence[Any]) -> Any:
    result: Any = copy.copy(container)
    replaced = {id(old): new for old, new in zip(list(container.values()), values, strict=True)}
    for key, value in zip(list(container), values, strict=True):
        result[key] = value
    # Many a dictionary shows its items as attributes; those follow the items.
    attributes = getattr(container, "__dict__", {})
    if attributes is container:
        result.__dict__ = result
    else:
        for name, old in attributes.items():
            if id(old) in replaced:
                result.__dict__[name] = replaced[id(old)]
    return result
