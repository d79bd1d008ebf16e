"""Name the arguments of a call; take containers apart and rebuild them.

Torch's pytree is not used, because it treats dataclasses and subclasses of ``dict`` as leaves.
Tensors in a leaf would silently be passed on without being split. Registering such classes would
change the pytree for all other code, too.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import ArgumentError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def named_arguments(function: Callable[..., Any], arguments: Arguments) -> list[tuple[str, Any]]:
    """Return the name and value of each argument. Positional ones are named by the parameters."""
    args, kwargs = arguments
    known = parameters(function).values()
    names = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in known if p.kind is p.VAR_POSITIONAL), "inputs")
    names.extend(f"{rest}.{i}" for i in range(len(args) - len(names)))
    return [*zip(names, args, strict=False), *kwargs.items()]


def check_paths(
    option: str, paths: str | Iterable[str], function: Callable[..., Any]
) -> frozenset[str]:
    """Return the dotted paths given for ``option``, after checking that ``function`` takes them.

    Raises:
        ArgumentError: a path does not begin with a parameter of ``function``.
    """
    paths = frozenset([paths] if isinstance(paths, str) else paths)
    names = parameters(function)
    takes_any = not names or any(p.kind is p.VAR_KEYWORD for p in names.values())
    for path in () if takes_any else paths:
        if path.split(".")[0] not in (*names, "inputs"):
            raise ArgumentError(
                f"{option} names {path!r}, but {getattr(function, '__qualname__', function)} takes "
                f"{', '.join(names)}"
            )
    return paths


def described(function: Callable[..., Any]) -> str:
    """Return the name of a function, with the file and line of its definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def items(container: object, path: str = "") -> list[tuple[str, Any]] | None:
    """Return the items of a container, each with its dotted path, or None if it is a leaf.

    Containers are mutable mappings (``dict``, ``UserDict``, transformers' ``ModelOutput``),
    dataclass instances, named tuples, tuples, lists and deques, and subclasses of these.
    """
    found: Iterable[tuple[Any, Any]]
    if isinstance(container, MutableMapping):
        found = container.items()
    elif dataclasses.is_dataclass(container) and not isinstance(container, type):
        fields = [field.name for field in dataclasses.fields(container)]
        # Attributes set by __post_init__ or by a cached property may hold tensors, too.
        names = dict.fromkeys([*fields, *getattr(container, "__dict__", ())])
        found = [(name, getattr(container, name)) for name in names if hasattr(container, name)]
    elif isinstance(container, tuple | list | deque):
        found = zip(getattr(container, "_fields", range(len(container))), container, strict=True)
    else:
        return None
    return [(f"{path}.{name}".lstrip("."), value) for name, value in found]


def checked_items(value: object, path: str, error: type[Exception]) -> list[tuple[str, Any]] | None:
    """Return the items of the input or output at ``path``, as ``items`` does.

    Raises:
        error: the value holds tensors but can be neither split nor joined.
    """
    found, problem = None, ""
    if isinstance(value, PackedSequence):
        problem = "has no batch dimension; pass a padded batch and its lengths, and pack in forward"
    elif is_cache(value):
        problem = "belongs to one model, not to its replicas; call the model with use_cache=False"
    elif (found := items(value, path)) is None and isinstance(value, Mapping | Set | Sequence):
        held = value.values() if isinstance(value, Mapping) else value
        if any(isinstance(item, torch.Tensor) for item in held):
            problem = "cannot be rebuilt with other tensors; use a dict, list or tuple"
    if problem:
        raise error(f"{path or 'the output'} is a {type(value).__name__}, which {problem}")
    return found


def is_cache(value: object) -> bool:
    """Return whether a value is a key-value cache of transformers."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested containers, each with its dotted path."""
    children = items(value, path)
    if children is None:
        yield path, value
    for name, child in children or ():
        yield from leaves(child, name)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def replaced(value: Any, tensors: Mapping[str, torch.Tensor], path: str = "") -> Any:
    """Return a value with the tensors at some dotted paths replaced; containers are copied."""
    children = items(value, path) if tensors else None
    if children is None:
        return tensors.get(path, value)
    return rebuild(value, [replaced(child, tensors, name) for name, child in children])


def rebuild(container: Any, values: Iterable[Any]) -> Any:
    """Return a container like ``container`` that holds ``values``, in the order of its items."""
    if isinstance(container, tuple):
        make = getattr(container, "_make", type(container))  # named tuples have _make
        return make(values)
    result = copy.copy(container)  # keeps attributes, and needs no constructor
    if isinstance(container, MutableMapping):
        attributes = getattr(container, "__dict__", {})
        if attributes is container:
            result.__dict__ = result
        for (key, old), new in zip(container.items(), values, strict=True):
            result[key] = new
            if key in attributes and attributes[key] is old:  # as in transformers' ModelOutput
                result.__dict__[key] = new
    elif dataclasses.is_dataclass(container):
        for (name, _), value in zip(items(container) or (), values, strict=True):
            object.__setattr__(result, name, value)  # works for frozen ones, too
    else:
        result.clear()
        result.extend(values)
    return result
