"""What a module stores that is bound to modules, bound to their replicas instead."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes of a module that hold its hooks."""

# The replicas of modules. A strong reference from within a replica would make a cycle, and the
# replica's memory would wait for the garbage collector.
_References = Mapping[nn.Module, "weakref.ref[nn.Module]"]


def rebind(modules: Sequence[nn.Module], copies: Sequence[nn.Module]) -> bool:
    """Binds to the replica what was bound to the modules; returns whether anything was."""
    references = {m: weakref.ref(copy) for m, copy in zip(modules, copies, strict=True)}
    bound = [
        _bind_methods(module, copy, references) | _bind_hooks(copy, references)  # both are to run
        for module, copy in zip(modules, copies, strict=True)
    ]
    return any(bound)


def _bind_methods(module: nn.Module, copy: nn.Module, references: _References) -> bool:
    """Binds what the module keeps in its own dictionary."""
    bound: dict[str, Any] = {
        name: _Rebound(value, references)
        for name, value in module.__dict__.items()
        if _is_bound(value, references)
    }
    if not bound:
        return False
    for name in bound:
        del copy.__dict__[name]
    kind = type(copy)
    bound |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    copy.__class__ = types.new_class(kind.__name__, (kind,), exec_body=lambda ns: ns.update(bound))
    return True


def _bind_hooks(copy: nn.Module, references: _References) -> bool:
    has_bound = False
    for name in HOOKS:
        hooks = copy.__dict__[name]
        if any(_is_bound(hook, references) for hook in hooks.values()):
            has_bound = True
            copy.__dict__[name] = OrderedDict(
                (key, _Rebound(hook, references) if _is_bound(hook, references) else hook)
                for key, hook in hooks.items()
            )
    return has_bound


def _is_bound(value: Any, references: _References) -> bool:
    """Returns whether a method or partial holds a module that has a replica."""
    if isinstance(value, types.MethodType):
        inner: Sequence[Any] = (value.__self__,)
    elif isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.values())
    else:
        return False
    return any(
        (isinstance(item, nn.Module) and item in references) or _is_bound(item, references)
        for item in inner
    )


class _Rebound:
    """A method or partial in which every module is replaced by its replica, when it is needed.

    As an attribute of a class it gives just that; itself it is called like it.
    """

    def __init__(self, value: Any, references: _References) -> None:
        self.value = value
        self.references = references

    def __get__(self, instance: object, owner: type) -> Any:
        return self._rebound(self.value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rebound(self.value)(*args, **kwargs)

    def _rebound(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            reference = self.references.get(value)
            replica = None if reference is None else reference()
            return value if replica is None else replica
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._rebound(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(
                self._rebound(value.func),
                *map(self._rebound, value.args),
                **{name: self._rebound(argument) for name, argument in value.keywords.items()},
            )
        return value
