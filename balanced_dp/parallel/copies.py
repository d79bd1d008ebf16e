"""Copy weights to other devices and bring gradients back, many tensors in few pieces.

Each launch of a copy takes time, so tensors of one dtype are flattened into buckets, which are
copied as one tensor. Parameters and buffers go to the other devices in buckets, which NCCL
broadcasts if there are several other devices; gradients come back in buckets. A bucket holds
parameters that were registered one after the other, since they are used soon after one another.

Weights are copied on CUDA streams that nothing else uses. ``Arrivals`` has an event for each
bucket. While a forward pass runs, the ``_parameters`` of a replica's modules are
``ArrivingParameters``: before a stream reads a parameter, it waits for the events of the module.

The home of a parameter is the device that it is on. If gradients are enabled, a bucket has one
autograd node for each other device. The node's backward runs as soon as that device has computed
all gradients of the bucket. It copies them to the home of the parameters, where autograd adds up
the gradients of all devices. Nodes do not wait for each other::

    weights       home: b0 b1 b2 b3        one broadcast for each bucket, in the order of use
    forward       d1:      l0 l1 l2 l3     a layer waits for its own bucket
    backward      d1:                  l3 l2 l1 l0
    gradients     home:                   b3 b2 b1 b0
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import comm

from ..devices import is_cuda, on_stream, side_stream
from ..torch_versions import AWAITS_PRODUCERS, run_at_once
from .scatter import move

BUCKET_BYTES = 25 * 2**20
"""The most bytes in a bucket of several tensors.

Source: ``bucket_cap_mb`` of torch 2.13's ``DistributedDataParallel``.
"""

LEAST_BYTES = 2**20
"""The least capacity of a bucket of parameters, since each bucket is launched on all devices.

Source: the first bucket of torch 2.13's ``DistributedDataParallel``.
"""


_sending = threading.Lock()
"""A lock to hold while sending tensors: several threads may call models on the same devices.

NCCL launches kernels on one device after the other, and these kernels wait for each other. If,
between two launches, another thread made one of their streams wait for another of these streams,
there would be a deadlock.
"""

Copies = dict[torch.device, list[torch.Tensor]]
"""For each device, copies of the same tensors in the same order."""


class Arrivals:
    """The copies that weight streams of CUDA devices make, and the events that mark their ends.

    The memory of the copies belongs to the streams that were current when ``expect`` was called. It
    must not be freed before ``wait`` is called.

    Attributes:
        events: by the ``id`` of a tensor, the event to wait for: before a copy is used, and before
            an original is written to.
        are_traced: whether ``torch.compile`` has traced parameters that were on their way. Compiled
            code reads parameters without waiting. So from then on, each call waits for all of its
            parameters before it runs the replicas.
    """

    are_traced: ClassVar[bool] = False

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self.events: dict[int, torch.Event] = {}

    def expect(self, devices: Iterable[torch.device]) -> None:
        """Let the weight streams of ``devices`` wait for the work on their current streams."""
        for device in devices:
            self._streams[device] = torch.get_device_module(device).current_stream(device)
            side_stream(device, "weights").wait_stream(self._streams[device])

    def note(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        """Record an event for ``tensors`` after the current work of the device's weight stream."""
        event = side_stream(device, "weights").record_event()
        self.events.update(dict.fromkeys(map(id, tensors), event))

    def wait(self) -> None:
        """Let the streams that were current at ``expect`` wait for all copies."""
        self.events.clear()
        while self._streams:
            device, stream = self._streams.popitem()
            stream.wait_stream(side_stream(device, "weights"))


class ArrivingParameters(UserDict[str, Any]):
    """The arriving parameters of a module. A stream waits when it first reads one of them.

    ``in`` does not wait, since ``Module.__getattr__`` uses it for attributes of any kind.

    Args:
        plain: the plain dictionary that this object replaces.
        device: the device of the parameters.
        events: the events to wait for.
    """

    def __init__(
        self, plain: dict[str, Any], device: torch.device, events: Iterable[torch.Event]
    ) -> None:
        self.data = plain
        self._device = device
        self._events = list(dict.fromkeys(events))
        self._current_stream = torch.get_device_module(device).current_stream
        self._waited: set[int] = set()

    def __reduce__(self) -> Any:
        # Copied as the plain dictionary, to which the module's register_parameter writes.
        return itemgetter(0), ([self._arrived()],)

    def __getitem__(self, name: str) -> Any:
        return self._arrived()[name]

    def _arrived(self) -> dict[str, Any]:
        if not torch.compiler.is_dynamo_compiling():  # Dynamo called named_parameters(), so waited
            stream = self._current_stream(self._device)
            if stream.stream_id not in self._waited:
                for event in self._events:
                    stream.wait_event(event)
                self._waited.add(stream.stream_id)
                Arrivals.are_traced |= torch.compiler.is_compiling()
        return self.data


def fill_buckets(tensors: dict[int, torch.Tensor], *, of_gradients: bool = True) -> list[list[int]]:
    """Distribute tensors over buckets, and return the positions of the tensors in each bucket.

    The tensors of a bucket have the same dtype and device. Together they have at most an eighth of
    all bytes, and at most ``BUCKET_BYTES``. A larger tensor has a bucket of its own. A tensor that
    is not contiguous, or is not an ordinary dense tensor, also has a bucket of its own.

    Args:
        tensors: the tensors by their positions.
        of_gradients: whether the buckets are for gradients. If True, a tensor with hooks has a
            bucket of its own: in a shared bucket, its hooks would get None if only other tensors
            had gradients. If False, a bucket may hold ``LEAST_BYTES``, even if this is more than
            an eighth of all bytes.
    """
    sizes = [tensor.nbytes if _is_plain(tensor) else None for tensor in tensors.values()]
    num_bytes = sum(filter(None, sizes))
    bucket_bytes = min(max(num_bytes // 8, 0 if of_gradients else LEAST_BYTES), BUCKET_BYTES)
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for (position, tensor), size in zip(tensors.items(), sizes, strict=True):
        if size is None or (of_gradients and has_hooks(tensor)):
            buckets.append([position])
            continue
        kind = (tensor.dtype, tensor.device)
        bucket, free_bytes = filling.get(kind, ([], -1))
        if free_bytes < size:
            bucket, free_bytes = [], bucket_bytes
            buckets.append(bucket)
        bucket.append(position)
        filling[kind] = bucket, free_bytes - size
    return buckets


def copy_to(
    devices: Sequence[torch.device],
    tensors: Sequence[torch.Tensor],
    arrivals: Arrivals | None = None,
) -> Copies:
    """Return the tensors on each device, in order. Tensors already there are not copied.

    Between CUDA devices, tensors are copied in few pieces. NCCL, if torch has it, copies them to
    several devices at once.

    Args:
        devices: the destinations, each given once.
        tensors: the tensors to copy. The copies are differentiable if gradients are enabled.
        arrivals: records when each copy is complete. If None, the current streams wait for all
            copies.
    """
    are_cuda, is_recorded = all(map(is_cuda, devices)), torch.is_grad_enabled()
    copies = {device: list(tensors) for device in devices}
    together = {}
    for i, t in enumerate(tensors):
        has_graph = is_recorded and t.requires_grad
        if are_cuda and is_cuda(t.device) and _is_plain(t) and not has_graph:
            together[i] = t
        else:
            for device, own in copies.items():
                own[i] = move(t, device)
    if together and devices:
        transfers = arrivals or Arrivals()
        _send(together, copies, transfers)
        if arrivals is None:
            transfers.wait()
    return copies


@torch.no_grad()
def _send(tensors: dict[int, torch.Tensor], copies: Copies, arrivals: Arrivals) -> None:
    """Fill in ``copies`` at the positions of ``tensors``. Copies in one bucket share memory."""
    buckets = fill_buckets(tensors, of_gradients=False)
    pieces = []  # uninitialized; their memory belongs to the current streams
    for bucket in buckets:
        home, dtype = tensors[bucket[0]].device, tensors[bucket[0]].dtype
        size = sum(tensors[i].numel() for i in bucket)
        others = [device for device in copies if device != home]
        pieces.append([torch.empty(size, dtype=dtype, device=device) for device in others])
    devices = dict.fromkeys([*(tensor.device for tensor in tensors.values()), *copies])
    with _sending, ExitStack() as stack:
        # After an error, the pieces are freed, so the copies must have ended by then.
        stack.push(lambda kind, *_: arrivals.wait() if kind else None)
        arrivals.expect(devices)
        for device in devices:
            stack.enter_context(on_stream(side_stream(device, "weights")))
        for bucket, there in zip(buckets, pieces, strict=True):
            originals = [tensors[i] for i in bucket]
            if not there:
                continue
            piece = _flatten_dense_tensors(originals).resolve_conj().resolve_neg()
            if len(there) == 1:
                there[0].copy_(piece, non_blocking=True)
            else:  # as bytes, since NCCL does not know all dtypes
                comm.broadcast(piece.view(torch.uint8), out=[t.view(torch.uint8) for t in there])
            arrivals.note(originals[0].device, originals)
            for flat in there:
                # .data makes each part a separate tensor, with its own version.
                parts = [part.data for part in _unflatten_dense_tensors(flat, originals)]
                arrivals.note(flat.device, parts)
                for i, part in zip(bucket, parts, strict=True):
                    copies[flat.device][i] = part


def bring_to(
    device: torch.device, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """Return the gradients of a bucket on ``device``. Differentiable.

    Between CUDA devices, gradients are copied on a separate stream, so that computation goes on.
    (Before torch 2.8, they are copied on the current stream.) Dense gradients are copied in one
    piece. The current stream of the source device waits for the copy.
    """
    source = next((g.device for g in gradients if g is not None), device)
    if not is_cuda(device) or not is_cuda(source):
        return [None if g is None else move(g, device) for g in gradients]
    present = [g for g in gradients if g is not None]
    stream = side_stream(device, source)
    if not AWAITS_PRODUCERS:
        stream = torch.get_device_module(device).current_stream(device)
    with on_stream(stream):
        are_dense = all(g.layout is torch.strided for g in present)
        if len(present) > 1 and are_dense and not torch.is_grad_enabled():
            flat = move(_flatten_dense_tensors(present), device)
            # A view that becomes a .grad would keep the memory of all gradients.
            views = _unflatten_dense_tensors(flat, present)
            brought = [torch.empty_like(view) for view in views]
            torch._foreach_copy_(brought, views)
        else:  # one by one; with create_graph, too
            brought = [move(g, device) for g in present]
    torch.get_device_module(source).current_stream(source).wait_stream(stream)
    parts = iter(brought)
    return [None if g is None else next(parts) for g in gradients]


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be flattened into a bucket and rebuilt from it."""
    is_wrapper = hasattr(tensor, "__tensor_flatten__")
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and not is_wrapper


# Torch does not annotate Function.apply, so each call of it below is ignored by mypy.


class Receive(torch.autograd.Function):
    """Represent the originals of a bucket on CUDA devices, to receive their gradients.

    Autograd adds up the gradients from other devices on the stream of this node. The token that
    this node returns is an input of the nodes that send the next bucket. So the backward of this
    node runs only after all devices have sent the next bucket, too. By then the gradients of this
    bucket have arrived. The computing stream then adds them to the home's own gradients
    without waiting.
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
        """Return the copies: one of each original, all on one other device."""
        ctx.home = originals[0].device
        ctx.set_materialize_grads(False)  # a parameter that was not used gets no gradient
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients on the originals' device."""
        return None, None, *bring_to(ctx.home, gradients)


def make_nodes(copies: Copies, parameters: Sequence[torch.Tensor]) -> None:
    """Make copies the outputs of autograd nodes."""
    # Since 2.9, torch warns about gradients that come from streams of other devices. Here they are
    # intended.
    set_warns = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if set_warns is not None and any(map(is_cuda, copies)):
        set_warns(False)
    trained = {i: p for i, p in enumerate(parameters) if p.requires_grad}
    token = next_token = None
    # Backward starts with the last bucket.
    for positions in reversed(fill_buckets(trained)):
        originals = [parameters[i] for i in positions]
        home = originals[0].device
        received: Sequence[torch.Tensor] = originals
        # Receive's backward runs even if its own bucket has no gradients. It would call hooks with
        # None, so a tensor with hooks gets no Receive.
        if is_cuda(home) and not has_hooks(originals[0]):
            # The first use of a parameter creates the node that accumulates its gradients, which
            # runs on the stream that is current then. So the first Receive is applied on the stream
            # that computes. It is kept until the second one has been applied, whose node runs on
            # the gradient stream of the home.
            first = Receive.apply(*originals)  # type: ignore[no-untyped-call]
            with on_stream(side_stream(home, home)):
                *received, next_token = Receive.apply(*originals)  # type: ignore[no-untyped-call]
            del first
            run_at_once(next_token.grad_fn)
        for device, own in copies.items():
            if device == home:
                continue
            parts = [own[i] for i in positions]
            # Autograd runs a node's backward on the stream that was current when the node was made,
            # and makes this stream wait for the incoming gradients. So the other streams compute
            # while gradients are copied.
            copying = on_stream(side_stream(device, "copies")) if is_cuda(device) else nullcontext()
            with copying:
                parts = Broadcast.apply(parts, token, *received)  # type: ignore[no-untyped-call]
            run_at_once(parts[0].grad_fn)
            for i, part in zip(positions, parts, strict=True):
                own[i] = part
        token = next_token
