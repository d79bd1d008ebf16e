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
    inputs = _tensors((args, tuple(kwargs.values())))

    def key() -> Any:
        # The numbers of an optimizer differ from step to step.
        has_floats = not func._schema.is_mutable
        return _key((func, args, tuple(kwargs.items())), has_floats) if has_fixed_outputs else None

    has_fixed_outputs = _has_fixed_outputs(func)
    before = key()
    if before in _outputs:
        return _made_again(_outputs[before], inputs)
    try:
        out = func(*args, **kwargs)
        if before is not None and before == key():  # it has resized none of them
            _remember(before, inputs, out)
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

_outputs: dict[Any, tuple[type | None, list[Any]]] = {}
"""The type of the sequence that is returned, if it is one, and each output: the position of the
input that it is, or its shape, strides and dtype, or None."""
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


def _made_again(known: tuple[type | None, list[Any]], inputs: list[torch.Tensor]) -> Any:
    """Return what an operator returns for inputs whose outputs have been remembered."""
    kind, outputs = known
    made = [
        torch.empty_strided(output[0], output[1], dtype=output[2], device=META)
        if isinstance(output, tuple)
        else output
        if output is None
        else inputs[output]
        for output in outputs
    ]
    return made[0] if kind is None else kind(made)


def _remember(key: Any, inputs: list[torch.Tensor], out: Any) -> None:
    kind = type(out) if isinstance(out, tuple | list) else None
    positions = {id(tensor): i for i, tensor in enumerate(inputs)}
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    outputs: list[Any] = []
    for output in [out] if kind is None else out:
        if output is None or id(output) in positions:
            outputs.append(None if output is None else positions[id(output)])
            continue
        if output.device != META or output.layout is not torch.strided:
            return
        # _unsafe_view returns a view, although its schema says otherwise.
        storage = output.untyped_storage()
        if storage._cdata in storages or storage.nbytes() != output.nbytes:
            return
        storages.add(storage._cdata)
        outputs.append((output.size(), output.stride(), output.dtype))
    if len(_outputs) >= _MAX_OUTPUTS:
        _outputs.clear()
    _outputs[key] = kind, outputs


@functools.cache
def _has_fixed_outputs(func: torch._ops.OpOverload) -> bool:
    """Return whether the metadata of its inputs may determine what ``func`` returns.

    That is new tensors, inputs that it has written to, or nothing. No view of an input.
    """
    schema = func._schema
    aliases = [value.alias_info for value in (*schema.arguments, *schema.returns)]
    return torch.Tag.inplace_view not in func.tags and (
        all(alias is None or alias.is_write for alias in aliases)
        and all("Tensor" in str(returned.type) for returned in schema.returns)
    )


@functools.cache
def _is_factory(func: torch._ops.OpOverload) -> bool:
    """Return whether ``func`` is a factory such as ``empty_like``, which reads only a shape."""
    names = {argument.name for argument in func._schema.arguments}
    return "pin_memory" in names and "sparse" not in func.name()
