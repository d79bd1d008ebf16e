"""Copy parameters to other devices, and bring their gradients back.

A parameter has a home, the device that it is on. Each call copies the parameters in buckets. If
gradients are enabled, a bucket has one autograd node for each other device. Its backward runs as
soon as the gradients of the bucket are complete there and copies them to the home of the
parameters, where autograd adds up those of all devices. Nodes do not wait for each other. A
bucket holds parameters that were registered one after the other, since these are used one soon
after the other.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..devices import gradient_stream, is_cuda, on_stream
from ..free_threading import looking_at_nodes
from ..torch_versions import run_at_once, will_execute
from .arrivals import Arrivals
from .coalesced_copy import Copies, bring_to, copy_to, fill_buckets, has_hooks
from .deferred_gradients import DeferredGradients, added, on_copy_stream
from .scatter import move


class ParameterCopies:
    """Copies of parameters on other devices, made for each call or each block of calls."""

    def __init__(self) -> None:
        self._block: _Block | None = None
        self._lock = threading.Lock()

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
        block = self._block
        # Deferred gradients can be added to leaves only: the graph of other tensors is freed.
        if block is None or not all(parameter.is_leaf for parameter in parameters):
            block = _Block(is_shared=False)
        arrivals = Arrivals()
        if away:
            with block.lock:
                result.update(block.on(away, parameters, arrivals))
        return result, arrivals

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager in which all calls use the same copies; reduces gradients at its end."""
        with self._lock:
            outer = self._block
            block = self._block = outer or _Block(is_shared=True)
        try:
            yield
        finally:
            if outer is None:
                self._block = None
                block.deferred.end()


# torch gives its own autograd functions no types, so each call of apply() ignores that.


class Receive(torch.autograd.Function):
    """Stand for the originals of a bucket on CUDA devices, to receive their gradients.

    Autograd adds up the gradients from other devices on the stream of this node. The token is an
    input of the nodes that send the next bucket, so backward runs once all devices have sent that
    one, too. By then the gradients of this bucket have arrived, and the stream that computes adds
    them to those of the home without waiting.
    """

    @staticmethod
    def forward(ctx: Any, *originals: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return aliases of the originals, and a token."""
        ctx.set_materialize_grads(False)
        return *(original.detach() for original in originals), originals[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; the token has none."""
        return gradients[:-1]


class Broadcast(torch.autograd.Function):
    """Return the copies of a bucket, whose gradients are brought to the home of the originals."""

    @staticmethod
    def forward(
        ctx: Any,
        copies: Sequence[torch.Tensor],
        token: torch.Tensor | None,
        *originals: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the copies, one of each original and on another device."""
        ctx.gathered = None
        ctx.lock = threading.Lock()
        ctx.set_materialize_grads(False)  # a parameter that was not used gets no gradient
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients on the originals' device, or add them to deferred ones."""
        if ctx.gathered is None or torch.is_grad_enabled() or not _accumulates_all(ctx):
            return None, None, *bring_to(ctx.originals[0].device, gradients)
        with ctx.lock:  # calls that share the node may be in other threads
            ctx.gathered = [
                old if new is None else new if old is None else added(old, new)
                for old, new in zip(ctx.gathered, gradients, strict=True)
            ]
        return (None,) * (2 + len(gradients))


def _accumulates_all(node: Any) -> bool:
    """Return whether this backward pass accumulates the gradients of all parameters of a node.

    ``torch.autograd.grad`` does not, nor does ``backward`` with ``inputs``.
    """
    try:
        with looking_at_nodes:
            edges = [edge for edge in node.next_functions if edge[0]]
            if is_cuda(node.originals[0].device):
                edges = edges[-1][0].next_functions  # of Receive
            return all(will_execute(accumulator) for accumulator, _ in edges)
    except RuntimeError:  # "we are currently running autograd.grad()"
        return False


class _Block:
    """The copies that one call uses, or all calls inside ``ParameterCopies.shared``.

    Args:
        is_shared: whether several calls use them. Then current streams wait for all copies, and
            gradients are deferred until the end of the block.
    """

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._copies: dict[torch.device, Sequence[torch.Tensor]] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        """The streams on which the copies were made."""
        self._outputs: dict[torch.device, list[torch.Tensor]] = {}
        """The same copies, as outputs of autograd nodes where they require gradients."""
        self._versions: dict[torch.Tensor, int | None] = {}
        """The parameters of the first call, and the versions of the trained ones."""
        self.lock = threading.Lock()
        """Held by the call that makes copies: all calls of a block share them."""
        self.deferred = DeferredGradients()

    def on(
        self,
        devices: Sequence[torch.device],
        parameters: Sequence[torch.Tensor],
        arrivals: Arrivals,
    ) -> Copies:
        """Return the copies on each device; differentiable if gradients are enabled.

        Args:
            devices: the destinations, none twice.
            parameters: the originals.
            arrivals: records when copies that are not shared are complete.
        """
        has_gradients = torch.is_grad_enabled()
        # Tensors of inference mode could not be used outside it.
        with torch.inference_mode(False), torch.no_grad():
            missing = [device for device in devices if device not in self._copies]
            self._copies.update(copy_to(missing, parameters, None if self._is_shared else arrivals))
            for device in missing:
                copy_attributes(parameters, self._copies[device])
                if not has_gradients:
                    for original, copy in zip(parameters, self._copies[device], strict=True):
                        copy.requires_grad_(original.requires_grad)
        if self._is_shared:
            self._record_streams(devices)
            self._check_unchanged(parameters)
        if not has_gradients:
            return {device: self._copies[device] for device in devices}
        self.deferred.check_hooks()
        missing = [device for device in devices if device not in self._outputs]
        if missing:
            nodes = self._make_nodes(missing, parameters)
            if self._is_shared:
                self.deferred.begin(parameters, nodes)
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

    def _make_nodes(
        self, devices: Sequence[torch.device], parameters: Sequence[torch.Tensor]
    ) -> list[list[Any]]:
        """Make the autograd nodes of the copies, and return those of each bucket."""
        for device in devices:
            self._outputs[device] = list(self._copies[device])
        if any(map(is_cuda, devices)):
            _expect_gradients_of_other_streams()
        trained = [i for i, p in enumerate(parameters) if p.requires_grad]
        nodes: list[list[Any]] = []
        token = next_token = None
        # Backward starts with the last bucket.
        for bucket in reversed(fill_buckets([parameters[i] for i in trained])):
            positions = [trained[i] for i in bucket]
            originals = [parameters[i] for i in positions]
            home = originals[0].device
            received: Sequence[torch.Tensor] = originals
            # Receive runs even if its own bucket has no gradients; hooks would be called with None.
            if is_cuda(home) and not has_hooks(originals[0]):
                *received, next_token = _receive(originals)
            nodes.append([])
            for device in devices:
                if device == home:
                    continue
                copies = self._outputs[device]
                parts = [copies[i] for i in positions]
                if parts[0].requires_grad:  # a call without gradients has used them
                    parts = [part.requires_grad_(False) for part in parts]
                with on_copy_stream(device):
                    parts = Broadcast.apply(parts, token, *received)  # type: ignore[no-untyped-call]
                node: Any = parts[0].grad_fn
                node.originals = originals
                run_at_once(node)
                nodes[-1].append(node)
                for i, part in zip(positions, parts, strict=True):
                    copies[i] = part
            token = next_token
        return nodes

    def _check_unchanged(self, parameters: Sequence[torch.Tensor]) -> None:
        versions = {
            # Forward itself may write to frozen ones, see WrittenState.
            p: p._version if p.requires_grad and not p.is_inference() else None
            for p in parameters
        }
        self._versions = self._versions or versions
        if versions != self._versions:
            raise RuntimeError(
                "a parameter was replaced, frozen, unfrozen or changed inside shared_weights() or "
                "accumulate(), whose calls all use the same weights; do this, and step the "
                "optimizer, after the block"
            )


def _receive(originals: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the outputs of ``Receive``, whose node runs on the gradient stream of the home."""
    home = originals[0].device
    # The first use of a parameter makes the node that accumulates its gradients, for the current
    # stream. So the parameters are used on the stream that computes, too. Torch gives
    # Function.apply no types.
    keeps_alive = Receive.apply(*originals)  # type: ignore[no-untyped-call]
    with on_stream(gradient_stream(home, home)):
        received: Sequence[torch.Tensor] = Receive.apply(*originals)  # type: ignore[no-untyped-call]
    del keeps_alive
    run_at_once(received[-1].grad_fn)
    return received


@functools.cache
def _expect_gradients_of_other_streams() -> None:
    """Silence torch's warning that gradients come from streams of other devices, as intended."""
    set_warns = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if set_warns is not None:  # versions that do not have it do not warn
        set_warns(False)


def copy_attributes(originals: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copy the entries of ``__dict__`` that copies lack; tensors among them go along.

    What is a parameter is told by ``isinstance`` to be one.
    """
    for original, copy in zip(originals, copies, strict=True):
        if copy is not original:
            if isinstance(original, nn.Parameter):
                copy._is_param = True
            for name, value in vars(original).items():
                if name not in vars(copy):
                    is_sent = isinstance(value, torch.Tensor) and not value.requires_grad
                    vars(copy)[name] = move(value, copy.device) if is_sent else value
