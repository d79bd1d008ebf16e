"""Bind the methods and hooks that a module stores to the modules of its replica.

A module may store methods that are bound to modules, such as a ``forward`` of its own or a hook. A
shallow copy of the module would store the same methods and call the originals. So replicas store
``_Bound`` in their place, which replaces each module by its replica when the method is used.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes in which a module stores its hooks."""

DICTIONARIES = ("_modules", "_parameters", "_buffers", *HOOKS)
"""The attributes in which it stores all that is registered, which each replica has of its own."""

_CARRIERS = (types.MethodType, functools.partial)

# The replica of each module. A strong reference from within a replica would make a cycle, and the
# memory of the replica would wait for the garbage collector.
_References = Mapping[nn.Module, "weakref.ref[nn.Module]"]


def bind_to_replicas(modules: Sequence[nn.Module], copies: Sequence[nn.Module]) -> bool:
    """Bind to ``copies`` what they store that is bound to ``modules``.

    Returns:
        Whether there was anything to bind.
    """
    references = {m: weakref.ref(copy) for m, copy in zip(modules, copies, strict=True)}
    has_bound = False
    for module, copy in zip(modules, copies, strict=True):
        has_bound |= _bind_methods(module, copy, references)
        has_bound |= _bind_hooks(copy, references)
    return has_bound


def _bind_methods(module: nn.Module, copy: Any, references: _References) -> bool:
    """Move the bound methods in the dictionary of a copy to where its new class finds them."""
    bound: dict[str, Any] = {
        name: _Bound(value, references)
        for name, value in module.__dict__.items()
        if isinstance(value, _CARRIERS)  # few are, so most need no call
        and _holds_module(value, references)
    }
    if not bound:
        return False
    for name in bound:
        del copy.__dict__[name]
    copy.__dict__[_BOUND] = bound
    copy.__class__ = _class_with(copy.__class__, frozenset(bound))
    return True


_BOUND = "_bound_methods"
"""The attribute of a replica in which its bound methods are stored."""


@functools.lru_cache
def _class_with(kind: type, names: frozenset[str]) -> type:
    """Return a subclass whose attributes of these names are the bound methods of an instance.

    Replicas share it, since Python 3.13 without its lock never frees a class.
    """
    attributes: dict[str, Any] = {name: _BoundMethod(kind, name) for name in names}
    attributes |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return types.new_class(kind.__name__, (kind,), exec_body=lambda ns: ns.update(attributes))


class _BoundMethod:
    """An attribute of a class: the bound method that an instance stores under this name."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind = kind
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return getattr(self._kind, self._name)
        return instance.__dict__[_BOUND][self._name].method


def _bind_hooks(copy: nn.Module, references: _References) -> bool:
    has_bound = False
    for name in HOOKS:
        hooks = copy.__dict__[name]
        bound = {k: _Bound(h, references) for k, h in hooks.items() if _holds_module(h, references)}
        if bound:
            has_bound = True
            copy.__dict__[name] = hooks.copy()  # one that replicates itself has the module's own
            copy.__dict__[name].update(bound)
    return has_bound


def _holds_module(value: Any, references: _References) -> bool:
    """Return whether a value is a method or partial that holds a module with a replica."""
    return isinstance(value, _CARRIERS) and _bound(value, references) is not value


def _bound(value: Any, references: _References) -> Any:
    """Return a module's replica, and a method or partial bound to replicas; else the value."""
    if isinstance(value, nn.Module):
        reference = references.get(value)
        replica = None if reference is None else reference()
        return value if replica is None else replica
    if isinstance(value, types.MethodType):
        owner = _bound(value.__self__, references)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        bound = [_bound(part, references) for part in parts]
        if all(map(operator.is_, parts, bound)):
            return value
        function, *arguments = bound
        num_positional = len(value.args)
        keywords = dict(zip(value.keywords, arguments[num_positional:], strict=True))
        return functools.partial(function, *arguments[:num_positional], **keywords)
    return value


class _Bound:
    """A method or partial that replaces each module by its replica when it is used.

    A hook is called; a stored method is read from ``method``.
    """

    def __init__(self, value: Any, references: _References) -> None:
        self._value = value
        self._references = references

    @property
    def method(self) -> Any:
        """The method or partial, bound to replicas."""
        return _bound(self._value, self._references)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _Bound:
        return self  # a copy of a replica calls the replica
