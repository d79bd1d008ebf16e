"""Join the 0-dim outputs of the replicas into those of the batch.

A ``ChunkLosses`` belongs to one call, an ``OutputHistory`` to a model. With gradients, ``graph``
and ``plan`` tell the weights of the replicas; without, an output is joined as the last call with
gradients has shown. What is not known is averaged by samples, with one warning.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ...devices import is_symbolic
from ...errors import warn
from .. import nested
from ..call_inputs import Arguments, described, named_arguments
from .cross_entropy import Counted, counting
from .graph import UNLIKE, Chunks, Part, UnclearError, how_samples_mix, parts_of
from .plan import (
    COUNTED,
    SAMPLES,
    SUM,
    Loss,
    Seen,
    Tensors,
    Weighting,
    check_class_weights,
    has_arrived,
)
from .sums import ignore_if_empty, total, weighted_mean
from .weight import weight_of_chunk

_REMEDY = (
    "Compute it outside, from gathered outputs; give loss_weight if it is a mean over other "
    "entries, or scalar_outputs='mean' if a mean weighted by samples is meant"
)
_NOT_KNOWN = "without gradients it is not known over how many entries it is"


@dataclass(slots=True, eq=False)
class OutputHistory:
    """What earlier calls of a model have shown about its outputs.

    Attributes:
        seen: losses, by the function and the path of the output.
        looked_at: functions whose graph was searched for samples that mix.
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    seen: dict[Any, Seen] = field(default_factory=dict)
    looked_at: set[Any] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[type[OutputHistory], tuple[()]]:
        return OutputHistory, ()  # a copy of the model has its own

    def warn(self, what: str, reason: str, remedy: str = _REMEDY) -> None:
        """Warn, once for each output, that it may differ from its value for the whole batch."""
        if what not in self.warned:
            self.warned.add(what)
            warn(
                f"{what} may differ from its value for the whole batch: {reason}. {remedy}; "
                "model.check(batch) shows by how much"
            )


@dataclass(slots=True, eq=False)
class ChunkLosses:
    """The 0-dim outputs of the replicas in one call.

    Attributes:
        history: what earlier calls have shown.
        function: the function that each replica computes.
        chunk_sizes: how many samples each replica has; None if the batch was not split.
        dim: the batch dimension.
        loss_weight: the weight of each replica's losses; if None, it is found out.
        is_auto: whether it is found out how losses were computed; if not, they are weighted by
            chunk size.
        arguments: those of each replica.
    """

    history: OutputHistory
    function: Callable[..., Any]
    chunk_sizes: Sequence[int] | None
    dim: int
    loss_weight: Callable[..., Any] | str | None = None
    is_auto: bool = True
    arguments: Sequence[Arguments] = ()
    counted: Sequence[list[Counted]] = ()
    _weights: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager in which the replicas run, and cross entropies are counted."""
        sizes = self.chunk_sizes or ()
        self.counted = [[] for _ in sizes] if len(sizes) > 1 and self.is_auto else ()
        with counting(self.counted):
            yield

    def join(self, outputs: Tensors, name: str, device: torch.device) -> Tensor:
        """Return the value of the whole batch on ``device``. Differentiable.

        Args:
            outputs: a 0-dim floating tensor of each replica.
            name: the dotted path of the output.
            device: the device of the result.
        """
        sizes = self.chunk_sizes or [1] * len(outputs)
        weights = self._given_weights(name)
        if weights:
            with contextlib.suppress(UnclearError):
                for part in self.parts(outputs):
                    ignore_if_empty(part.nodes, weights if part.kind else ())
        if weights or not self.counted or is_symbolic(outputs[0].device):
            return weighted_mean(outputs, weights or sizes, device)
        pairs = zip(self.counted, outputs, strict=True)
        own = [one for found, output in pairs for one in found if one.is_(output)]
        key, has_gradients = (self._code, name), torch.is_grad_enabled()
        try:
            if len(own) == len(outputs):
                if self.history.seen.get(key) != COUNTED:
                    check_class_weights(own)
                    self.history.seen[key] = COUNTED
                if own[0].kind == "sum":
                    return total(outputs, device)
                return weighted_mean(outputs, [one.count for one in own], device)
            if has_gradients:
                return self._by_graph(outputs, name, key, device)
            seen = self.history.seen.get(key) or self._of_cross_entropy(outputs, device)
            self.history.seen[key] = seen
            return self._as_before(outputs, seen, device)
        except UnclearError as error:
            if has_gradients or key not in self.history.seen:
                self.history.seen[key] = Seen(reason=str(error))
            self.history.warn(self.described(name), str(error))
            return weighted_mean(outputs, sizes, device)

    def described(self, name: str) -> str:
        """Return what messages call an output."""
        return f"output {name or '(the whole)'} of {described(self.function)}"

    def in_place(self, outputs: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """Return the replicas' outputs with the value of the whole batch for each 0-dim output.

        It is computed on ``device``, and copied to that of each replica.
        """
        if not self.is_auto or len(outputs) < 2:
            return outputs
        losses = [{n: v for n, v in nested.leaves(output) if is_loss(v)} for output in outputs]
        joined = {
            name: self.join([own[name] for own in losses], name, device)
            for name in losses[0]
            if all(name in own for own in losses)
        }
        return [
            nested.replaced(output, {n: v.to(own[n].device, copy=True) for n, v in joined.items()})
            for output, own in zip(outputs, losses, strict=True)
        ]

    def look_for_mixing(self, outputs: Sequence[Any]) -> None:
        """Warn if the graph shows that samples of a chunk are computed from each other.

        It is searched once, in the first call with gradients and chunks of different size.
        """
        sizes, history = self.chunk_sizes or (), self.history
        ends = [sizes.index(end(sizes)) for end in (min, max) if sizes]
        leaves = [nested.tensors(outputs[i]) for i in ends]
        pairs = [p for p in zip(*leaves, strict=False) if all(one.grad_fn for one in p)]
        if len(set(sizes)) < 2 or not pairs or self._code in history.looked_at:
            return
        history.looked_at.add(self._code)
        how = how_samples_mix(pairs, [sizes[i] for i in ends])
        if how and not is_symbolic(pairs[0][0].device):
            what = f"what {described(self.function)} returns"
            remedy = "Compute it outside, from gathered outputs"
            history.warn(what, f"{how}, so each device uses only its own chunk", remedy)

    @property
    def _code(self) -> Any:
        """What tells functions apart: their code, which a function made anew has as well."""
        function = self.function
        if hasattr(function, "__code__"):
            return function.__code__
        return id(function) if isinstance(function, nn.Module) else repr(function)

    def _given_weights(self, name: str) -> list[Any]:
        """Return the weight of each replica's output by ``loss_weight``, if it gives one."""
        if self.loss_weight is None:
            return []
        self._weights = self._weights or [
            weight_of_chunk(self.loss_weight, self.function, *own) for own in self.arguments
        ]
        weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
        return [] if any(weight is None for weight in weights) else weights

    def parts(self, outputs: Tensors) -> list[Part]:
        """Return the operators and reductions of a loss; none if it has no graph."""
        have_graph = {output.grad_fn is not None for output in outputs}
        if len(have_graph) > 1:
            raise UnclearError(UNLIKE)
        counted = {one.node: one for found in self.counted for one in found if one.node}
        chunks = Chunks(self.chunk_sizes or (), self.dim)
        return parts_of(outputs, chunks, counted) if have_graph == {True} else []

    def _by_graph(self, outputs: Tensors, name: str, key: Any, device: torch.device) -> Tensor:
        """Join an output as its graph shows."""
        loss = Loss(self.parts(outputs), outputs, self.chunk_sizes or (), device, self)
        last = self.history.seen.get(key, Seen())
        if last.structure != loss.structure:
            last = loss.decided()
        elif has_arrived(last.spread) and not float(last.spread[0]) <= loss.tolerance:
            if last.base[0] != "divisor":  # which was right in any case
                reason = "it is computed in another way than before, which is noticed one call late"
                self.history.warn(f"one value of {self.described(name)}", reason)
            last = loss.decided()
        seen = self.history.seen[key] = loss.with_numbers(last)
        if seen.doubt:
            self.history.warn(self.described(name), seen.doubt)
        own = {k: by for k, _, by, _ in seen.exchanged}
        for k, part in enumerate(loss.parts):
            by = own.get(k, seen.base)
            if part.kind and by not in (SUM, SAMPLES):
                ignore_if_empty(part.nodes, loss.weights(by))
        values = [loss.values(k) for k, *_ in seen.exchanged]
        return _joined(outputs, seen, values, loss.weights, device)

    def _as_before(self, outputs: Tensors, seen: Seen, device: torch.device) -> Tensor:
        """Join an output without a graph as the last call with gradients has shown."""
        if seen.reason:
            raise UnclearError(seen.reason)
        if seen.later is None:
            raise UnclearError(_NOT_KNOWN)
        if seen.base == SUM and seen.arguments != self.argument_names:
            raise UnclearError("without gradients, and with other arguments, it may be a mean")
        values = [
            [factor.to(one.value.device) * one.value for one in self.at(position)]
            for _, position, _, factor in seen.exchanged
        ]
        return _joined(outputs, replace(seen, base=seen.later), values, self.weights, device)

    def _of_cross_entropy(self, outputs: Tensors, device: torch.device) -> Seen:
        """Return how an output is joined that is a multiple of a counted cross entropy.

        Such as a sum divided by the number of items in the batch. This waits for the device.

        Raises:
            UnclearError: it is none.
        """
        tolerance = 8 * torch.finfo(outputs[0].dtype).eps
        for i, own in enumerate(zip(*self.counted, strict=False)):
            pairs = zip(outputs, own, strict=True)
            factor, *others = [float(output) / (float(one.value) or 1.0) for output, one in pairs]
            if all(math.isclose(factor, other, rel_tol=tolerance) for other in others):
                is_mean = own[0].kind == "mean"
                if is_mean or factor * sum(float(one.count) for one in own) < 1 + tolerance:
                    by = ("counted", i) if is_mean else SUM
                    return Seen(base=by, later=by, arguments=self.argument_names)
        raise UnclearError("no call with gradients has shown yet how it is computed")

    def at(self, position: int) -> list[Counted]:
        """Return the counted cross entropy of each replica at a position."""
        if any(len(own) <= position for own in self.counted):
            raise UnclearError(_NOT_KNOWN)
        return [own[position] for own in self.counted]

    def weights(self, by: Weighting) -> Sequence[Any]:
        """Return the weight of each replica, where no graph is needed for it."""
        if by in (SUM, SAMPLES):
            return self.chunk_sizes or ()
        if by[0] == "counted":
            return [one.count for one in self.at(by[1])]
        found = [self.counts(own, by).get(by) for own in self.arguments]
        if by[0] != "argument" or None in found:
            raise UnclearError(_NOT_KNOWN)
        return found

    def counters(self) -> Sequence[Weighting]:
        """Return what may be counted in the arguments."""
        return list(self.counts(self.arguments[0])) if self.arguments else []

    def numbers(self) -> Sequence[float]:
        """Return the numbers among the arguments, such as that of items in the batch."""
        args, kwargs = self.arguments[0] if self.arguments else ((), {})
        leaves = [leaf for _, leaf in nested.leaves([*args, *kwargs.values()])]
        found = [leaf for leaf in leaves if not isinstance(leaf, Tensor) or leaf.numel() == 1]
        numbers = [
            torch.as_tensor(leaf).item() for leaf in found if isinstance(leaf, Tensor | Real)
        ]
        return [number for number in numbers if number > 1]

    def counts(self, arguments: Arguments, only: Weighting | None = None) -> dict[Weighting, Any]:
        """Return what is counted in the arguments of a replica, or only one of these.

        That is the sum of a tensor, or the number of its entries other than 0 or -100 if they are
        integers.
        """
        return {
            by: leaf.sum() if how == "sum" else (leaf != int(how)).sum()
            for name, value in named_arguments(self.function, *arguments)
            for path, leaf in nested.leaves(value, name)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel() and not leaf.requires_grad
            for how in ("sum", "0", "-100")[: 1 if leaf.is_floating_point() else 3]
            for by in [("argument", path, how)]
            if only in (None, by)
        }

    @property
    def argument_names(self) -> Any:
        """The number of positional arguments, and the names of others that are not None."""
        args, kwargs = self.arguments[0] if self.arguments else ((), {})
        return len(args), frozenset(name for name, value in kwargs.items() if value is not None)


def _joined(
    outputs: Tensors,
    seen: Seen,
    values: Sequence[Tensors],
    weights: Callable[[Weighting], Sequence[Any]],
    device: torch.device,
) -> Tensor:
    """Return the loss of the batch, with the values of cross entropies exchanged."""

    def by(weighting: Weighting, tensors: Tensors) -> Tensor:
        if weighting == SUM:
            return total(tensors, device)
        return weighted_mean(tensors, weights(weighting), device)

    joined = by(seen.base, outputs)
    for (*_, own, _), tensors in zip(seen.exchanged, values, strict=True):
        joined = joined + by(own, tensors) - by(seen.base, tensors)
    return joined


def is_loss(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a 0-dim tensor of a type that has means, as losses are."""
    return (
        isinstance(value, Tensor)
        and not value.dim()
        and (value.is_floating_point() or value.is_complex())
    )
