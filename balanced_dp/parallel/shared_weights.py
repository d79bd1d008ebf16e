"""Parameters on other devices, for one call or for several that share them.

Inside the block of ``ParameterCopies.shared``, each device adds up its own gradients: the home of a
parameter in its ``.grad``, as always, and other devices in the nodes of their buckets. When the
block ends, these are added to ``.grad``. Parameters with hooks are exempt, since a hook expects the
whole gradient.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..devices import is_cuda, side_stream
from .copies import Arrivals, Copies, bring_to, copy_to, has_hooks, make_nodes, on_copy_stream
from .scatter import move

_CHANGED = (
    "a parameter was replaced, frozen, unfrozen or changed inside shared_weights(), whose calls "
    "all use the same weights; do this, and step the optimizer, after the block"
)


class ParameterCopies:
    """Copies of parameters on other devices, made for each call or each block of calls."""

    def __init__(self) -> None:
        self._block: _Block | None = None
        self._lock = threading.Lock()
        """Held to enter and leave a block, and to make copies for all of its calls."""

    def on(
        self, devices: Iterable[torch.device], parameters: Sequence[torch.Tensor]
    ) -> tuple[Copies, Arrivals]:
        """Return the parameters on each device, and the events of their arrival.

        At home these are the parameters themselves.

        Args:
            devices: the destinations; a device may repeat.
            parameters: the parameters, none twice.

        Raises:
            RuntimeError: inside ``shared``, a parameter that is trained has changed.
        """
        result: dict[torch.device, Sequence[torch.Tensor]] = dict.fromkeys(devices, parameters)
        homes = {parameter.device for parameter in parameters}
        away = [device for device in result if homes - {device}]
        arrivals = Arrivals()
        with self._lock:  # so that the block does not end meanwhile
            block = self._block
            if away and block:
                result.update(block.on(away, parameters))
        if away and not block:
            copies = _copied(away, parameters, arrivals)
            if torch.is_grad_enabled():
                make_nodes(copies, parameters)
            result.update(copies)
        return result, arrivals

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager in which all calls use the same copies; reduces gradients at its end.

        Raises:
            RuntimeError: at its end, if a parameter was changed.
        """
        with self._lock:
            block = self._block = self._block or _Block()
            block.num_users += 1
        try:
            yield
        finally:
            with self._lock:
                block.num_users -= 1
                is_last = not block.num_users
                if is_last:
                    self._block = None
            if is_last:
                block.end()


class _Block:
    """The copies that all calls inside ``ParameterCopies.shared`` use."""

    def __init__(self) -> None:
        self.num_users = 0
        """How many ``with`` statements, also of several threads, have not ended."""
        self._copies: dict[torch.device, list[torch.Tensor]] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        """The streams on which the copies were made."""
        self._outputs: dict[torch.device, list[torch.Tensor]] = {}
        """The same copies, as outputs of autograd nodes where they require gradients."""
        self._deferring: list[Any] = []
        """The nodes that add up gradients."""
        self._versions: dict[torch.Tensor, int | None] | None = None
        """The parameters of the first call, and the versions of the trained ones."""

    def on(self, devices: Sequence[torch.device], parameters: Sequence[torch.Tensor]) -> Copies:
        """Return the copies on each device; differentiable if gradients are enabled.

        Args:
            devices: the destinations, none twice.
            parameters: the originals.
        """
        missing = [device for device in devices if device not in self._copies]
        self._copies |= _copied(missing, parameters)
        self._record_streams(devices)
        self._check_unchanged(parameters)
        if not torch.is_grad_enabled():
            return {device: self._copies[device] for device in devices}
        made = {d: list(self._copies[d]) for d in devices if d not in self._outputs}
        for node in make_nodes(made, parameters):
            if not any(map(has_hooks, node.originals)):
                node.gathered = [None] * len(node.originals)
                self._deferring.append(node)
        self._outputs |= made
        return {device: self._outputs[device] for device in devices}

    def _record_streams(self, devices: Sequence[torch.device]) -> None:
        """Let current streams wait for the copies, whose memory stays until they have used it."""
        for device in filter(is_cuda, devices):
            stream = torch.get_device_module(device).current_stream(device)
            made_on = self._streams.setdefault(device, stream)
            if stream != made_on:
                stream.wait_stream(made_on)
                for copy in self._copies[device]:
                    copy.record_stream(stream)

    def _check_unchanged(self, parameters: Iterable[torch.Tensor]) -> None:
        versions = {
            # Forward itself may write to frozen ones, see Replicas.bring_home.
            p: p._version if p.requires_grad and not p.is_inference() else None
            for p in parameters
        }
        if self._versions is None:
            self._versions = versions
        if versions != self._versions:
            self._versions = {}  # so that the end does not say it again
            raise RuntimeError(_CHANGED)

    def end(self) -> None:
        """Add the deferred gradients to those of the parameters, through autograd.

        Raises:
            RuntimeError: afterwards, if a parameter was changed.
        """
        for node in self._deferring:
            pairs = zip(node.originals, _bring(node), strict=True)
            if present := [(original, grad) for original, grad in pairs if grad is not None]:
                # Those frozen after their backward pass, too.
                frozen = [p.requires_grad_() for p, _ in present if not p.requires_grad]
                torch.autograd.backward([p for p, _ in present], [g for _, g in present])
                for parameter in frozen:
                    parameter.requires_grad_(False)
            node.gathered = None
        versions = (self._versions or {}).items()
        if any(version not in (None, parameter._version) for parameter, version in versions):
            raise RuntimeError(_CHANGED)


def _bring(node: Any) -> Sequence[torch.Tensor | None]:
    """Return the gradients of a node, ready for the current stream of the originals' device."""
    home = node.originals[0].device
    source = next((g.device for g in node.gathered if g is not None), home)
    with on_copy_stream(source):
        brought = bring_to(home, node.gathered)
    if is_cuda(source) and is_cuda(home):
        current = torch.get_device_module(home).current_stream(home)
        current.wait_stream(side_stream(home, source))
        for gradient in brought:
            if gradient is not None:
                gradient.record_stream(current)
    return brought


def _copied(
    devices: Sequence[torch.device],
    parameters: Sequence[torch.Tensor],
    arrivals: Arrivals | None = None,
) -> dict[torch.device, list[torch.Tensor]]:
    """Return copies without a graph on each device, as ``copy_to`` does, with their attributes."""
    # Tensors of inference mode could not be used outside it.
    with torch.inference_mode(False), torch.no_grad():
        copies = copy_to(devices, parameters, arrivals)
        for own in copies.values():
            copy_attributes(parameters, own)
    return copies


def copy_attributes(originals: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copy the entries of ``__dict__`` that copies lack, and move tensors among them.

    Copies of parameters are marked as parameters for ``isinstance``.
    """
    for original, copy in zip(originals, copies, strict=True):
        if copy is not original:
            if isinstance(original, nn.Parameter):
                copy._is_param = True
            for name, value in vars(original).items():
                if name not in vars(copy):
                    is_sent = isinstance(value, torch.Tensor) and not value.requires_grad
                    vars(copy)[name] = move(value, copy.device) if is_sent else value
