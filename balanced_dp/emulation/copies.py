"""The operators of emulated tensors that have an implementation of their own.

They are copies, the only operators with two devices, and sums of gradients.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from .ledger import Label
from .machine import Machine, current_machine
from .symbolic import CPU, META, call, is_known, is_unknown_dtype, require_known
from .tensor import (
    PROVISIONAL,
    EmulatedTensor,
    Wrapped,
    allocations_of,
    elem_of,
    label_of_results,
    operator,
    set_label,
    wrap_elem,
    wrapper_of,
)

aten = torch.ops.aten


def to_copy(self: EmulatedTensor, **kwargs: Any) -> torch.Tensor:
    """Return a copy with another dtype, layout or device: ``Tensor.to``."""
    machine = current_machine()
    elem = elem_of(self)
    dtype = kwargs.get("dtype") or elem.dtype
    target = kwargs.pop("device", None) or self.device
    kwargs.pop("pin_memory", None)
    if target.type == "meta":
        return torch.empty_strided(elem.size(), elem.stride(), dtype=dtype, device=META)
    if target.type == "cpu":
        elem = _readable(elem, machine)
    else:
        target = machine.devices[machine.index_of(target)]
    machine.record_copy(self.device, target, elem.numel() * dtype.itemsize)
    copied: torch.Tensor = aten._to_copy(elem, **kwargs)
    if target.type == "cpu":
        return copied
    return wrap_elem(copied, machine, target.index, _copy_label(self, target, machine))


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy ``source`` into ``target``, of which at least one is emulated: ``Tensor.copy_``."""
    machine = current_machine()
    source_elem = elem_of(source) if isinstance(source, EmulatedTensor) else source
    machine.record_copy(source.device, target.device, source.numel() * target.dtype.itemsize)
    if not isinstance(target, EmulatedTensor):
        return target.copy_(_readable(source_elem, machine))
    target_elem = elem_of(target)
    if is_known(target_elem):
        require_known(source_elem, "copying it into an integer tensor")
        target_elem.copy_(source_elem)
    if isinstance(source, EmulatedTensor):
        if source.device != target.device:
            set_label(target, _copy_label(source, target.device, machine))
    else:
        is_parameter = isinstance(source, torch.nn.Parameter)
        fresh = (Label.OTHER,)
        set_label(target, Label.PARAMETER if is_parameter else Label.INPUT, over=fresh)
    return target


def _readable(elem: torch.Tensor, machine: Machine) -> torch.Tensor:
    """Return ``elem`` with values that the CPU may read."""
    if machine.reads_unknown_as_nan and not is_known(elem) and is_unknown_dtype(elem.dtype):
        return torch.full(elem.shape, math.nan, dtype=elem.dtype, device=CPU)
    require_known(elem, "copying it to the CPU")
    return elem


def _copy_label(source: EmulatedTensor, target: torch.device, machine: Machine) -> Label:
    """Return the label of a copy: its source's, or gathered output for one from another device."""
    label = label_of_results(machine)
    if label is Label.GRADIENT:
        set_label(source, label)
        return label
    if source.device == target:
        return label
    known = allocations_of(source)[0].block.label
    if known not in PROVISIONAL:
        return known
    in_backward = torch._C._current_graph_task_id() != -1
    return label if in_backward else Label.GATHERED_OUTPUT


# Accumulated gradients: the engine adds gradients of one tensor in place, but out of place if they
# are tensor subclasses (can_accumulate_inplace in torch's input_buffer.cpp). Additions that would
# be in place on CUDA take no memory here either.


def add(self: Any, other: Any, **kwargs: Any) -> Any:
    """Return the sum of two tensors, in the memory of the first where CUDA would do so."""
    if sys.getrefcount(self) > references_of_call() or not _would_accumulate_in_place(self, other):
        return operator(aten.add.Tensor)(self, other, **kwargs)
    wrapped = Wrapped(aten.add.Tensor)
    elem = call(aten.add_.Tensor, (wrapped.unwrap(self), wrapped.unwrap(other)), {})
    return wrapper_of(elem, wrapped.machine, wrapped.index)


@functools.cache
def references_of_call() -> int:
    """Return the references to a gradient that nobody keeps, in ``add`` as the engine calls it.

    They depend on the versions of torch and Python, so they are counted.
    """
    counts: list[int] = []

    def count(self: Any, other: Any) -> None:
        counts.append(sys.getrefcount(self))

    class Counted(torch.Tensor):
        # In torch's stubs it has wider types.
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is aten.add.Tensor:
                count(*args)
            with no_dispatch():
                return counted(func(*args, **(kwargs or {})))

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_subclass(Counted, tensor)

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        gradients = counted(torch.ones(())), counted(torch.ones(()))
        torch.autograd.grad((2 * x, 3 * x), x, gradients)
    return counts[0]


def _would_accumulate_in_place(self: Any, other: Any) -> bool:
    return (
        torch._C._current_graph_task_id() != -1
        and not torch.is_grad_enabled()
        and isinstance(self, EmulatedTensor)
        and isinstance(other, EmulatedTensor)
        and (self.shape, self.dtype, self.layout) == (other.shape, other.dtype, torch.strided)
        and self._elem.nbytes == self._elem.untyped_storage().nbytes()
        # No other reference in C++ than those of the engine, the Python object and the call (two),
        # and none to the storage that a tensor without views has not. (The stubs lack _use_count.)
        and self._use_count() <= 4  # type: ignore[attr-defined]
        and _num_references(self._elem) == _num_references(torch.empty(0, device=CPU))
    )


def _num_references(elem: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(elem.untyped_storage()._cdata)
