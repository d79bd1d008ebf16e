"""Copy weights to other devices and copy their gradients back, several tensors at a time.

Each launch of a copy takes time. So between CUDA devices, several tensors of one dtype are
flattened into a single tensor, which is copied in one piece. Such a group of tensors is a bucket.
Weights (parameters and buffers) are copied to the other devices in buckets. If there are several
other devices, NCCL broadcasts the buckets. Gradients are copied back in buckets, too. Parameters
that were registered one after the other usually share a bucket, because a forward pass usually uses
them soon after one another.

Weights are copied on CUDA streams that are used for nothing else. For each bucket and device,
``Arrivals`` holds a CUDA event that marks the end of the copy. A replica may start to run before
all copies are complete. In each module of the replica whose parameters are still being copied, an
``ArrivingParameters`` replaces the dictionary ``_parameters``. The first time that the forward pass
reads a parameter of such a module, the current stream waits for the copies of all parameters of the
module.

The home of a parameter is the device that the original parameter is on. If gradients are enabled,
each bucket has one ``Broadcast`` node in the autograd graph for each device that holds copies. The
backward of a ``Broadcast`` node runs as soon as the device with the copies has computed all
gradients of the bucket. The node copies the gradients to the home of the parameters, where autograd
adds up the gradients of all devices. The ``Broadcast`` nodes of different buckets and devices do
not wait for each other. In this picture, time runs to the right. The buckets b0 to b3 hold the
parameters of the layers l0 to l3. The device d1 is not the home of these parameters::

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
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import comm

from ..devices import is_cuda, on_stream, side_stream
from ..emulation.machine import is_emulated
from ..torch_versions import AWAITS_PRODUCERS, run_at_once
from .scatter import move

BUCKET_BYTES = 25 * 2**20
"""The maximum size, in bytes, of a bucket that holds several tensors.

A bucket is a group of tensors that are copied in one piece.

Source: ``bucket_cap_mb`` of torch 2.13's ``DistributedDataParallel``.
"""

LEAST_BYTES = 2**20
"""The lowest size limit, in bytes, of a bucket of parameters or buffers.

A bucket is a group of tensors that are copied in one piece. Its size limit is an eighth of the size
of all tensors, but at least ``LEAST_BYTES`` and at most ``BUCKET_BYTES``. A lower limit would give
more buckets, and each bucket needs a launch on every device.

Source: the size of the first bucket of torch 2.13's ``DistributedDataParallel``.
"""


_sending = threading.Lock()
"""A lock to hold while tensors are sent to CUDA devices.

The lock is needed because several threads may call models on the same devices. To broadcast a
tensor, NCCL launches a kernel on one device after the other, and these kernels wait for each other.
Without the lock, another thread could act between two of these launches. For example, it could make
the stream of the second kernel wait for the stream of the first kernel. Then neither kernel could
end: a deadlock.
"""

Copies = dict[torch.device, list[Tensor]]
"""A dictionary that maps each device to a list of copies of tensors.

The lists of all devices hold copies of the same tensors, in the same order.
"""


class Arrivals:
    """The CUDA events that mark the end of each copy of a weight from one device to another.

    The copies are made on the weight streams: each CUDA device has one stream that is used only to
    copy weights. Before the copies are made, ``expect`` records the current stream of each device.
    The memory of a copy belongs to the recorded stream of its device. After the copies have been
    launched, ``wait`` makes the recorded streams wait for them. The copies must not be freed before
    ``wait`` is called. Otherwise the caching allocator could reuse their memory while a weight
    stream still writes to it.

    Attributes:
        events: a dictionary that maps the ``id`` of a tensor, original or copy, to an event. The
            event of a copy marks that its data has arrived: wait for it before the copy is used.
            The event of an original marks that all its copies have been made: wait for it before
            the original is written to.
        are_traced: whether ``torch.compile`` has ever traced a module while its parameters may
            still have been incomplete. Compiled code reads parameters without waiting. So once
            ``are_traced`` is True, each call of a model waits for the copies of all parameters
            before it runs the replicas.
    """

    are_traced: ClassVar[bool] = False

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self.events: dict[int, torch.Event] = {}

    def expect(self, devices: Iterable[torch.device]) -> None:
        """Let the weight stream of each device wait for the device's current stream.

        The weight stream copies weights. It must not start before the current stream has written
        the weights, for example in an optimizer step.
        """
        for device in devices:
            self._streams[device] = torch.get_device_module(device).current_stream(device)
            side_stream(device, "weights").wait_stream(self._streams[device])

    def note(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        """Record an event on the device's weight stream, and store it as the event of ``tensors``.

        The weight stream is the stream on which weights are copied. The event marks the end of the
        work that has been queued on this stream so far.
        """
        event = side_stream(device, "weights").record_event()
        self.events.update(dict.fromkeys(map(id, tensors), event))

    def wait(self) -> None:
        """Make the streams that were recorded by ``expect`` wait for all copies."""
        self.events.clear()
        while self._streams:
            device, stream = self._streams.popitem()
            stream.wait_stream(side_stream(device, "weights"))


class ArrivingParameters(UserDict[str, Any]):
    """A replacement for the ``_parameters`` of a module whose parameters are still being copied.

    A read of a parameter makes the current CUDA stream wait for the copies of all parameters of the
    module, unless this stream has already waited. The operator ``in`` does not wait, since
    ``Module.__getattr__`` also uses it to look up attributes that are not parameters.

    Args:
        plain: the plain dictionary that this object replaces.
        device: the device of the copies.
        events: the CUDA events that mark the end of the copies.
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
        # In a deep copy or a pickle of a replica, a plain dictionary replaces this object. The
        # register_parameter of the new replica writes to the same plain dictionary.
        return itemgetter(0), ([self._arrived()],)

    def __getitem__(self, name: str) -> Any:
        return self._arrived()[name]

    def _arrived(self) -> dict[str, Any]:
        # Dynamo need not wait here: it has called named_parameters(), which has waited.
        if not torch.compiler.is_dynamo_compiling():
            stream = self._current_stream(self._device)
            if stream.stream_id not in self._waited:
                for event in self._events:
                    stream.wait_event(event)
                self._waited.add(stream.stream_id)
                Arrivals.are_traced |= torch.compiler.is_compiling()
        return self.data


def fill_buckets(tensors: dict[int, Tensor], *, of_gradients: bool = True) -> list[list[int]]:
    """Group tensors into buckets, and return the positions of the tensors of each bucket.

    The tensors of a bucket are flattened and copied as one tensor. They have the same dtype and
    device. The size limit of a bucket is an eighth of the size of all tensors, but at most
    ``BUCKET_BYTES``. A tensor above the limit gets a bucket of its own. So does a tensor that is
    not contiguous, or is not an ordinary dense tensor.

    Args:
        tensors: a dictionary of the tensors, whose keys are the positions of the tensors in a list
            of the caller. The result contains these positions.
        of_gradients: whether the buckets are for gradients. If True, a tensor with hooks on its
            gradient gets a bucket of its own. In a shared bucket, its hooks would be called with
            None if only other tensors of the bucket had gradients. If False, the buckets are for
            weights, and their size limit is at least ``LEAST_BYTES``.
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
    tensors: Sequence[Tensor],
    arrivals: Arrivals | None = None,
) -> Copies:
    """Return, for each of ``devices``, a list of copies of ``tensors``, in the same order.

    On its own device, a tensor is not copied: the tensor itself is returned. Between CUDA devices,
    many tensors are copied in few pieces. If there are several destinations, each piece is
    broadcast to them, by NCCL if torch has it.

    Args:
        devices: the destinations; a device may repeat.
        tensors: the tensors to copy. The copies are differentiable if gradients are enabled.
        arrivals: if given, this object gets a CUDA event for each piece, which marks the end of the
            copy of this piece. Before a copy is used, the caller has to wait for its event. If
            None, the current streams wait for all copies.
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
    if together:
        transfers = arrivals or Arrivals()
        _send(together, copies, transfers)
        if arrivals is None:
            transfers.wait()
    return copies


def _send(tensors: dict[int, Tensor], copies: Copies, arrivals: Arrivals) -> None:
    """Copy tensors between CUDA devices in buckets, and store the results in ``copies``.

    A bucket is a group of tensors that are copied in one piece. On each device, all copies of a
    bucket share one storage.

    Args:
        tensors: the tensors to copy, by their positions in the lists of ``copies``.
        copies: a list of tensors for each destination, in which the copies are stored.
        arrivals: the end of each copy is recorded in this object as an event.
    """
    buckets = fill_buckets(tensors, of_gradients=False)
    pieces = []  # uninitialized tensors, whose memory belongs to the current streams
    for bucket in buckets:
        home, dtype = tensors[bucket[0]].device, tensors[bucket[0]].dtype
        size = sum(tensors[i].numel() for i in bucket)
        others = [device for device in copies if device != home]
        pieces.append([torch.empty(size, dtype=dtype, device=device) for device in others])
    devices = dict.fromkeys([*(tensor.device for tensor in tensors.values()), *copies])
    with _sending, ExitStack() as stack:
        # If an error is raised, the pieces are freed. So the current streams first wait for the
        # copies.
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
                # .data makes each part a separate tensor, with a version counter of its own.
                parts = [part.data for part in _unflatten_dense_tensors(flat, originals)]
                arrivals.note(flat.device, parts)
                for i, part in zip(bucket, parts, strict=True):
                    copies[flat.device][i] = part


def bring_to(device: torch.device, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return gradients copied to ``device``. The copies are differentiable.

    Between CUDA devices, gradients are copied on a separate stream, so that computation on other
    streams continues. (Before torch 2.8, they are copied on the current stream of ``device``.)
    Dense gradients are flattened and copied in one piece, unless autograd records the copies to
    compute gradients of higher order. The current stream of the source device waits for the copies,
    so that the memory of the gradients is not reused too early.

    Args:
        device: the destination.
        gradients: the gradients of a group of tensors, all on one device. A gradient may be None,
            and then None is returned in its place.
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
            # A view that becomes a .grad would keep the whole piece in memory.
            views = _unflatten_dense_tensors(flat, present)
            brought = [torch.empty_like(view) for view in views]
            torch._foreach_copy_(brought, views)
        else:  # one by one; with create_graph=True, autograd records these copies
            brought = [move(g, device) for g in present]
    torch.get_device_module(source).current_stream(source).wait_stream(stream)
    parts = iter(brought)
    return [None if g is None else next(parts) for g in gradients]


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor can be flattened into a bucket and rebuilt from it."""
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and not hasattr(tensor, "__tensor_flatten__")  # no wrapper of other tensors


# Torch does not annotate Function.apply, so each call of it below is ignored by mypy.


class Receive(torch.autograd.Function):
    """Return aliases of parameters; in backward, pass on the gradients of the aliases.

    The parameters belong to one bucket: a group of tensors that are copied together. The tensors
    are on one device, their home. The aliases are inputs of the ``Broadcast`` nodes of all other
    devices. So autograd adds up the gradients from these devices before it runs the backward of
    this node. On CUDA, the gradients are added up on the stream that was current when this node was
    made. On emulated devices, which have no streams, this node only makes autograd add gradients in
    the same order as on CUDA, so that peak memory is the same.

    Besides the aliases, this node returns an empty tensor, the token. The token delays the backward
    of this node. For example, let a model have the buckets b0 and b1. The token of b1 is an input
    of the ``Broadcast`` nodes of b0. In backward, each device sends the gradients of b1 first, and
    then those of b0. Because of the token, the backward of b1's ``Receive`` runs only after all
    devices have sent the gradients of b0, too. By then, the gradients of b1 have usually arrived on
    the home. So the stream that computes on the home need not wait for the gradients of b1 before
    it adds them to the home's own gradients.
    """

    @staticmethod
    def forward(ctx: Any, *originals: Tensor) -> tuple[Tensor, ...]:
        """Return aliases of the originals and, as the last output, the token: an empty tensor."""
        ctx.set_materialize_grads(False)
        return *(original.detach() for original in originals), originals[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the originals. The token has no gradient."""
        return gradients[:-1]


class Broadcast(torch.autograd.Function):
    """Make copies of parameters differentiable: backward copies gradients to the originals' device.

    The copies have been made before, and forward only returns them. The originals belong to one
    bucket: a group of tensors that are copied together. They are all on one device, their home.
    """

    @staticmethod
    def forward(
        ctx: Any, copies: Sequence[Tensor], token: Tensor | None, *originals: Tensor
    ) -> tuple[Tensor, ...]:
        """Return ``copies``: one copy of each original, all on one device other than the home.

        The ``token``, an output of ``Receive``, is not read. It only determines when the backward
        of that ``Receive`` runs.
        """
        ctx.home = originals[0].device
        ctx.set_materialize_grads(False)  # a parameter that was not used gets no gradient
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the originals, on the device of the originals."""
        return None, None, *bring_to(ctx.home, gradients)


def make_nodes(copies: Copies, parameters: Sequence[Tensor]) -> None:
    """Make copies of parameters differentiable, with one autograd node for each bucket and device.

    A bucket is a group of parameters whose gradients are copied in one piece.

    Args:
        copies: for each device, a list of the copies of all parameters. In these lists, the copies
            of parameters that require grad are replaced by outputs of ``Broadcast`` nodes.
        parameters: the originals, in the order of the copies.
    """
    # Since 2.9, torch warns if the stream that produces a gradient is not the stream that
    # accumulates it. Here, the two streams differ on purpose.
    set_warns = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if set_warns is not None and any(map(is_cuda, copies)):
        set_warns(False)
    trained = {i: p for i, p in enumerate(parameters) if p.requires_grad}
    token = next_token = None
    # The last bucket comes first, because the Broadcast nodes of a bucket need the token of the
    # next bucket.
    for positions in reversed(fill_buckets(trained)):
        originals = [parameters[i] for i in positions]
        home = originals[0].device
        received: Sequence[Tensor] = originals
        # Because of the token, the backward of Receive runs even if its own bucket has no
        # gradients. The hooks of the bucket's parameters would then be called with None, so a
        # parameter with hooks gets no Receive.
        if (is_cuda(home) or is_emulated(home)) and not has_hooks(originals[0]):
            *received, next_token = Receive.apply(*originals)  # type: ignore[no-untyped-call]
            if is_cuda(home):
                # Autograd creates the AccumulateGrad node of a parameter when the parameter is
                # first used. AccumulateGrad runs on the stream that is current at this first use,
                # and must run on the stream that computes. The Receive above was applied on the
                # stream that computes, only to create AccumulateGrad there. A second Receive, on
                # the stream that adds up gradients, now replaces the first one. While the second
                # one is applied, the outputs of the first one keep AccumulateGrad alive.
                with on_stream(side_stream(home, home)):
                    *received, next_token = Receive.apply(*originals)  # type: ignore[no-untyped-call]
            run_at_once(next_token.grad_fn)
        for device, own in copies.items():
            if device == home:
                continue
            parts = [own[i] for i in positions]
            # Autograd runs a node's backward on the stream that was current when the node was made,
            # and makes this stream wait for the incoming gradients. So the stream that computes
            # need not wait while gradients are copied.
            copying = on_stream(side_stream(device, "copies")) if is_cuda(device) else nullcontext()
            with copying:
                parts = Broadcast.apply(parts, token, *received)  # type: ignore[no-untyped-call]
            run_at_once(parts[0].grad_fn)
            for i, part in zip(positions, parts, strict=True):
                own[i] = part
        token = next_token
