"""The tensor of an emulated device: a CPU tensor that says it is elsewhere and is counted there.

Every operation arrives in ``__torch_dispatch__`` below autograd, so gradients, hooks and views are
torch's own. It checks that its tensors are on one device, runs on the wrapped CPU tensors, and
enters what it made in the device's ledger. In symbolic mode the wrapped tensor is on torch's
``meta`` device where the value is not known: shape only, no data.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from ..errors import EmulationError
from .ledger import Allocation, Label
from .machine import Machine, current_machine
from .symbolic import CPU, META, call, is_known, is_unknown_dtype, require_known, symbolic_arguments

aten = torch.ops.aten

# In torch, and not in its stubs, as are the other names of torch._C and of data below.
AUTOCAST_KEY = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
"""A key that torch leaves to others and passes over unless autocast is on; see autocast.py."""

_EXTRA_KEYS = torch._C.DispatchKeySet(AUTOCAST_KEY)

# What may still become something more precise than it was when it was computed.
_PROVISIONAL = {Label.ACTIVATION, Label.OTHER}

# Arguments that may be on the CPU, on CUDA too: the host reads them.
_READ_BY_HOST = {
    aten.index.Tensor: {"indices"},
    aten.index_put.default: {"indices"},
    aten.index_put_.default: {"indices"},
    aten._index_put_impl_.default: {"indices"},
    aten._pack_padded_sequence_backward.default: {"batch_sizes"},
    aten._pad_packed_sequence.default: {"batch_sizes"},
}


class EmulatedTensor(torch.Tensor):
    """A tensor on an emulated device. Made by torch's own factories and by ``.to("lazy:0")``."""

    _elem: torch.Tensor
    """The CPU (or meta) tensor of the same shape and strides that holds the data."""
    _allocations: tuple[Allocation, ...]
    """The memory it views: one storage, or the indices and values of a sparse tensor."""

    # Operators are seen below autograd, in __torch_dispatch__, so not above it as well. Torch's
    # stubs declare both for plain tensors: a method here, any callable and any types there.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not all(issubclass(kind, cls) for kind in types):
            return NotImplemented  # the other kind of tensor may know what to do
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if _is_composite(func):  # reached in inference mode only, where autograd does not decompose
            return func.decompose(*args, **kwargs)
        return run(func, args, kwargs)

    # The methods that torch implements for its own tensors only. Its stubs declare `data` a plain
    # attribute; it is a descriptor.

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history."""
        data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Makes this tensor hold what ``value`` holds, where ``value`` is."""
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        assert isinstance(value, EmulatedTensor)  # torch has refused any other
        self._elem, self._allocations = value._elem, value._allocations

    def tolist(self) -> Any:
        """Returns the values as nested lists, copied to the CPU first."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raises TypeError as on CUDA; with ``force`` returns a copy on the CPU."""
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.numpy()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    # Wider than object's, as torch.Tensor's is.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        suffix = f", device='{self.device}'" + (", requires_grad=True" * self.requires_grad)
        if any(allocation.ledger.closed for allocation in self._allocations):
            return f"tensor(<freed>, size={tuple(self.shape)}{suffix})"
        if not is_known(self._elem):
            return f"tensor(<symbolic>, size={tuple(self.shape)}, dtype={self.dtype}{suffix})"
        with no_dispatch():
            return f"{str(self._elem)[:-1]}{suffix})"

    def __copy__(self) -> torch.Tensor:
        return self._leaf(self.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        twin = self._leaf(self.detach().clone())
        twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the CPU tensor, so that a checkpoint loads where there are no such devices."""
        elem = elem_of(self).detach()
        require_known(elem, "saving it")
        return self._leaf(elem).__reduce_ex__(protocol)

    def _leaf(self, data: torch.Tensor) -> torch.Tensor:
        """Returns ``data`` as what this tensor is: a parameter or not, with a gradient or not."""
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(data, self.requires_grad)
        return data.requires_grad_(self.requires_grad)


def run(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``func`` on the wrapped tensors of its arguments and wraps what it returns."""
    wrapped = Wrapped(func)
    machine = wrapped.machine
    refused = _refused_cpu_dims(func)
    elem_args = tuple(map(wrapped.unwrap, args, refused))
    elem_kwargs = {name: wrapped.unwrap(value, 0) for name, value in kwargs.items()}
    device = wrapped.device
    target = kwargs.get("device")
    if target is not None:
        target = torch.device(target)
        elem_kwargs["device"] = target
        if target.type in ("cpu", "meta"):
            return func(*elem_args, **elem_kwargs)
        elem_kwargs["device"] = CPU
        device = machine.devices[machine.index_of(target)]
    if "pin_memory" in kwargs:
        elem_kwargs["pin_memory"] = False
    if _draws_random_numbers(func) and kwargs.get("generator") is None:
        elem_kwargs["generator"] = machine.generators[device.index]
    if machine.symbolic:
        elem_args, elem_kwargs = symbolic_arguments(func, elem_args, elem_kwargs)
    out = call(func, elem_args, elem_kwargs)
    if _writes_to_list(func):  # torch counts writes to single tensors itself
        torch.autograd.graph.increment_version(t for t in args[0] if not t.is_inference())
    return wrapped.wrap(out, device, *_labels(machine))


class Wrapped:
    """The emulated tensors of one call: their device, and which wrapper a CPU tensor belongs to."""

    __slots__ = ("by_elem", "cpu_tensor", "func", "machine")

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self.func = func
        self.machine = current_machine()
        self.by_elem: dict[int, EmulatedTensor] = {}
        self.cpu_tensor: torch.Tensor | None = None

    def unwrap(self, value: Any, refused_cpu_dims: float = 1) -> Any:
        """Returns ``value`` with wrapped tensors in the place of emulated ones.

        CPU tensors with as many dimensions as ``refused_cpu_dims``, or more, are out of place.
        """
        if isinstance(value, EmulatedTensor):
            elem = elem_of(value)
            self.by_elem[id(elem)] = value
            return elem
        if isinstance(value, torch.Tensor):
            if value.dim() >= refused_cpu_dims:
                self.cpu_tensor = value
            return value
        if type(value) in (tuple, list):
            return type(value)(self.unwrap(item, refused_cpu_dims) for item in value)
        return value

    @property
    def device(self) -> torch.device:
        """The one device of all tensors."""
        devices = list(dict.fromkeys(tensor.device for tensor in self.by_elem.values()))
        if self.cpu_tensor is not None:
            devices.append(self.cpu_tensor.device)
        if len(devices) > 1:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{devices[0]} and {devices[1]}! (when running {self.func})"
            )
        return devices[0]

    @property
    def generator(self) -> torch.Generator:
        """The generator of that device."""
        return self.machine.generators[self.device.index]

    def wrap(
        self,
        out: Any,
        device: torch.device | None = None,
        label: Label = Label.ACTIVATION,
        relabel: bool = False,
    ) -> Any:
        """Returns ``out`` with emulated tensors for wrapped ones, known wrappers among them.

        New ones are on ``device``, by default that of the others.
        """
        device = device or self.device
        if isinstance(out, torch.Tensor):
            wrapper = self.by_elem.get(id(out))
            if wrapper is None:
                aliased = self._aliased_normal_tensor(out)
                with torch.inference_mode(False) if aliased else nullcontext():
                    wrapper = wrap_elem(out, self.machine, device, label)
            else:
                _renew(wrapper, self.machine, device, label)
            if relabel:
                set_label(wrapper, label)
            return wrapper
        if type(out) in (tuple, list):
            return type(out)(self.wrap(item, device, label, relabel) for item in out)
        return out

    def _aliased_normal_tensor(self, out: torch.Tensor) -> bool:
        # In inference mode a view of a normal tensor is a normal tensor: the wrapper must be, too.
        return (
            torch.is_inference_mode_enabled()
            and not out.is_inference()
            and any(not wrapper.is_inference() for wrapper in self.by_elem.values())
        )


def wrap_elem(
    elem: torch.Tensor, machine: Machine, device: torch.device, label: Label
) -> EmulatedTensor:
    """Returns ``elem`` as a tensor on ``device``, entered in its ledger unless it is a view.

    Raises:
        torch.OutOfMemoryError: it does not fit on the device.
    """
    if machine.symbolic and is_unknown_dtype(elem.dtype) and is_known(elem):
        elem = torch.empty_strided(elem.size(), elem.stride(), dtype=elem.dtype, device=META)
    return _wrapper(elem, device, _enter(elem, machine, device, label))


def _enter(
    elem: torch.Tensor, machine: Machine, device: torch.device, label: Label
) -> tuple[Allocation, ...]:
    return tuple(machine.enter(device, part.untyped_storage(), label) for part in _parts(elem))


def _renew(wrapper: EmulatedTensor, machine: Machine, device: torch.device, label: Label) -> None:
    """Makes the wrapper say what its wrapped tensor is, after that was written to in place."""
    elem = wrapper._elem
    wrapper._allocations = _enter(elem, machine, device, label)
    for allocation in wrapper._allocations:
        machine.resize(device, allocation)
    if _metadata(wrapper) != _metadata(elem):  # resize_, unsqueeze_, set_ ...
        wrapper.data = _wrapper(elem, device, wrapper._allocations)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tensor.shape,)
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _wrapper(
    elem: torch.Tensor, device: torch.device, allocations: tuple[Allocation, ...]
) -> EmulatedTensor:
    strided: dict[str, Any] = (
        {"strides": elem.stride(), "storage_offset": elem.storage_offset()}
        if elem.layout is torch.strided
        else {}
    )
    wrapper: EmulatedTensor = torch.Tensor._make_wrapper_subclass(
        EmulatedTensor,
        elem.size(),
        dtype=elem.dtype,
        layout=elem.layout,
        device=device,
        _extra_dispatch_keys=_EXTRA_KEYS,
        **strided,
    )
    wrapper._elem = elem
    wrapper._allocations = allocations
    return wrapper


def _parts(elem: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold the data; a sparse tensor has no storage of its own."""
    if elem.layout is torch.strided:
        return (elem,)
    if elem.layout is torch.sparse_coo:
        require_known(elem, "a sparse tensor")
        return (elem._indices(), elem._values())
    raise EmulationError(f"emulated devices have no {elem.layout} tensors")


def elem_of(tensor: EmulatedTensor) -> torch.Tensor:
    """Returns the wrapped tensor, and notices that an ``nn.Parameter`` is one.

    Raises:
        EmulationError: the context that the tensor belonged to has ended.
    """
    if tensor._allocations[0].ledger.closed:
        raise EmulationError(
            f"this tensor was on {tensor.device}, whose emulate_devices context has ended; "
            "move what you need with .cpu() before you leave it"
        )
    if isinstance(tensor, torch.nn.Parameter):
        set_label(tensor, Label.PARAMETER)
    return tensor._elem


def set_label(tensor: object, label: Label, over: set[Label] = _PROVISIONAL) -> None:
    """Labels the memory of ``tensor``, where it is emulated and its label is one of ``over``."""
    if isinstance(tensor, EmulatedTensor):
        for allocation in tensor._allocations:
            if allocation.block.label in over:
                allocation.block.label = label


def _labels(machine: Machine) -> tuple[Label, bool]:
    """Returns the label of what the running operation makes, and whether views take it too."""
    node = torch._C._current_autograd_node()
    if node is not None and _makes_parameter_gradients(node):
        return Label.GRADIENT, True
    return (Label.OTHER if machine.thread.in_optimizer_step else Label.ACTIVATION), False


def _makes_parameter_gradients(node: Any) -> bool:
    """Whether all that this node of the backward pass computes ends in some leaf's ``.grad``."""
    if type(node).__name__ == "AccumulateGrad":
        return True
    targets = [target for target, _ in node.next_functions if target is not None]
    return bool(targets) and all(type(t).__name__ == "AccumulateGrad" for t in targets)


# What torch says of its operators, asked once each.


@functools.cache
def _is_composite(func: torch._ops.OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@functools.cache
def _writes_to_list(func: torch._ops.OpOverload) -> bool:
    if not func._schema.arguments:
        return False
    first = func._schema.arguments[0]
    is_written = first.alias_info is not None and first.alias_info.is_write
    return is_written and isinstance(first.type, torch.ListType)


@functools.cache
def _draws_random_numbers(func: torch._ops.OpOverload) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


@functools.cache
def _refused_cpu_dims(func: torch._ops.OpOverload) -> tuple[float, ...]:
    """For each argument, from how many dimensions on a CPU tensor is refused, as on CUDA.

    One without dimensions counts as a number, unless it is an item of a list or written to.
    """

    def refused_dims(argument: torch.Argument) -> float:
        if argument.name in _READ_BY_HOST.get(func, ()):
            return math.inf
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        return 0 if is_written or isinstance(argument.type, torch.ListType) else 1

    return tuple(map(refused_dims, func._schema.arguments))


# Copies: the only operators that may name two devices.


def _to_copy(self: EmulatedTensor, **kwargs: Any) -> torch.Tensor:
    machine = current_machine()
    elem = elem_of(self)
    device = kwargs.pop("device", None)
    target = self.device if device is None else torch.device(device)
    kwargs.pop("pin_memory", None)
    if target.type == "meta":
        dtype = kwargs.get("dtype") or elem.dtype
        return torch.empty_strided(elem.size(), elem.stride(), dtype=dtype, device=META)
    if target.type == "cpu":
        require_known(elem, "copying it to the CPU")
    else:
        target = machine.devices[machine.index_of(target)]
    machine.record_copy(self.device, target, _num_bytes(elem, kwargs.get("dtype")))
    copied: torch.Tensor = aten._to_copy(elem, **kwargs)
    if target.type == "cpu":
        return copied
    return wrap_elem(copied, machine, target, _copy_label(self, target, machine))


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``target.copy_(source)``, one of them emulated or both."""
    machine = current_machine()
    source_elem = elem_of(source) if isinstance(source, EmulatedTensor) else source
    machine.record_copy(source.device, target.device, _num_bytes(source_elem, target.dtype))
    if not isinstance(target, EmulatedTensor):
        require_known(source_elem, "copying it to the CPU")
        return target.copy_(source_elem)
    target_elem = elem_of(target)
    if is_known(target_elem):
        require_known(source_elem, "copying it into an integer tensor")
        target_elem.copy_(source_elem)
    if isinstance(source, EmulatedTensor):
        if source.device != target.device:
            set_label(target, _copy_label(source, target.device, machine))
    else:
        is_parameter = isinstance(source, torch.nn.Parameter)
        fresh = {Label.OTHER}
        set_label(target, Label.PARAMETER if is_parameter else Label.INPUT, over=fresh)
    return target


def _copy_label(source: EmulatedTensor, target: torch.device, machine: Machine) -> Label:
    """What a copy is used for: the same as its source, unless it carries an output elsewhere."""
    label, is_gradient = _labels(machine)
    if is_gradient:
        set_label(source, label)
        return label
    in_backward = torch._C._current_autograd_node() is not None
    known = source._allocations[0].block.label
    if known not in _PROVISIONAL:
        return label if source.device == target else known
    if source.device != target and not in_backward:
        return Label.GATHERED_OUTPUT
    return label


def _num_bytes(elem: torch.Tensor, dtype: torch.dtype | None) -> int:
    return elem.numel() * (dtype or elem.dtype).itemsize


# Gradients that meet at one tensor: the engine adds the second to the first in place, but out of
# place where the first is a tensor subclass (can_accumulate_inplace in torch's input_buffer.cpp).
# What would have been written in place takes no memory here either.


def _add(self: Any, other: Any, **kwargs: Any) -> Any:
    # In Python only the call has it: C++, the tuple of arguments, this frame and getrefcount.
    if sys.getrefcount(self) > 4 or not _would_accumulate_in_place(self, other):
        return run(aten.add.Tensor, (self, other), kwargs)
    wrapped = Wrapped(aten.add.Tensor)
    elem = aten.add.Tensor(wrapped.unwrap(self), wrapped.unwrap(other))
    current_machine().move(self._allocations[0], elem)
    return _wrapper(elem, wrapped.device, self._allocations)


def _would_accumulate_in_place(self: Any, other: Any) -> bool:
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and isinstance(self, EmulatedTensor)
        and isinstance(other, EmulatedTensor)
        and (self.shape, self.dtype, self.layout) == (other.shape, other.dtype, torch.strided)
        and self._elem.nbytes == self._elem.untyped_storage().nbytes()
        # Nor has anybody in C++: the engine, the Python object and two for the call; and no other
        # tensor views it: this tuple and the argument of getrefcount. (The stubs lack _use_count.)
        and self._use_count() <= 4  # type: ignore[attr-defined]
        and sys.getrefcount(self._allocations[0]) == 2
    )


HANDLERS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.add.Tensor: _add,
    aten.copy_.default: copy_,
}
"""Operators with a kernel of their own; everything else goes through ``run``."""
