"""Symbolic mode: floating-point tensors on emulated devices have shapes but no values.

This file says which tensors have values, and runs operators on shapes only. An emulated tensor
wraps another tensor. If the values of an emulated tensor are not known, the wrapped tensor is on
torch's ``meta`` device and has only a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import torch

from ..errors import SymbolicValueError

aten = torch.ops.aten
CPU = torch.device("cpu")
META = torch.device("meta")


def is_known(elem: torch.Tensor) -> bool:
    """Return whether ``elem``, which an emulated tensor wraps, has values and not only a shape."""
    return not elem.is_meta


def is_unknown_dtype(dtype: torch.dtype) -> bool:
    """Return whether symbolic mode keeps only the shapes of ``dtype`` tensors, not the values."""
    return dtype.is_floating_point or dtype.is_complex


def is_written(argument: torch.Argument) -> bool:
    """Return whether the operator that has ``argument`` in its schema writes to this argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def require_known(elem: torch.Tensor, doing: str) -> None:
    """Raise a SymbolicValueError if the values of ``elem`` are not known."""
    if not is_known(elem):
        raise SymbolicValueError(
            f"{doing} needs the value of a {elem.dtype} tensor of shape {tuple(elem.shape)}, but "
            "emulate_devices(symbolic=True) keeps shapes only; use symbolic=False (in "
            "balanced-dp run, leave out --symbolic or lower --steps)"
        )


class UnknownStorage(torch.UntypedStorage):
    """A storage without data, but with a unique address.

    Safetensors compares addresses to find tensors that share a storage.
    """

    def data_ptr(self) -> int:
        """Return a number that stands for the address; no other storage has the same number."""
        return self._cdata  # type: ignore[no-any-return]


class SymbolicOperator:
    """A callable that runs one of torch's operators in symbolic mode.

    In symbolic mode, tensors may have shapes but no values. If the values of all arguments are
    known, the operator computes values. If not, it computes only shapes. Operators that read only
    the shape of their argument, such as ``zeros_like``, are an exception: they compute values if
    the dtype of the result is an integer dtype or bool, and otherwise only shapes.

    Torch computes many shapes in Python, which is slow, and the same shapes occur again in other
    layers of the model and in later training steps. So for most operators, the shapes are computed
    once for each combination of tensor layouts (sizes, strides and dtypes) and other arguments.
    Later calls with an equal combination only create outputs with the layouts of the first call's
    outputs. For other operators, such as those that return a view of an argument, each call
    computes the shapes.
    """

    __slots__ = ("func", "is_factory", "is_index", "make_outputs", "repeats", "written")

    def __init__(self, func: torch._ops.OpOverload) -> None:
        arguments = func._schema.arguments
        names = {argument.name for argument in arguments}
        self.func = func
        self.written = [(i, a.name) for i, a in enumerate(arguments) if is_written(a)]
        self.is_index = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
        reads_values = func is aten._to_copy.default or "sparse" in func.name()
        self.is_factory = "pin_memory" in names and not reads_values
        """Whether the operator reads only the shape of a tensor, as ``empty_like`` does."""
        self.repeats = torch.Tag.inplace_view not in func.tags and not any(
            a.is_out or a.name == "generator" for a in arguments
        )
        """Whether calls with equal arguments return outputs with equal layouts."""
        self.make_outputs: dict[Any, _MakeOutputs] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the operator.

        If an earlier call has found the layouts of the outputs, the outputs are created without
        running the operator.

        Raises:
            SymbolicValueError: the operator needs values that are not known, or would write unknown
                values into a tensor whose values are known.
        """
        if self.is_index:
            args = (args[0], _integer_indices(args[1]), *args[2:])
        tensors: list[torch.Tensor] = []
        key = _key((*args, *kwargs.items()), tensors)
        if make_outputs := self.make_outputs.get(key):
            return make_outputs(tensors)
        unknown = next((tensor for tensor in tensors if not is_known(tensor)), None)
        if self.is_factory:
            dtype = kwargs.get("dtype") or tensors[0].dtype
            unknown = tensors[0] if is_unknown_dtype(dtype) else None
            kwargs["device"] = CPU if unknown is None else META
        if unknown is None:
            return self.func(*args, **kwargs)
        for i, name in self.written:
            written: list[torch.Tensor] = []
            _key([args[i] if i < len(args) else kwargs.get(name)], written)
            for tensor in filter(is_known, written):
                require_known(unknown, f"{self.func}, which writes to a {tensor.dtype} tensor,")
        if not self.func._schema.returns:
            return None  # the operator only writes values, as aten._fused_adam_ does
        # torch's meta functions take no generator.
        kwargs = {name: _to_meta(value) for name, value in kwargs.items() if name != "generator"}
        try:
            out = self.func(*_to_meta(args), **kwargs)
        except RuntimeError as error:
            if "meta" in str(error).lower():  # torch cannot run it on shapes only
                require_known(unknown, f"{self.func}")
            raise
        if self.repeats and (make := _how_to_make(out, tensors, list(map(_storage, tensors)))):
            if len(self.make_outputs) >= _MAX_KEYS:
                self.make_outputs.clear()
            self.make_outputs[key] = make
        return out


def _integer_indices(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return ``indices`` with each mask replaced by the integer indices of its true elements.

    The number of true elements decides the shape of the result of indexing, so the values of a mask
    must be known.

    Raises:
        SymbolicValueError: the values of a mask are not known.
    """
    result: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            require_known(index, "indexing with a mask")
            result.extend(index.nonzero().unbind(1))
        else:
            result.append(index)
    return result


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(META) if is_known(value) else value
    if isinstance(value, torch.UntypedStorage):  # the storage of a loaded checkpoint
        return torch.UntypedStorage(value.nbytes(), device=META)
    if type(value) in (tuple, list):
        return type(value)(map(_to_meta, value))
    return value


_MakeOutputs = Callable[[list[torch.Tensor]], Any]
"""A function that takes the tensor arguments of an operator and creates the outputs."""

_MAX_KEYS = 2**12


def _key(values: Iterable[Any], tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """Return a dictionary key for ``values``, the arguments of an operator.

    Tensors among the arguments are also appended to ``tensors``. For each tensor, the key contains
    the sizes, the strides, the dtype and whether it is a meta tensor, which has no values. For each
    other argument, the key contains the type and the value.
    """
    key: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            strides = value.stride() if value.layout is torch.strided else None
            key += (value.size(), strides, value.dtype, value.is_meta)
        elif type(value) in (tuple, list):
            key.append(_key(value, tensors))
        else:
            key += (type(value), value)  # with the type, since 1 == 1.0 == True
    return tuple(key)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def _how_to_make(out: Any, inputs: list[torch.Tensor], storages: list[int]) -> _MakeOutputs | None:
    """Return a function that creates outputs with the layouts of ``out``, an operator's output.

    A layout is the sizes, the strides and the dtype of a tensor. Return None if ``out`` contains a
    value that cannot be created from a layout alone, such as a tensor whose values are known, or a
    view of an input.

    ``storages`` lists the storage of each tensor in ``inputs``, as a number. ``_how_to_make``
    appends the storage of an output if it is not in the list yet. So if the storage of an output is
    already in the list, the output is an input, or shares its storage with an input or with another
    output.
    """
    if isinstance(out, tuple | list):
        kind, parts = type(out), [_how_to_make(item, inputs, storages) for item in out]
        known = [make for make in parts if make]
        if len(known) < len(parts):
            return None
        return lambda tensors: kind([make(tensors) for make in known])  # keeps no reference to out
    if out is None:
        return lambda tensors: None
    if not isinstance(out, torch.Tensor) or is_known(out) or out.layout is not torch.strided:
        return None
    size, stride, dtype = out.size(), out.stride(), out.dtype
    storage = _storage(out)
    if storage not in storages:
        storages.append(storage)
        if out.untyped_storage().nbytes() != out.nbytes:
            return None
        return lambda tensors: torch.empty_strided(size, stride, dtype=dtype, device=META)
    return next((itemgetter(i) for i, tensor in enumerate(inputs) if tensor is out), None)
