"""Look up torch's operators in one thread, before replicas do in several.

Torch looks up the Python object of an operator where a tensor with ``__torch_dispatch__`` first
meets it. Without Python's lock, two threads that do so at the same time get an internal error.

Source: ``ptr_or`` in c10/core/PyHandleCache.h, torch 2.12: "you should be GIL protected".
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet

_TO_PYTHON = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)


def look_up_operators() -> int:
    """Call each operator of aten with tensors that compute nothing; return how many were called.

    A variant with ``out`` is left out, since its tensor decides what it computes with; and so is
    what torch cannot call with these arguments, which emulated tensors do not call either.
    """
    tensor = torch.Tensor._make_wrapper_subclass(_Nothing, (0,))
    num_called = 0
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten" or overload.endswith("out"):
            continue
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        required = [a for a in operator._schema.arguments if not a.has_default_value()]
        given = {a.name: _value(a.type, tensor) for a in required}
        args = [given.pop(a.name) for a in required if not a.kwarg_only]
        try:
            operator.redispatch(_TO_PYTHON, *args, **given)
        except (RuntimeError, TypeError):
            continue
        num_called += 1
    return num_called


class _Nothing(torch.Tensor):
    """A tensor on which each operator returns whatever it may return."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        values = [_value(returned.type, None) for returned in func._schema.returns]
        return values[0] if len(values) == 1 else tuple(values) or None


_VALUES = {
    **dict.fromkeys(("IntType", "SymIntType", "NumberType"), 0),
    "FloatType": 0.0,
    "BoolType": False,
    "StringType": "",
    "DeviceObjType": torch.device("cpu"),
}
"""By the kind of a type in a schema, a value of that type."""


def _value(kind: Any, tensor: torch.Tensor | None) -> Any:
    """Return a value of a type in a schema; for tensors ``tensor``, or an empty one."""
    if kind.kind() == "ListType":
        return [_value(kind.getElementType(), tensor)]
    if kind.kind() == "TensorType":
        return torch.empty(0) if tensor is None else tensor
    return _VALUES.get(kind.kind())
