"""Symbolic mode: which values are known, and how operators run on shapes only.

A tensor whose values are not known is on torch's ``meta`` device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import SymbolicValueError

aten = torch.ops.aten
CPU = torch.device("cpu")
META = torch.device("meta")


def is_known(elem: torch.Tensor) -> bool:
    """Return whether a wrapped tensor has values, not only a shape."""
    return elem.device.type != "meta"


def is_unknown_dtype(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype have only a shape in symbolic mode."""
    return dtype.is_floating_point or dtype.is_complex


def is_written(argument: torch.Argument) -> bool:
    """Return whether an operator writes to the tensors of this argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def require_known(elem: torch.Tensor, doing: str) -> None:
    """Raise a SymbolicValueError if the values of ``elem`` are not known."""
    if not is_known(elem):
        raise SymbolicValueError(
            f"{doing} needs the value of a {elem.dtype} tensor of shape {tuple(elem.shape)}, but "
            "emulate_devices(symbolic=True) keeps shapes only; use symbolic=False (plan and tune: "
            "--numeric, run: without --symbolic)"
        )


class UnknownStorage(torch.UntypedStorage):
    """A storage without data. As safetensors asks for it, it has an address of its own."""

    def data_ptr(self) -> int:
        """Return a number that no other storage has."""
        return self._cdata  # type: ignore[no-any-return]


def call(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func``, on ``meta`` unless the values of all tensors are known.

    The shapes of its outputs may be those of an earlier call with the same metadata.

    Raises:
        SymbolicValueError: ``func`` needs values that are not known, or would write unknown values
            into an integer or bool tensor.
    """
    args, kwargs = _symbolic_arguments(func, args, kwargs)
    key = _key((func, args, tuple(kwargs.items()))) if _makes_new_tensors(func) else None
    try:
        if key not in _known_outputs:
            out = func(*args, **kwargs)
            if key is None or not _are_new(_tensors(out), _tensors((args, tuple(kwargs.values())))):
                return out
            if len(_known_outputs) >= _MAX_KNOWN:
                _known_outputs.clear()
            _known_outputs[key] = out
        return _made_again(_known_outputs[key])
    except RuntimeError as error:
        unknown = [tensor for tensor in _tensors(args) if not is_known(tensor)]
        if unknown and "meta" in str(error).lower():  # torch cannot run it on shapes only
            if not func._schema.returns:  # only writes values, as the step of a fused optimizer
                return None
            require_known(unknown[0], f"{func}")
        raise


def _symbolic_arguments(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for ``func``, on ``meta`` unless the values of all tensors are known."""
    tensors = _tensors((args, tuple(kwargs.values())))
    if _is_factory(func):
        dtype = kwargs.get("dtype") or tensors[0].dtype
        return args, {**kwargs, "device": META if is_unknown_dtype(dtype) else CPU}
    known = [tensor for tensor in tensors if is_known(tensor)]
    if len(known) == len(tensors):
        return args, kwargs
    if func is aten.index.Tensor or func in (aten.index_put.default, aten.index_put_.default):
        args = (args[0], _integer_indices(args[1]), *args[2:])
    for i, argument in enumerate(func._schema.arguments):
        if is_written(argument):
            written = args[i] if i < len(args) else kwargs.get(argument.name)
            for tensor in _tensors((written,)):
                if is_known(tensor) and not is_unknown_dtype(tensor.dtype):
                    unknown = next(tensor for tensor in tensors if not is_known(tensor))
                    require_known(unknown, f"{func}, which writes to a {tensor.dtype} tensor,")
    # torch's meta functions take no generator.
    kwargs = {name: _to_meta(value) for name, value in kwargs.items() if name != "generator"}
    return _to_meta(args), kwargs


def _integer_indices(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace masks by the integer indices of their true elements, which determine the shape."""
    result: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            require_known(index, "indexing with a mask")
            result.extend(index.nonzero().unbind(1))
        else:
            result.append(index)
    return result


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(META) if is_known(value) else value
    if isinstance(value, torch.UntypedStorage):  # of a checkpoint that is loaded to a device
        return torch.UntypedStorage(value.nbytes(), device=META)
    if type(value) in (tuple, list):
        return type(value)(map(_to_meta, value))
    return value


# Layers and steps repeat, and torch computes many shapes in Python, so the new tensors that an
# operator returns are cached, without values, by the shapes and numbers that it is given.

_known_outputs: dict[Any, Any] = {}
_MAX_KNOWN = 2**14


def _key(value: Any) -> Any:
    """Return a cache key that determines the layouts of the outputs, None if there is none."""
    if isinstance(value, torch.Tensor):
        if is_known(value) or value.layout is not torch.strided:
            return None
        return value.size(), value.stride(), value.dtype
    if isinstance(value, tuple | list):
        items = tuple(map(_key, value))
        return None if any(item is None for item in items) else items
    return type(value), value  # with the type, since 1 == 1.0 == True


def _are_new(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    """Return whether outputs have storages of their own, with nothing else in them.

    ``_unsafe_view`` returns a view, although its schema says otherwise.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    for tensor in outputs:
        if is_known(tensor) or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        if storage._cdata in storages or storage.nbytes() != tensor.nbytes:
            return False
        storages.add(storage._cdata)
    return True


def _made_again(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(map(_made_again, out))
    if out is None:
        return None
    return torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device=META)


@functools.cache
def _makes_new_tensors(func: torch._ops.OpOverload) -> bool:
    """Return whether ``func`` returns new tensors only, and writes to none."""
    schema = func._schema
    returned = [str(value.type) for value in schema.returns]
    return set(returned) == {"Tensor"} and all(
        value.alias_info is None for value in (*schema.arguments, *schema.returns)
    )


@functools.cache
def _is_factory(func: torch._ops.OpOverload) -> bool:
    """Return whether ``func`` is a factory such as ``empty_like``, which reads only a shape."""
    names = {argument.name for argument in func._schema.arguments}
    return "pin_memory" in names and "sparse" not in func.name()
