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


class UnknownNumber(float):
    """NaN in place of a number that was not computed; what is computed from it is one, too.

    Raises:
        SymbolicValueError: it decides something: it is compared, or is a condition or an integer.
    """

    def _compute(self, *others: Any) -> UnknownNumber:
        return self

    def _decide(self, *others: Any) -> Any:
        raise SymbolicValueError(
            "a number that was not computed decides something here: symbolic devices keep the "
            "shapes of tensors only; run without symbolic (--symbolic)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _compute
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _compute
    __mod__ = __rmod__ = __neg__ = __abs__ = __pos__ = _compute
    __pow__ = __rpow__ = _compute
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __int__ = _decide
    __round__ = _compute  # type: ignore[assignment]  # float's has overloads
    __hash__ = float.__hash__


def call(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func``, on ``meta`` unless the values of all tensors are known.

    The shapes of its outputs may be those of an earlier call with the same metadata.

    Raises:
        SymbolicValueError: ``func`` needs values that are not known, or would write unknown values
            into an integer or bool tensor.
    """
    args, kwargs = _symbolic_arguments(func, args, kwargs)
    has_floats = not func._schema.is_mutable  # an optimizer's differ from step to step
    inputs = (func, args, tuple(kwargs.items()))
    key = _key(inputs, has_floats) if _has_fixed_outputs(func) else None
    shapes = _outputs.get(key)
    if shapes is not None:
        return _made_again(func, args, shapes)
    try:
        out = func(*args, **kwargs)
        if key is not None and key == _key(inputs, has_floats):  # it has resized none of them
            _remember(key, _tensors((args, tuple(kwargs.values()))), out)
        return out
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
                    raise SymbolicValueError(
                        f"{func} would write unknown values into a {tensor.dtype} tensor: "
                        "emulate_devices(symbolic=True) keeps only the shapes of floating-point "
                        "tensors; use symbolic=False"
                    )
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


# Layers and steps repeat, and torch computes many shapes in Python, so what operators return is
# cached by the metadata of their inputs.

_outputs: dict[Any, list[tuple[Any, ...]]] = {}
"""The shape, strides and dtype of each output; none if an operator only writes to its inputs."""
_MAX_OUTPUTS = 2**14


def _key(value: Any, has_floats: bool) -> Any:
    """Return a cache key that determines the outputs, None if there is no such key.

    ``has_floats`` says whether the values of floats are part of it.
    """
    if isinstance(value, torch.Tensor):
        if is_known(value) or value.layout is not torch.strided:
            return None
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        items = tuple(_key(item, has_floats) for item in value)
        return None if any(i is None for i in items) else items
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, float) and not has_floats:
        return float
    return type(value), value  # with the type, since 1 == 1.0 == True


def _made_again(
    func: torch._ops.OpOverload, args: tuple[Any, ...], shapes: list[tuple[Any, ...]]
) -> Any:
    """Return what ``func`` returns for inputs whose outputs have been remembered."""
    returns = func._schema.returns
    if not shapes:  # it writes to its inputs, and returns the first one or nothing
        return args[0] if returns else None
    outputs = [torch.empty_strided(*shape, dtype=d, device=META) for *shape, d in shapes]
    if len(returns) > 1:
        return tuple(outputs)
    return outputs if isinstance(returns[0].type, torch.ListType) else outputs[0]


def _remember(key: Any, inputs: list[torch.Tensor], out: Any) -> None:
    only_writes = out is None or (bool(inputs) and out is inputs[0])
    outputs = [] if only_writes else _tensors(out)
    if isinstance(out, tuple | list) and len(outputs) != len(out):
        return
    if any(t.device != META or t.layout is not torch.strided for t in outputs):
        return
    shapes = [(t.size(), t.stride(), t.dtype) for t in outputs]
    remade = [torch.empty_strided(*shape, dtype=d, device=META) for *shape, d in shapes]
    fill_their_storages = all(
        output.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        for output, other in zip(outputs, remade, strict=True)
    )
    # _unsafe_view returns a view, although its schema says otherwise.
    input_storages = {t.untyped_storage()._cdata for t in inputs}
    output_storages = {t.untyped_storage()._cdata for t in outputs}
    are_new = len(input_storages | output_storages) == len(input_storages) + len(outputs)
    if fill_their_storages and are_new:
        if len(_outputs) >= _MAX_OUTPUTS:
            _outputs.clear()
        _outputs[key] = shapes


@functools.cache
def _has_fixed_outputs(func: torch._ops.OpOverload) -> bool:
    """Return whether the metadata of its inputs may determine what ``func`` returns.

    That is new tensors, an input that it has written to, or nothing. No view of an input.
    """
    schema = func._schema
    types = [str(returned.type) for returned in schema.returns]
    aliases = [value.alias_info for value in (*schema.arguments, *schema.returns)]
    return (
        all(alias is None or alias.is_write for alias in aliases)
        and torch.Tag.inplace_view not in func.tags
        and (set(types) <= {"Tensor"} or types == ["List[Tensor]"])
    )


@functools.cache
def _is_factory(func: torch._ops.OpOverload) -> bool:
    """Return whether ``func`` is a factory such as ``empty_like``, which reads only a shape."""
    names = {argument.name for argument in func._schema.arguments}
    return "pin_memory" in names and "sparse" not in func.name()
