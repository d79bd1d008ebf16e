"""Name the arguments of a call, for options such as ``broadcast`` and for messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import ArgumentError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def named_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the name and value of each argument; positional ones have the parameters' names."""
    names: list[str] = []
    for parameter in parameters(function).values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names.extend(f"{parameter.name}.{i}" for i in range(len(args) - len(names)))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    names.extend(f"inputs.{i}" for i in range(len(names), len(args)))
    return [*zip(names, args, strict=False), *kwargs.items()]


def check_paths(
    option: str, paths: str | Iterable[str], function: Callable[..., Any]
) -> frozenset[str]:
    """Return the dotted paths, or the only one, that ``option`` names as arguments of ``function``.

    Raises:
        ArgumentError: a path does not begin with a parameter of ``function``.
    """
    paths = frozenset([paths] if isinstance(paths, str) else paths)
    names = parameters(function)
    if not names or any(p.kind is p.VAR_KEYWORD for p in names.values()):
        return paths  # any name is accepted
    for path in paths:
        if path.split(".")[0] not in (*names, "inputs"):
            raise ArgumentError(
                f"{option} names {path!r}, but {getattr(function, '__qualname__', function)} takes "
                f"{', '.join(names)}"
            )
    return paths


_of_methods: WeakKeyDictionary[FunctionType, Mapping[str, inspect.Parameter]] = WeakKeyDictionary()
"""Parameters of methods, by their functions: ``inspect`` takes as long as some small models."""


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if it has no signature."""
    if isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        if function.__func__ not in _of_methods:
            _of_methods[function.__func__] = inspect.signature(function).parameters
        return _of_methods[function.__func__]
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def described(function: Callable[..., Any]) -> str:
    """Return the name of a function, with the file and line of its definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
