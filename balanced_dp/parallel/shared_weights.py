"""Copies of parameters on other devices, for one call or for several calls that share them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ..devices import is_cuda
from .copies import Arrivals, Copies, copy_to, make_nodes

_CHANGED = (
    "a parameter was replaced, frozen, unfrozen or changed inside shared_weights(), whose calls "
    "all use the same weights; change parameters, and step the optimizer, after the block"
)


class ParameterCopies:
    """Copies of parameters on other devices, made for each call, or once for a block of calls."""

    def __init__(self) -> None:
        self._block: _Block | None = None
        self._lock = threading.Lock()
        """Held while a block begins, and while copies are made for all calls of a block."""

    def on(
        self, devices: Iterable[torch.device], parameters: list[torch.Tensor]
    ) -> tuple[Copies, Arrivals]:
        """Return the parameters on each device, and the events of their arrival.

        On its own device, a parameter is returned itself, without a copy.

        Args:
            devices: the destinations; a device may repeat.
            parameters: the parameters, none twice.

        Raises:
            RuntimeError: inside ``shared``, a trained parameter was changed, or a parameter was
                replaced, frozen or unfrozen.
        """
        result = dict.fromkeys(devices, parameters)
        homes = {parameter.device for parameter in parameters}
        away = [device for device in result if homes - {device}]
        arrivals = Arrivals()
        if away and (block := self._block):
            with self._lock:
                result.update(block.on(away, parameters))
        elif away:
            result.update(_copied(away, parameters, torch.is_grad_enabled(), arrivals))
        return result, arrivals

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager in which all calls use the same copies.

        Blocks may be nested. If several threads are in blocks at once, all of them use the copies
        of the block that began first.
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
    """The copies that all calls inside ``ParameterCopies.shared`` use."""

    def __init__(self) -> None:
        self._copies: Copies = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        """The streams on which the copies were made."""
        self._versions: dict[torch.Tensor, int | None] = {}
        """The parameters of the first call, and the versions of the trained ones."""

    def on(self, devices: Sequence[torch.device], parameters: Sequence[torch.Tensor]) -> Copies:
        """Return the copies on each device, which are differentiable for calls with gradients.

        Args:
            devices: the destinations, none twice.
            parameters: the originals.
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
        missing = [device for device in devices if device not in self._copies]
        self._copies |= _copied(missing, parameters, has_gradients=True)
        # The current streams wait until the copies are made. The memory of the copies stays until
        # these streams have used it.
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
    """Return copies on each device, as ``copy_to`` does, with the attributes of the originals."""
    # Tensors made in inference mode could not be used by calls outside of it.
    with torch.inference_mode(False), torch.no_grad():
        copies = copy_to(devices, parameters, arrivals)
        for own in copies.values():
            copy_attributes(parameters, own)
        if has_gradients:
            with torch.enable_grad():
                make_nodes(copies, parameters)
    return copies


def copy_attributes(originals: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Set attributes of the originals on the copies that lack them.

    Copies of parameters are marked as parameters for ``isinstance``.
    """
    for original, copy in zip(originals, copies, strict=True):
        if copy is not original:
            if isinstance(original, nn.Parameter):
                copy._is_param = True
            for name, value in vars(original).items():
                vars(copy).setdefault(name, value)
