"""What forward writes to a replica: parameters and buffers are kept, other attributes lost."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from .arrivals import parameters_of
from .bound_methods import DICTIONARIES
from .homes import refuse_alone
from .move import move


class WrittenState:
    """The parameters and buffers of replicas before these run, to find what they write.

    The first replica shares the tensors that the network has on its device, and has copies of all
    others. ``write_back`` copies back what it writes to these.

    Args:
        network: the module.
        replicas: the replicas of one call.
        silently: the result of ``write_back`` in an earlier call: the indices of parameters that
            were written without a new version or storage, as through ``.data``. None if there was
            none; then the values of all parameters are compared.
        has_originals: whether the first replica has no copies, as far as is known.
    """

    def __init__(
        self,
        network: nn.Module,
        replicas: Sequence[nn.Module],
        silently: frozenset[int] | None,
        has_originals: bool,
    ) -> None:
        first, *others = replicas
        self._silently = silently
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor, Any]] = []
        self._shared: list[tuple[str, torch.Tensor, Any, Any]] = []
        self._others: list[tuple[str, torch.Tensor, Any, torch.Tensor]] = []
        heads = [next(_parameters(replica), None) for replica in replicas]
        self._devices = {head.device for head in heads if head is not None}
        if silently is None:
            shared: dict[int, tuple[str, torch.Tensor]] = {}
            for index, other in enumerate(others, start=1):
                if any(heads[index] is head for head in heads[:index]):
                    shared |= {id(p): (name, p) for name, p in other.named_parameters()}
                else:
                    pairs = zip(_named(first), _parameters(other), strict=True)
                    self._others += [(n, copy, _stamp(copy), p) for (n, p), copy in pairs]
            self._shared = [(n, p, _stamp(p), _values(p)) for n, p in shared.values()]
        if not has_originals:
            states = enumerate(zip(_state(network), _state(first), strict=True))
            self._copies = [(i, p, copy, _stamp(copy)) for i, (p, copy) in states if copy is not p]

    def written_by_several(self) -> list[str]:
        """Return the names of parameters that replicas on one device share and have written.

        The list is empty unless ``silently`` is None.
        """
        return [
            name
            for name, parameter, stamp, values in self._shared
            if stamp != _stamp(parameter) or not _are_equal(parameter, values)
        ]

    def written_differently(self) -> list[str]:
        """Return the names of parameters whose copies on other devices got other values.

        The list is empty unless ``silently`` is None.
        """
        names = [
            name
            for name, copy, stamp, first in self._others
            if stamp != _stamp(copy) and not _are_equal(copy, _values(first))
        ]
        return list(dict.fromkeys(names))

    @torch.no_grad()
    def write_back(self) -> frozenset[int]:
        """Copy to the network what was written, and return the indices of all silent writes."""
        found = set(self._silently or ())
        for index, original, copy, before in self._copies:
            if copy.shape != original.shape:
                original.data = move(copy.detach(), original.device)
            elif copy.is_inference() or before != _stamp(copy):
                # Where a replica has used the original, backward needs its version.
                is_used = original.device in self._devices
                (original.data if is_used else original).copy_(copy)
            elif not isinstance(original, nn.Parameter) and not _is_expanded(original):
                # Batch norm's kernels write statistics without a new version, so buffers are always
                # copied. The copy makes no new version either, as on a single device.
                original.data.copy_(copy)
            elif (self._silently is None or index in self._silently) and not _are_equal(
                copy, _values(original)
            ):
                found.add(index)
                original.data.copy_(copy)
        return frozenset(found)


class SetAttributes:
    """The attributes of a replica before it runs, to find those that forward sets.

    Modules of torch, and those with hooks that may set a weight, set attributes on purpose; of them
    only parameters and submodules are compared.

    Args:
        replica: the replica.
    """

    def __init__(self, replica: nn.Module) -> None:
        self._modules = list(replica.named_modules())
        self._before = [_attributes(module) for _, module in self._modules]

    def names(self) -> list[str]:
        """Return the names of the attributes that forward has set."""
        # Private attributes are caches or flags: transformers installs its hooks in the first call.
        return [name for name in self._changed if not name.rpartition(".")[2].startswith("_")]

    def have_other_dictionaries(self) -> bool:
        """Return whether forward has replaced a dictionary of members or hooks."""
        return any(name.rpartition(".")[2] in DICTIONARIES for name in self._changed)

    @functools.cached_property
    def _changed(self) -> list[str]:
        """What differs after the call, when it is first asked for."""
        return [
            f"{prefix}.{name}".lstrip(".")
            for (prefix, module), before in zip(self._modules, self._before, strict=True)
            for name, value in _attributes(module).items()
            if not _is_same(before.get(name, _NOTHING), value)
        ]


_NOTHING = (object(), 0)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, int]]:
    """Return the attributes of a module, each with its length if it is a container."""
    own = {**vars(module), "_parameters": parameters_of(module)}
    members: dict[str, Any] = {**parameters_of(module), **module._modules}
    if not _sets_weights(module):
        members |= {**own, **module._buffers}
    return {
        **{k: (v, len(v) if isinstance(v, list | dict | set) else 0) for k, v in members.items()},
        **{kind: (own[kind], 0) for kind in DICTIONARIES},
    }


def _sets_weights(module: nn.Module) -> bool:
    """Return whether a module is torch's, or has hooks that may set a weight."""
    hooks = module._forward_pre_hooks.values()
    is_of_torch = type(module).__module__.startswith("torch.")
    return is_of_torch or any(hook is not refuse_alone for hook in hooks)


def _is_same(before: tuple[Any, int], after: tuple[Any, int]) -> bool:
    """Return whether an attribute is the same object of the same length, or an equal number."""
    (old, old_length), (new, length) = before, after
    is_plain = isinstance(new, int | float | str | bool | None) and type(new) is type(old)
    return (old is new or (is_plain and old == new)) and old_length == length


def _state(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers, without waiting for their values."""
    return chain(_parameters(module), module.buffers())


def _parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    return (parameter for _, parameter in _named(module))


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, submodule in module.named_modules():
        for name, parameter in parameters_of(submodule).items():
            if parameter is not None:
                yield f"{prefix}.{name}".lstrip("."), parameter


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the version and storage of a tensor; most writes change one of them."""
    storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return (0 if tensor.is_inference() else tensor._version, storage)


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy on the CPU, which has room for it; None for emulated tensors without values."""
    try:
        return tensor.detach().to("cpu", copy=True)
    except RuntimeError:
        return None


def _are_equal(one: torch.Tensor, values: torch.Tensor | None) -> bool:
    """Return whether a tensor has these values, or cannot be compared."""
    try:
        if values is None or torch.equal(one.cpu(), values):
            return True
        is_float = values.is_floating_point()  # and may hold NaN
        return is_float and torch.allclose(one.cpu(), values, 0, 0, equal_nan=True)
    except RuntimeError:  # as for sparse tensors
        return True


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
