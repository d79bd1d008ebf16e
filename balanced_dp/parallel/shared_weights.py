"""Copies of parameters on other devices, for one call or for several calls that share them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..devices import is_cuda
from .copies import Arrivals, Copies, copy_to, make_nodes

_CHANGED = (
    "a parameter was replaced, frozen, unfrozen or changed inside shared_weights(), whose calls "
    "all use the same weights; change parameters, and step the optimizer, after the block"
)


class ParameterCopies:
    """Makes copies of parameters on other devices: for each call, or once for several calls.

    The calls inside a ``with`` block of ``shared`` use the same copies.
    """

    def __init__(self) -> None:
        self._block: _Block | None = None
        self._lock = threading.Lock()
        """A lock to hold while a block of ``shared`` begins, or a call inside it gets copies."""

    def on(
        self, devices: Sequence[torch.device], parameters: list[torch.Tensor]
    ) -> tuple[Copies, Arrivals]:
        """Return copies of the parameters on each device, and the CUDA events to wait for.

        The events mark the end of each copy. Inside ``shared``, there are no events, because the
        current streams already wait for the copies. On its own device, a parameter is not copied:
        the parameter itself is returned.

        Args:
            devices: the destinations; a device may repeat.
            parameters: the parameters, each given once.

        Raises:
            RuntimeError: since the first call in a ``with`` block of ``shared``, a parameter was
                replaced, frozen or unfrozen, or a parameter that requires grad was changed.
        """
        arrivals = Arrivals()
        if len({*devices, *(parameter.device for parameter in parameters)}) == 1:
            return dict.fromkeys(devices, parameters), arrivals
        if block := self._block:
            with self._lock:
                return block.on(devices, parameters), arrivals
        return _copied(devices, parameters, torch.is_grad_enabled(), arrivals), arrivals

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager inside which all calls use the same copies of the parameters.

        The ``with`` blocks of this context manager may be nested. If several threads are inside
        such blocks at the same time, all of them use the copies of the block that began first,
        until this block ends.
        """
        with self._lock:
            is_outermost = self._block is None
            self._block = self._block or _Block()
        try:
            yield
        finally:
            if is_outermost:
                self._block = None


class _Block:
    """The copies of parameters that all calls inside a block of ``ParameterCopies.shared`` use."""

    def __init__(self) -> None:
        self._copies: Copies = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        """For each device, the stream that was current when the copies on it were made."""
        self._versions: dict[torch.Tensor, int | None] = {}
        """The parameters of the first call, and the version counter of each that requires grad."""

    def on(self, devices: Sequence[torch.device], parameters: Sequence[torch.Tensor]) -> Copies:
        """Return the copies of ``parameters`` on each device.

        The copies are differentiable even if the first call is made without gradients, since later
        calls may need gradients.

        Args:
            devices: the destinations; a device may repeat.
            parameters: the originals.

        Raises:
            RuntimeError: since the first call in the ``with`` block, a parameter was replaced,
                frozen or unfrozen, or a parameter that requires grad was changed.
        """
        versions = {
            # Writes to frozen parameters are allowed, since forward itself may write to them: see
            # Replicas.running.
            p: p._version if p.requires_grad and not p.is_inference() else None
            for p in parameters
        }
        self._versions = self._versions or versions
        if versions != self._versions:
            raise RuntimeError(_CHANGED)
        if missing := [device for device in devices if device not in self._copies]:
            self._copies |= _copied(missing, parameters, has_gradients=True)
        # The current streams wait until the copies are made. record_stream keeps the memory of the
        # copies from being reused while work on these streams still reads it.
        for device in filter(is_cuda, devices):
            stream = torch.get_device_module(device).current_stream(device)
            made_on = self._streams.setdefault(device, stream)
            if stream != made_on:
                stream.wait_stream(made_on)
                for copy in self._copies[device]:
                    copy.record_stream(stream)
        return {device: self._copies[device] for device in devices}


def _copied(
    devices: Sequence[torch.device],
    parameters: Sequence[torch.Tensor],
    has_gradients: bool,
    arrivals: Arrivals | None = None,
) -> Copies:
    """Return copies of the parameters on each device, with the attributes of the originals.

    Args:
        devices: the destinations; a device may repeat.
        parameters: the originals.
        has_gradients: whether the copies are differentiable.
        arrivals: if given, CUDA events that mark the end of the copies are added to this object,
            and the caller has to wait for these events. If None, the current streams wait for all
            copies.
    """
    # Calls outside of inference mode could not use tensors that were made in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        copies = copy_to(devices, parameters, arrivals)
        for own in copies.values():
            copy_attributes(parameters, own)
        if has_gradients:
            with torch.enable_grad():
                make_nodes(copies, parameters)
    return copies


def copy_attributes(originals: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copy the Python attributes of each original tensor to its copy, unless the copy has them.

    The copy of an ``nn.Parameter`` is marked, so that ``isinstance`` takes it for an
    ``nn.Parameter``.
    """
    for original, copy in zip(originals, copies, strict=True):
        if copy is not original:
            if isinstance(original, nn.Parameter):
                copy._is_param = True
            for name, value in vars(original).items():
                vars(copy).setdefault(name, value)
