"""Walking the containers that inputs and outputs are nested in, and building them anew."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping, Sequence
from typing import Any, cast


def items(container: object) -> list[tuple[str, Any]] | None:
    """Returns the named items of a container, or None where ``container`` is a leaf.

    Containers are mutable mappings (``dict``, ``UserDict``, transformers' ``ModelOutput``),
    dataclass instances, named tuples, tuples and lists, and subclasses of these.
    """
    if isinstance(container, MutableMapping):
        return [(str(key), value) for key, value in container.items()]
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        names = [field.name for field in dataclasses.fields(container)]
        return [(name, getattr(container, name)) for name in names]
    if isinstance(container, tuple) and hasattr(container, "_fields"):
        return list(zip(container._fields, container, strict=True))
    if isinstance(container, tuple | list):
        return [(str(index), value) for index, value in enumerate(container)]
    return None


def rebuild(container: Any, values: Sequence[Any]) -> Any:
    """Returns a container like ``container`` that holds ``values`` in the order of its items."""
    if isinstance(container, MutableMapping):
        result = copy.copy(container)
        for key, value in zip(container, values, strict=True):
            result[key] = value
        return result
    if dataclasses.is_dataclass(container):
        result = copy.copy(cast(Any, container))
        for field, value in zip(dataclasses.fields(container), values, strict=True):
            object.__setattr__(result, field.name, value)  # works for frozen ones, too
        return result
    if hasattr(container, "_fields"):
        return container._make(values)
    return type(container)(values)
