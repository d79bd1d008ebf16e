"""Name the arguments of a call, take nested containers apart, and rebuild them.

A dotted path names a value inside nested containers: ``"batch.mask"`` is the entry ``mask`` of the
argument ``batch``.

Torch's pytree is not used, because it treats dataclasses and subclasses of ``dict`` as leaves.
Tensors in such a leaf would silently be passed on without being split. Registering these classes
with pytree would change its behavior for all other code, too.
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
"""The positional and the keyword arguments of a call."""


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name, or an empty dict if it has no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def named_arguments(function: Callable[..., Any], arguments: Arguments) -> list[tuple[str, Any]]:
    """Return the name and value of each argument of a call of ``function``.

    A keyword argument has its own name, and a positional argument has the name of its parameter in
    ``function``. If ``function`` collects further arguments in a parameter such as ``*args``, these
    have the names ``args.0``, ``args.1`` and so on. If ``function`` has no signature, the
    positional arguments have the names ``inputs.0``, ``inputs.1`` and so on.
    """
    args, kwargs = arguments
    known = parameters(function).values()
    names = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in known if p.kind is p.VAR_POSITIONAL), "inputs")
    names.extend(f"{rest}.{i}" for i in range(len(args) - len(names)))
    return [*zip(names, args, strict=False), *kwargs.items()]


def check_paths(
    option: str, paths: str | Iterable[str], function: Callable[..., Any]
) -> frozenset[str]:
    """Return ``paths`` as a set, after checking that they name parameters of ``function``.

    All paths are accepted if ``function`` takes ``**kwargs`` or has no signature. Paths that begin
    with ``inputs``, such as ``"inputs.0"``, are always accepted, because ``named_arguments`` gives
    such names to positional arguments without a parameter.

    Args:
        option: the name of the option that contains the paths. The error message shows it.
        paths: dotted paths of arguments, such as ``"batch.mask"``, or a single path.
        function: the function that is called with these arguments.

    Raises:
        ArgumentError: a path is not accepted, because it does not begin with the name of a
            parameter of ``function``.
    """
    paths = frozenset([paths] if isinstance(paths, str) else paths)
    names = parameters(function)
    takes_any = not names or any(p.kind is p.VAR_KEYWORD for p in names.values())
    for path in () if takes_any else paths:
        if path.split(".")[0] not in (*names, "inputs"):
            known = f"the parameters of {getattr(function, '__qualname__', function)}"
            raise ArgumentError(f"{option} names {path!r}, but {known} are {', '.join(names)}")
    return paths


def described(function: Callable[..., Any]) -> str:
    """Return the name of a function, with the file and line of its definition if known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def items(container: object, path: str = "") -> list[tuple[str, Any]] | None:
    """Return the dotted path and value of each item of a container; None for any other object.

    Containers are mutable mappings (``dict``, ``UserDict``, transformers' ``ModelOutput``),
    dataclass instances, named tuples, tuples, lists and deques, and subclasses of these.

    Args:
        container: the container.
        path: the dotted path of the container. The paths of its items begin with this path.
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
    """Check the type of an input or output, and return ``items(value, path)``.

    Args:
        value: the input or output.
        path: the dotted path of the value.
        error: the class of the error to raise.

    Raises:
        error: the value holds tensors, but its type can be neither split nor joined.
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
    """Yield the dotted path and value of each leaf of nested containers.

    A leaf is an object that is not a container: see ``items``.
    """
    children = items(value, path)
    if children is None:
        yield path, value
    for name, child in children or ():
        yield from leaves(child, name)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def replaced(value: Any, tensors: Mapping[str, torch.Tensor], path: str = "") -> Any:
    """Return ``value`` with some leaves replaced by tensors.

    A leaf is an object that is not a container. Containers are rebuilt, not changed in place.

    Args:
        value: the value, which may be nested containers.
        tensors: a dictionary that maps the dotted path of a leaf to the tensor that replaces it.
        path: the dotted path of the value.
    """
    children = items(value, path) if tensors else None
    if children is None:
        return tensors.get(path, value)
    return rebuild(value, [replaced(child, tensors, name) for name, child in children])


def rebuild(container: Any, values: Iterable[Any]) -> Any:
    """Return a container of the same type and structure, with ``values`` as its items.

    The values are in the same order as the items that ``items(container)`` returns.
    """
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
            object.__setattr__(result, name, value)  # works for frozen dataclasses, too
    else:
        result.clear()
        result.extend(values)
    return result
