"""Copies, the only operators of emulated tensors that involve two devices."""

from __future__ import annotations

import math
from typing import Any

import torch

from .ledger import Label
from .machine import Machine, current_machine, is_in_backward, label_of_results
from .symbolic import CPU, META, is_known, is_unknown_dtype, require_known
from .tensor import (
    PROVISIONAL,
    EmulatedTensor,
    allocations_of,
    elem_of,
    operator,
    set_label,
    wrap_elem,
)


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
    copied: torch.Tensor = operator(torch.ops.aten._to_copy.default).on_shapes(elem, **kwargs)
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
        label = Label.PARAMETER if isinstance(source, torch.nn.Parameter) else Label.INPUT
        set_label(target, label, over=(Label.OTHER,))
    return target


def _readable(elem: torch.Tensor, machine: Machine) -> torch.Tensor:
    """Return ``elem`` with values that the CPU may read."""
    if machine.reads_unknown_as_nan and not is_known(elem) and is_unknown_dtype(elem.dtype):
        return torch.full(elem.shape, math.nan, dtype=elem.dtype, device=CPU)
    require_known(elem, "copying it to the CPU")
    return elem


def _copy_label(source: EmulatedTensor, target: torch.device, machine: Machine) -> Label:
    """Return the label of a copy: that of its source, or gathered output if it changes devices."""
    label = label_of_results(machine)
    if label is Label.GRADIENT:
        set_label(source, label)
        return label
    if source.device == target:
        return label
    known = allocations_of(source)[0].block.label
    if known not in PROVISIONAL:
        return known
    return label if is_in_backward() else Label.GATHERED_OUTPUT
