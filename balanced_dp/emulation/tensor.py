"""The class ``EmulatedTensor``: a tensor on an emulated device, which wraps a CPU tensor.

``EmulatedTensor.__torch_dispatch__`` intercepts every operator after autograd has handled it, so
torch itself takes care of gradients, hooks and views. ``__torch_dispatch__`` checks that all
tensors are on one device, runs the operator on the wrapped CPU tensors, and records the memory of
the results in the ledger of the device.

In symbolic mode, floating-point and complex tensors have shapes but no values. If a tensor of
another dtype is computed from missing values, as the mask ``x > 0`` is, it has no values, either.
An emulated tensor without values wraps a tensor on torch's ``meta`` device and not on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container
from itertools import repeat
from typing import Any

import torch

from ..errors import EmulationError
from .ledger import Block, Label
from .machine import DEVICES, Machine, current_machine, label_of_results
from .symbolic import (
    CPU,
    META,
    SymbolicOperator,
    UnknownStorage,
    is_known,
    is_unknown_dtype,
    is_written,
    require_known,
)

# Torch's type stubs lack this name, and other names of torch._C below.
AUTOCAST_KEY = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
"""The dispatch key for which ``autocast.py`` registers the autocast kernels of emulated tensors.

Torch skips this key unless autocast is on.
"""

_EXTRA_KEYS = torch._C.DispatchKeySet(AUTOCAST_KEY)

PROVISIONAL = (Label.ACTIVATION, Label.OTHER)
"""The labels (uses of memory) that a more specific label may replace later."""

NOT_STATE = (*PROVISIONAL, Label.INPUT, Label.GATHERED_OUTPUT)
"""The labels (uses of memory) that are replaced if the tensor is a parameter or a buffer."""

HANDLERS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
"""For each operator with a special implementation on emulated devices, that implementation.

``kernels.py`` fills this dictionary.
"""


# ``Tensor.data`` is a descriptor, but torch's stubs declare a plain attribute.
_torch_data: Any = torch.Tensor.data


class EmulatedTensor(torch.Tensor):
    """A tensor on an emulated device, for example ``torch.zeros(3, device="lazy:0")``.

    "lazy" is the device type of emulated devices.
    """

    _elem: torch.Tensor
    """The wrapped tensor, which holds the data of this tensor and has its shape and strides.

    It is a CPU tensor, or a meta tensor if the values are not known.
    """
    _machine: Machine
    _blocks: list[Block]
    """The recorded memory of this tensor: a block for each of its storages.

    A strided tensor has one storage, and a sparse tensor has two.
    """

    # __torch_dispatch__ intercepts operators after autograd. So __torch_function__, which would
    # intercept them before autograd, is disabled. Mypy is told to ignore that both methods have
    # other types than those in torch's stubs.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _is_param = False
    """Whether this tensor is an ``nn.Parameter``; the constructor of ``nn.Parameter`` sets it."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: torch._ops.OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if types != (cls,) and not all(issubclass(kind, EmulatedTensor) for kind in types):
            return NotImplemented  # another class, such as that of nested tensors, handles it
        return _handler(func)(*args, **(kwargs or {}))

    def as_subclass(self, cls: type[torch.Tensor]) -> Any:
        """Return a view of this tensor as an instance of both ``cls`` and ``EmulatedTensor``."""
        result = self.view_as(self)
        result.__class__ = _emulated_subclass(cls)
        return result

    # Methods that torch implements for its own tensors only.

    def _set_data(self, value: torch.Tensor) -> None:
        """Replace the data and the device of this tensor by those of ``value``."""
        _torch_data.__set__(self, value)
        assert isinstance(value, EmulatedTensor)  # torch accepts no other tensor
        self._elem, self._machine, self._blocks = value._elem, value._machine, value._blocks

    data: Any = property(_torch_data.__get__, _set_data)

    def item(self) -> Any:
        """Return the value of this tensor, which must have one element, as a Python number."""
        if current_machine().reads_unknown_as_nan and not is_known(elem_of(self)):
            return False if self.dtype is torch.bool else math.nan  # as "nan < 1" is False
        return super().item()

    def __bool__(self) -> bool:
        return self.item() if self.dtype is torch.bool and self.numel() == 1 else super().__bool__()

    def __float__(self) -> float:
        return float(self.item())

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the wrapped tensor. A tensor and its views share this storage."""
        storage = elem_of(self).untyped_storage()
        if not is_known(self._elem):
            storage.__class__ = UnknownStorage
        return storage

    def data_ptr(self) -> int:
        """Return the address of the first element of this tensor."""
        return self.untyped_storage().data_ptr() + int(self.storage_offset()) * self.itemsize

    def tolist(self) -> Any:
        """Return the values of this tensor as nested lists."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy of this tensor as a NumPy array if ``force`` is true.

        Raises:
            TypeError: ``force`` is false. A CUDA tensor raises the same error.
        """
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    # Like Tensor.__repr__, this method has a parameter that object.__repr__ does not have.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        suffix = f", device='{self.device}'" + (", requires_grad=True" * self.requires_grad)
        if not is_known(self._elem):
            return f"tensor(<symbolic>, size={tuple(self.shape)}, dtype={self.dtype}{suffix})"
        return f"{str(self._elem)[:-1]}{suffix})"

    def __copy__(self) -> torch.Tensor:
        return self._leaf(self.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._leaf(self.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this tensor as a CPU tensor, so that checkpoints load without emulated devices.

        Emulated devices named "cuda" are an exception: ``torch.save`` writes a location such as
        "cuda:0" into the file, as for CUDA tensors. On a machine without a GPU, ``torch.load`` then
        needs ``map_location``.

        Raises:
            SymbolicValueError: the values of this tensor are not known.
        """
        elem = elem_of(self).detach()
        require_known(elem, "saving it")
        return self._leaf(elem).__reduce_ex__(protocol)

    def _leaf(self, data: torch.Tensor) -> torch.Tensor:
        """Return ``data`` as a leaf tensor with the ``requires_grad`` of this tensor.

        If this tensor is an ``nn.Parameter``, so is the leaf tensor.
        """
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(data, self.requires_grad)
        return data.requires_grad_(self.requires_grad)


class Operator:
    """A callable that runs one of torch's operators on emulated tensors."""

    __slots__ = ("draws_random_numbers", "func", "keeps_shapes", "on_shapes", "refused_cpu_dims")

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema = func._schema
        self.func = func
        self.refused_cpu_dims = tuple(map(_refused_cpu_dims, schema.arguments))
        self.draws_random_numbers = any(a.name == "generator" for a in schema.arguments)
        self.on_shapes = SymbolicOperator(func)
        # An in-place operator without the tag inplace_view keeps the shapes of its arguments. All
        # other operators that write to arguments, such as those with out=, may resize them.
        self.keeps_shapes = schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator on the tensors that the arguments wrap, and wrap the outputs."""
        wrapped = Wrapped()
        machine = wrapped.machine
        elem_args = [
            value if dims is None else wrapped.unwrap(value, dims)
            for value, dims in zip(args, self.refused_cpu_dims, strict=False)
        ]
        elem_kwargs = {name: wrapped.unwrap(value, 0) for name, value in kwargs.items()}
        index = wrapped.index
        target = kwargs.get("device")
        if target is not None:
            if target.type in ("cpu", "meta"):
                return self.func(*elem_args, **elem_kwargs)
            elem_kwargs["device"] = CPU
            index = machine.index_of(target)
        if self.draws_random_numbers and kwargs.get("generator") is None:
            elem_kwargs["generator"] = machine.generators[index]
        run = self.on_shapes if machine.symbolic else self.func
        out = run(*elem_args, **elem_kwargs)
        for position, name in self.on_shapes.written:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, list):  # torch increments _version only of tensors outside lists
                torch.autograd.graph.increment_version(t for t in value if not t.is_inference())
            elif value is not None and (not self.keeps_shapes or value.is_sparse):
                value.data = wrap_elem(value._elem, machine, index, label_of_results(machine))
        return wrapped.wrap(out, index)


operator = functools.cache(Operator)


@functools.cache
def _handler(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """Return the callable that runs the operator ``func`` on emulated tensors."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    # Autograd decomposes composite operators into others. Inference mode skips autograd, so in that
    # mode composite operators arrive here, and are decomposed here.
    return HANDLERS.get(func) or (func.decompose if is_composite else operator(func))


@functools.cache
def _emulated_subclass(cls: Any) -> Any:
    if issubclass(EmulatedTensor, cls):
        return EmulatedTensor
    if issubclass(cls, EmulatedTensor):
        return cls

    def torch_function(both: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A result on the CPU must get the class cls, and not the class ``both`` (created below). So
        # call cls.__torch_function__. For an emulated result, cls.__torch_function__ calls
        # EmulatedTensor.as_subclass, which gives the result the class ``both``.
        known = [cls if kind is both else kind for kind in types]
        return cls.__torch_function__(func, known, args, kwargs)

    attributes = property(torch.Tensor.__dict__["__dict__"].__get__, _refuse_attributes)
    both = type(cls)(cls.__name__, (cls, EmulatedTensor), {"__dict__": attributes})
    both.__torch_function__ = classmethod(torch_function)
    return both


def _refuse_attributes(self: object, attributes: object) -> None:
    name = type(self).__name__
    raise EmulationError(
        f"a {name} cannot be on an emulated device: {name}, like all tensors of fastai, replaces "
        "its __dict__, in which emulated tensors hold their data; use torch.Tensor, or a GPU"
    )


class Wrapped:
    """The emulated tensors in the arguments of one call of an operator, and their device.

    ``unwrap`` replaces emulated tensors in the arguments by the tensors that they wrap. ``wrap``
    replaces the tensors in the output by emulated tensors.
    """

    __slots__ = ("_index", "_other", "by_elem", "machine")

    def __init__(self) -> None:
        self.machine = current_machine()
        self.by_elem: dict[int, EmulatedTensor] = {}
        self._index = -1
        self._other: torch.Tensor | None = None

    def unwrap(self, value: Any, refused_cpu_dims: float = 1) -> Any:
        """Return ``value`` with each emulated tensor replaced by the tensor that it wraps.

        Other tensors are kept as they are. But a CPU tensor with ``refused_cpu_dims`` or more
        dimensions counts as a tensor on another device, so the property ``index`` then raises an
        error.
        """
        if isinstance(value, EmulatedTensor):
            elem = elem_of(value)
            self.by_elem[id(elem)] = value
            index = value.get_device()
            if self._index < 0:
                self._index = index
            elif self._index != index:
                self._other = value
            return elem
        if isinstance(value, torch.Tensor):
            if value.dim() >= refused_cpu_dims:
                self._other = value
            return value
        if type(value) in (tuple, list):
            return type(value)([self.unwrap(item, refused_cpu_dims) for item in value])
        return value

    @property
    def index(self) -> int:
        """The index of the device that holds all emulated tensors of the call.

        Raises:
            RuntimeError: the tensors are on several devices.
        """
        if self._other is not None:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{self.machine.devices[self._index]} and {self._other.device}!"
            )
        return self._index

    def wrap(self, out: Any, index: int | None = None, label: Label | None = None) -> Any:
        """Return ``out``, an operator's output, with each tensor replaced by an emulated tensor.

        If the operator returned one of its arguments, the result is the emulated tensor that was
        passed as this argument. Other tensors are wrapped in new tensors on the device ``index``,
        by default the device of the arguments. Their memory is labelled with ``label``, by default
        the label that ``label_of_results`` returns.
        """
        index = self.index if index is None else index
        label = label or label_of_results(self.machine)
        if isinstance(out, torch.Tensor):
            wrapper = self.by_elem.get(id(out))
            if wrapper is None:
                wrapper = wrap_elem(out, self.machine, index, label)
            if label is Label.GRADIENT:  # the arguments are gradients of leaf tensors, too
                for tensor in (*self.by_elem.values(), wrapper):
                    set_label(tensor, label)
            return wrapper
        if type(out) in (tuple, list):
            return type(out)(map(self.wrap, out, repeat(index), repeat(label)))
        return out


def wrap_elem(elem: torch.Tensor, machine: Machine, index: int, label: Label) -> EmulatedTensor:
    """Return a new tensor on the emulated device ``index`` that wraps ``elem``.

    The memory of ``elem`` is recorded in the device's ``DeviceLedger``, with ``label`` (what the
    memory is used for). If ``elem`` is a view of recorded memory, nothing is recorded. In symbolic
    mode, a floating-point or complex ``elem`` is first replaced by a meta tensor of the same shape.

    Raises:
        torch.OutOfMemoryError: the tensor does not fit on the device.
    """
    if torch.is_inference_mode_enabled() and not elem.is_inference():
        with torch.inference_mode(False):
            return wrap_elem(elem, machine, index, label)
    if machine.symbolic and is_unknown_dtype(elem.dtype) and is_known(elem):
        elem = torch.empty_strided(elem.size(), elem.stride(), dtype=elem.dtype, device=META)
    blocks = [machine.enter(index, part.untyped_storage(), label) for part in _parts(elem)]
    is_strided = elem.layout is torch.strided
    wrapper: EmulatedTensor = torch.Tensor._make_wrapper_subclass(
        EmulatedTensor,
        elem.size(),
        elem.stride() if is_strided else None,
        elem.storage_offset() if is_strided else None,
        dtype=elem.dtype,
        layout=elem.layout,
        device=DEVICES[index],
        _extra_dispatch_keys=_EXTRA_KEYS,
    )
    wrapper._elem = elem
    wrapper._machine = machine
    wrapper._blocks = blocks
    return wrapper


def _parts(elem: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that hold the data of ``elem``.

    The result is ``(elem,)`` if ``elem`` is strided, and ``(indices, values)`` if ``elem`` is a
    sparse COO tensor.

    Raises:
        EmulationError: ``elem`` has another layout.
        SymbolicValueError: ``elem`` is a sparse COO tensor whose values are not known.
    """
    if elem.layout is torch.strided:
        return (elem,)
    if elem.layout is torch.sparse_coo:
        require_known(elem, "a sparse tensor")
        return (elem._indices(), elem._values())
    raise EmulationError(
        f"emulated devices support strided and sparse COO tensors, got {elem.layout}"
    )


def elem_of(tensor: EmulatedTensor) -> torch.Tensor:
    """Return the CPU or meta tensor that ``tensor`` wraps.

    As a side effect, the memory of an ``nn.Parameter`` is labelled as a parameter. The labels
    buffer, gradient and optimizer state are not replaced.

    Raises:
        EmulationError: the ``emulate_devices`` context in which ``tensor`` was created has ended.
    """
    if tensor._machine.is_closed:
        fact = f"this tensor was on {tensor.device}, whose emulate_devices context has ended"
        raise EmulationError(f"{fact}; copy results with .cpu() before the context ends")
    if tensor._is_param:
        set_label(tensor, Label.PARAMETER, NOT_STATE)
    return tensor._elem


def set_label(tensor: object, label: Label, over: Container[Label] = PROVISIONAL) -> None:
    """Label the memory of ``tensor`` with ``label``, if its present label is in ``over``.

    A label says what memory is used for. If ``tensor`` is not an emulated tensor, do nothing.
    """
    if isinstance(tensor, EmulatedTensor):
        for block in tensor._blocks:
            if block.label in over:
                block.label = label


def _refused_cpu_dims(argument: torch.Argument) -> float | None:
    """Return the smallest number of dimensions with which a CPU tensor is refused as ``argument``.

    ``argument`` belongs to the schema of an operator on emulated tensors. The result is usually 1:
    as on CUDA, a 0-dimensional CPU tensor is accepted as a number. If ``argument`` is a list or is
    written to, the result is 0: all CPU tensors are refused. If CPU tensors of any dimension are
    accepted, the result is infinity. If ``argument`` takes no tensors, the result is None.
    """
    if "Tensor" not in str(argument.type):
        return None
    if argument.name == "batch_sizes" or str(argument.type) == "List[Optional[Tensor]]":
        return math.inf  # as on CUDA, batch_sizes are on the CPU, and indices may be
    return 0 if is_written(argument) or isinstance(argument.type, torch.ListType) else 1
