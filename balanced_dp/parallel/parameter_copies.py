"""A module's parameters on other devices, and the way back for their gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from ..devices import copy_stream, is_cuda, on_stream
from .arrivals import Arrivals
from .coalesced_copy import Copies, bring_to, copy_to, fill_buckets, has_hooks

_AT_ONCE = 2**64 - 2
"""The sequence number of a node that runs as soon as it can; only ``AccumulateGrad``'s is higher.

Its own would be lower than those of the forward pass, and autograd takes the highest first.
"""


class ParameterCopies:
    """Copies of a module's parameters for the devices that need them, made anew for each call.

    With gradients there is an autograd node for each bucket and device. Its backward brings the
    bucket's gradients back as soon as they are all there, and autograd adds up those of all
    devices. Nodes do not wait for each other, so what matters is that a bucket's parameters are
    used one soon after the other, as are those that were registered so.
    """

    def __init__(self) -> None:
        self._block: _Block | None = None

    def on(
        self, devices: Iterable[torch.device], parameters: Sequence[torch.Tensor]
    ) -> tuple[Copies, Arrivals]:
        """Returns the parameters on each device, and when they are there.

        On their own device these are the parameters themselves.

        Args:
            devices: where they are needed; a device may repeat.
            parameters: all on one device, none twice.

        Raises:
            RuntimeError: inside ``shared``, a parameter that is trained has changed.
        """
        result: dict[torch.device, Sequence[torch.Tensor]] = dict.fromkeys(devices, parameters)
        away = [device for device in result if parameters and device != parameters[0].device]
        # Gathered gradients are given to leaves: what others were computed from is gone by then.
        is_shared = self._block is not None and all(p.is_leaf for p in parameters)
        block = self._block if self._block is not None and is_shared else _Block()
        arrivals = Arrivals()
        if away:
            result.update(block.on(away, parameters, None if is_shared else arrivals))
        return result, arrivals

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Context manager in which all passes use the same copies; reduces gradients at its end."""
        if self._block is not None:
            yield
            return
        self._block = block = _Block()
        try:
            yield
        finally:
            self._block = None
            block.end()


class Broadcast(torch.autograd.Function):
    """Hands on a bucket's copies, whose gradients come back to where the originals are."""

    @staticmethod
    def forward(
        ctx: Any, copies: Sequence[torch.Tensor], *originals: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the copies, one of each original and on another device."""
        ctx.originals = originals
        ctx.gathered = None
        ctx.set_materialize_grads(False)  # what was not used gets no gradient
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients on the originals' device, or gathers them until they are wanted."""
        if ctx.gathered is None or torch.is_grad_enabled() or not _accumulates_all(ctx):
            return None, *bring_to(ctx.originals[0].device, gradients)
        ctx.gathered = [
            old if new is None else new if old is None else _sum(old, new)
            for old, new in zip(ctx.gathered, gradients, strict=True)
        ]
        return (None,) * (1 + len(gradients))


def _accumulates_all(node: Any) -> bool:
    """Returns whether this pass adds to the gradients of all of a node's parameters.

    ``torch.autograd.grad`` does not, nor does ``backward`` where it is given ``inputs``.
    """
    try:
        return all(torch._C._will_engine_execute_node(n) for n, _ in node.next_functions if n)
    except RuntimeError:  # "we are currently running autograd.grad()"
        return False


class _Block:
    """Calls that use the same copies, and nodes that gather their gradients."""

    def __init__(self) -> None:
        self._copies: dict[torch.device, Sequence[torch.Tensor]] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        """On which the copies were made."""
        self._trained: dict[torch.device, list[torch.Tensor]] = {}
        """The same copies, as outputs of nodes."""
        self._nodes: list[list[Any]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._put_off: list[tuple[torch.Tensor, _PutOff]] = []

    def on(
        self,
        devices: Sequence[torch.device],
        parameters: Sequence[torch.Tensor],
        arrivals: Arrivals | None,
    ) -> Copies:
        """Returns the copies on each device, which lead gradients back if these are enabled.

        Args:
            devices: where they are needed, none twice.
            parameters: what they are copies of, elsewhere.
            arrivals: tells when the copies are there. If None, other calls use them, too: current
                streams wait for all, and gradients come back when the block ends.
        """
        puts_off = arrivals is None
        # Tensors of inference mode could not be used outside it.
        with torch.inference_mode(False), torch.no_grad():
            missing = [device for device in devices if device not in self._copies]
            self._copies.update(copy_to(missing, parameters, arrivals))
            for device in missing:
                for original, copy in zip(parameters, self._copies[device], strict=True):
                    _give_attributes(original, copy)
        self._note_streams(devices)
        if not torch.is_grad_enabled():
            return {device: self._copies[device] for device in devices}
        missing = [device for device in devices if device not in self._trained]
        if puts_off:
            self._check(parameters)
        if missing:
            nodes = self._lead_back(missing, parameters)
            if puts_off:
                self._put_off_gradients(parameters, nodes)
        return {device: self._trained[device] for device in devices}

    def _note_streams(self, devices: Sequence[torch.device]) -> None:
        """Keeps the copies until current streams other than those they were made on are done."""
        for device in filter(is_cuda, devices):
            stream = torch.get_device_module(device).current_stream(device)
            made_on = self._streams.setdefault(device, stream)
            if stream != made_on:
                stream.wait_stream(made_on)
                for copy in self._copies[device]:
                    copy.record_stream(stream)

    def _lead_back(
        self, devices: Sequence[torch.device], parameters: Sequence[torch.Tensor]
    ) -> list[list[Any]]:
        """Makes nodes of the copies, and returns those of each bucket."""
        for device in devices:
            self._trained[device] = list(self._copies[device])
        if any(map(is_cuda, devices)):
            _expect_gradients_of_other_streams()
        trained = [i for i, p in enumerate(parameters) if p.requires_grad]
        nodes: list[list[Any]] = []
        for bucket in fill_buckets([parameters[i] for i in trained]):
            positions = [trained[i] for i in bucket]
            originals = [parameters[i] for i in positions]
            nodes.append([])
            for device in devices:
                copies = self._trained[device]
                parts = [copies[i].requires_grad_(False) for i in positions]
                with _beside_computing(device):
                    # torch gives its own autograd functions no types.
                    parts = Broadcast.apply(parts, *originals)  # type: ignore[no-untyped-call]
                node: Any = parts[0].grad_fn
                node._set_sequence_nr(_AT_ONCE)
                nodes[-1].append(node)
                for i, part in zip(positions, parts, strict=True):
                    copies[i] = part
        return nodes

    def _check(self, parameters: Sequence[torch.Tensor]) -> None:
        # Frozen ones may be written to by forward itself, see WrittenState.
        versions = [(p, p._version) for p in parameters if p.requires_grad]
        if not self._trained:
            self._versions = versions
        before = [(id(parameter), version) for parameter, version in self._versions]
        if before != [(id(parameter), version) for parameter, version in versions]:
            raise RuntimeError(
                "a parameter was changed inside shared_weights() or accumulate(), whose calls all "
                "use the same weights; step the optimizer after the block"
            )

    def _put_off_gradients(
        self, parameters: Sequence[torch.Tensor], nodes: Sequence[Sequence[Any]]
    ) -> None:
        self._nodes += map(list, nodes)
        for node in chain.from_iterable(nodes):
            if not any(map(has_hooks, node.originals)):  # they are to see whole gradients
                node.gathered = [None] * len(node.originals)
        known = {id(parameter) for parameter, _ in self._put_off}
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in known and not has_hooks(parameter):
                gradient = _PutOff(parameter)
                self._put_off.append((parameter, gradient))
                parameter.grad = gradient

    def end(self) -> None:
        """Adds what was put off to the gradients of the parameters, through autograd.

        Raises:
            RuntimeError: before anything is added, if gradients were replaced in the block.
        """
        is_replaced = any(parameter.grad is not g for parameter, g in self._put_off)
        for parameter, gradient in self._put_off:
            if parameter.grad is gradient:
                parameter.grad = gradient.before
        if is_replaced:
            raise RuntimeError(
                "gradients were replaced inside shared_weights() or accumulate(), where they are "
                f"put off until the block ends; {_REMEDY}"
            )
        _add([(parameter, gradient.added) for parameter, gradient in self._put_off])
        for nodes in self._nodes:
            brought: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            for node in nodes:
                if node.gathered is not None:
                    brought += zip(node.originals, _gathered_by(node), strict=True)
                    node.gathered = None
            _add(brought)


def _beside_computing(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the copy stream current, if it is a CUDA device.

    Autograd runs a node's backward on the stream that was current when the node was made, and lets
    that wait for the gradients.
    """
    return on_stream(copy_stream(device)) if is_cuda(device) else contextlib.nullcontext()


def _gathered_by(node: Any) -> Sequence[torch.Tensor | None]:
    """Returns what a node has gathered, for the current stream of where the originals are."""
    home = node.originals[0].device
    source = next((g.device for g in node.gathered if g is not None), home)
    with _beside_computing(source):
        brought = bring_to(home, node.gathered)
    if is_cuda(source) and is_cuda(home):
        current = torch.get_device_module(home).current_stream(home)
        current.wait_stream(copy_stream(home))
        for gradient in brought:
            if gradient is not None:
                gradient.record_stream(current)
    return brought


@functools.cache
def _expect_gradients_of_other_streams() -> None:
    """Keeps torch from warning of what is meant: gradients come from streams of other devices."""
    set_warns = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if set_warns is not None:  # versions that do not have it do not warn
        set_warns(False)


def _give_attributes(original: torch.Tensor, copy: torch.Tensor) -> None:
    """Gives a copy what the original has beside its values."""
    if original.requires_grad:
        copy.requires_grad_()
    if vars(original):
        vars(copy).update({k: v for k, v in vars(original).items() if k not in vars(copy)})


def _add(pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Adds to the gradient of each parameter, as autograd does."""
    learning = []
    for parameter, gradient in pairs:
        if gradient is None:
            continue
        if parameter.requires_grad:
            learning.append((parameter, gradient))
        else:  # it was frozen since
            old = parameter.grad
            parameter.grad = gradient if old is None else old + gradient
    if learning:
        torch.autograd.backward([p for p, _ in learning], [g for _, g in learning])


_REMEDY = "clip, read or zero gradients and step the optimizer outside of it"


class _PutOff(torch.Tensor):
    """Placeholder for ``.grad`` while gradients are deferred: autograd may accumulate into it.

    Any other operation on it raises a RuntimeError.

    Attributes:
        before: the gradient that there was.
        added: what the first device has added since.
    """

    before: torch.Tensor | None
    added: torch.Tensor | None

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> _PutOff:
        self: _PutOff = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        self.before, self.added = parameter.grad, None
        return self

    # Torch's stubs declare both for plain tensors: a method here, any callable and any types there.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], cls) and not kwargs:
            self, gradient = args
            self.added = gradient.clone() if self.added is None else _sum(self.added, gradient)
            return self
        raise RuntimeError(
            "a gradient was used inside shared_weights() or accumulate(), where gradients are put "
            f"off until the block ends; {_REMEDY}"
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument of its own
        return "<a gradient that is put off until shared_weights() ends>"


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Torch adds a sparse gradient to a dense one, and not the other way round.
    return other + one if one.is_sparse and not other.is_sparse else one + other
