"""A module's parameters on other devices, and the way back for their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .buckets import Copies, bring_to, copy_to, fill_buckets, has_hooks
from .optimizer_steps import has_any, watch_optimizer_steps
from .scatter_gather import move

_AT_ONCE = 2**64 - 2
"""The sequence number of a node that runs as soon as it can; only ``AccumulateGrad``'s is higher.

Its own would be lower than those of the forward pass, and autograd takes the highest first.
"""


class ParameterCopies:
    """Copies of a module's parameters for the devices that need them, from call to call.

    With gradients the parameters are copied each time, with an autograd node for each bucket and
    device. Its backward brings the bucket's gradients back as soon as they are all there, and
    autograd adds up those of all devices. Nodes do not wait for each other, so what matters is that
    a bucket's parameters are used one soon after the other, as are those that were registered so.

    Without gradients the copies are kept, and renewed in place where a parameter has another
    version or storage since, or where its optimizer has made a step: a fused one writes without a
    new version. What is written through ``.data`` is not seen.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.device, _Kept] = {}
        self._shared: _Shared | None = None
        self._watched_ids: frozenset[int] = frozenset()

    def on(self, devices: Iterable[torch.device], parameters: Sequence[torch.Tensor]) -> Copies:
        """Returns the parameters on each device; where they are already, themselves.

        Args:
            devices: where they are needed; a device may repeat.
            parameters: all on one device, none twice.

        Raises:
            RuntimeError: inside ``accumulate``, a parameter that is trained has changed.
        """
        result: dict[torch.device, Sequence[torch.Tensor]] = dict.fromkeys(devices, parameters)
        away = [device for device in result if parameters and device != parameters[0].device]
        if not away:
            return result
        if not torch.is_grad_enabled():
            return {**result, **self._renewed(away, parameters)}
        self.release()
        # Gathered gradients are given to leaves: what others were computed from is gone by then.
        if self._shared is None or not all(p.is_leaf for p in parameters):
            return {**result, **self._differentiable(away, parameters)[0]}
        return {**result, **self._of_all_passes(self._shared, away, parameters)}

    def release(self) -> None:
        """Gives up the copies that are kept."""
        self._kept.clear()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Has all passes use the same copies, and brings their gradients back at the end."""
        if self._shared is not None:
            yield
            return
        self._shared = shared = _Shared()
        try:
            yield
        finally:
            self._shared = None
            shared.bring_back()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes note that an optimizer may have written to the parameters."""
        if has_any(optimizer, self._watched_ids):
            for made in (*self._kept.values(), self._shared):
                if made is not None:
                    made.stamps = []

    def _watch(self, parameters: Sequence[torch.Tensor]) -> None:
        self._watched_ids = frozenset(map(id, parameters))
        watch_optimizer_steps(self)

    @torch.inference_mode(False)  # tensors of inference mode could not be written to outside it
    @torch.no_grad()
    def _renewed(self, away: Sequence[torch.device], parameters: Sequence[torch.Tensor]) -> Copies:
        self._watch(parameters)
        stamps = [_stamp(p) for p in parameters]
        made = {device: self._kept.get(device) for device in away}
        kept = {d: k for d, k in made.items() if k is not None and len(k.copies) == len(stamps)}
        for copies_there in kept.values():
            copies_there.renew(parameters, stamps)
        missing = [device for device in away if device not in kept]
        for device, copies in copy_to(missing, parameters).items():
            self._kept[device] = kept[device] = _Kept(device, copies, parameters, stamps)
        return {device: kept[device].copies for device in away}

    def _of_all_passes(
        self, shared: _Shared, away: Sequence[torch.device], parameters: Sequence[torch.Tensor]
    ) -> Copies:
        # Frozen ones may be written to by forward itself, see WrittenState.
        stamps = [_stamp(p) for p in parameters if p.requires_grad]
        if shared.copies and shared.stamps != stamps:
            raise RuntimeError(
                "a parameter was changed inside accumulate(), whose passes all use the same "
                "weights; step the optimizer after the block"
            )
        missing = [device for device in away if device not in shared.copies]
        if missing:
            shared.add(*self._differentiable(missing, parameters))
            shared.stamps = stamps
            self._watch(parameters)
        return {device: shared.copies[device] for device in away}

    def _differentiable(
        self, away: Sequence[torch.device], parameters: Sequence[torch.Tensor]
    ) -> tuple[Copies, list[list[Any]]]:
        """Returns copies, and for each bucket the nodes that bring its gradients back."""
        with torch.no_grad():
            copies = copy_to(away, parameters)
        trained = [i for i, p in enumerate(parameters) if p.requires_grad]
        nodes: list[list[Any]] = []
        for bucket in fill_buckets([parameters[i] for i in trained]):
            positions = [trained[i] for i in bucket]
            originals = [parameters[i] for i in positions]
            nodes.append([])
            for device in away:
                parts = [copies[device][i] for i in positions]
                # torch gives its own autograd functions no types.
                parts = Broadcast.apply(parts, *originals)  # type: ignore[no-untyped-call]
                node: Any = parts[0].grad_fn
                node._set_sequence_nr(_AT_ONCE)
                nodes[-1].append(node)
                for i, part in zip(positions, parts, strict=True):
                    copies[device][i] = part
        return copies, nodes


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
        if ctx.gathered is None or torch.is_grad_enabled():
            return None, *bring_to(ctx.originals[0].device, gradients)
        ctx.gathered = [
            old if new is None else new if old is None else old + new
            for old, new in zip(ctx.gathered, gradients, strict=True)
        ]
        return (None,) * (1 + len(gradients))


class _Shared:
    """What the passes inside accumulate() share: copies, and nodes that gather gradients."""

    def __init__(self) -> None:
        self.copies: dict[torch.device, Sequence[torch.Tensor]] = {}
        self.stamps: list[Any] = []
        self._nodes: list[list[Any]] = []

    def add(self, copies: Copies, nodes: list[list[Any]]) -> None:
        """Adds the copies on some devices, and the nodes of each bucket."""
        self.copies.update(copies)
        self._nodes += nodes
        for node in chain.from_iterable(nodes):
            if not any(map(has_hooks, node.originals)):  # they are to see whole gradients
                node.gathered = [None] * len(node.originals)

    def bring_back(self) -> None:
        """Adds what was gathered to the gradients of the parameters, through autograd."""
        for nodes in self._nodes:
            brought: list[tuple[torch.Tensor, torch.Tensor]] = []
            for node in nodes:
                if node.gathered is not None:
                    gradients = bring_to(node.originals[0].device, node.gathered)
                    pairs = zip(node.originals, gradients, strict=True)
                    brought += [(p, g) for p, g in pairs if g is not None]
                    node.gathered = None
            for parameter, gradient in brought:
                if not parameter.requires_grad:  # it was frozen since
                    old = parameter.grad
                    parameter.grad = gradient if old is None else old + gradient
            learning = [(p, g) for p, g in brought if p.requires_grad]
            if learning:
                torch.autograd.backward([p for p, _ in learning], [g for _, g in learning])


class _Kept:
    """Copies that stay on a device from call to call."""

    def __init__(
        self,
        device: torch.device,
        copies: Sequence[torch.Tensor],
        originals: Sequence[torch.Tensor],
        stamps: Sequence[Any],
    ) -> None:
        self._device = device
        self.copies = list(copies)
        self.stamps = list(stamps)
        self._versions = [copy._version for copy in copies]
        # While they are referenced, nothing else has their address, which is part of a stamp.
        self._storages = [_storage(original) for original in originals]

    def renew(self, originals: Sequence[torch.Tensor], stamps: Sequence[Any]) -> None:
        """Copies again what has changed since, here or there."""
        versions = [copy._version for copy in self.copies]
        if self.stamps == stamps and self._versions == versions:
            return
        before = self.stamps or [None] * len(stamps)
        for i, original in enumerate(originals):
            if before[i] != stamps[i] or self._versions[i] != versions[i]:
                copy = self.copies[i]
                if (copy.shape, copy.dtype) == (original.shape, original.dtype):
                    copy.copy_(original)
                else:
                    self.copies[i] = move(original, self._device, copy=True)
                self._versions[i] = self.copies[i]._version
                self._storages[i] = _storage(original)
        self.stamps = list(stamps)


def _stamp(tensor: torch.Tensor) -> Any:
    """Returns what stays equal while nothing writes to the tensor or gives it other memory."""
    if tensor.is_inference():
        return object()  # it does not tell
    is_strided = tensor.layout is torch.strided
    return (
        (tensor.untyped_storage()._cdata, tensor.storage_offset()) if is_strided else id(tensor),
        tensor.stride() if is_strided else None,
        tensor.shape,
        tensor.dtype,
        tensor._version,
    )


def _storage(tensor: torch.Tensor) -> StorageWeakRef | torch.Tensor:
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout is torch.strided else tensor
