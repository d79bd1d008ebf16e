"""Join the 0-dim outputs of the replicas into those of the batch.

A ``ChunkLosses`` belongs to one call, an ``OutputHistory`` to a model. With gradients, ``graph``
and ``plan`` tell the weights of the replicas; without, an output is joined as the last call with
gradients has shown. What is not known is averaged by samples, with one warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ...devices import is_symbolic
from ...errors import warn
from .. import nested
from ..nested import Arguments, described
from .cross_entropy import Counted, counting
from .graph import UNLIKE, Part, UnclearError, parts_of
from .mixing import how_samples_mix
from .plan import COUNTED, SAMPLES, SUM, Counts, Loss, Rule, Tensors, doubt_of, joined
from .sums import ignore_if_empty, total, weighted_mean
from .weight import weight_of_chunk

_REMEDY = (
    "Compute it outside, from gathered outputs; give loss_weight if it is a mean over other "
    "entries, or scalar_outputs='mean' if a mean weighted by samples is meant"
)


@dataclass(slots=True, eq=False)
class OutputHistory:
    """What earlier calls of a model have shown about its outputs.

    Attributes:
        rules: how losses are joined, by the function and the path of the output.
        looked_at: functions whose graph was searched for samples that mix.
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    rules: dict[Any, Rule] = field(default_factory=dict)
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
                for part in self._parts(outputs):
                    ignore_if_empty(part.nodes, weights if part.kind else ())
        if weights or not self.counted or is_symbolic(outputs[0].device):
            return weighted_mean(outputs, weights or sizes, device)
        pairs = zip(self.counted, outputs, strict=True)
        own = [one for found, output in pairs for one in found if one.is_(output)]
        rules, key = self.history.rules, (self._code, name)
        try:
            if len(own) == len(outputs):
                if rules.get(key) != COUNTED:  # to compare class weights waits for the device
                    doubt = doubt_of(own, sizes)
                    if doubt:
                        self.history.warn(self.described(name), doubt)
                    rules[key] = COUNTED
                if own[0].kind == "sum":
                    return total(outputs, device)
                return weighted_mean(outputs, [one.count for one in own], device)
            if torch.is_grad_enabled():
                return self._by_graph(outputs, name, key, device)
            counts = self._counts()
            rules[key] = rules.get(key) or counts.rule_of(outputs)
            rule = rules[key].without_gradients(counts.argument_names)
            values = [
                [factor.to(one.value.device) * one.value for one in counts.at(position)]
                for _, position, _, factor in rule.exchanged
            ]
            return joined(outputs, rule, values, counts.weights, device)
        except UnclearError as error:
            if torch.is_grad_enabled() or key not in rules:
                rules[key] = Rule(reason=str(error))
            self.history.warn(self.described(name), str(error))
            return weighted_mean(outputs, sizes, device)

    def _by_graph(self, outputs: Tensors, name: str, key: Any, device: torch.device) -> Tensor:
        """Join an output as its graph shows."""
        loss = Loss(self._parts(outputs), outputs, self._counts(), device)
        rule = self.history.rules.get(key, Rule())
        if rule.structure != loss.structure:
            rule = loss.rule()
        elif rule.has_arrived() and not float(rule.spread[0]) <= loss.tolerance:
            reason = "it is computed in another way than before, which is noticed one call late"
            self.history.warn(f"one value of {self.described(name)}", reason)
            rule = loss.rule()
        rule = self.history.rules[key] = loss.with_numbers(rule)
        if rule.doubt:
            self.history.warn(self.described(name), rule.doubt)
        own = {k: by for k, _, by, _ in rule.exchanged}
        for k, part in enumerate(loss.parts):
            by = own.get(k, rule.base)
            if part.kind and by not in (SUM, SAMPLES):
                ignore_if_empty(part.nodes, loss.weights(by))
        values = [loss.values(k) for k, *_ in rule.exchanged]
        return joined(outputs, rule, values, loss.weights, device)

    def _parts(self, outputs: Tensors) -> list[Part]:
        """Return the operators and reductions of a loss; none if it has no graph."""
        have_graph = {output.grad_fn is not None for output in outputs}
        if len(have_graph) > 1:
            raise UnclearError(UNLIKE)
        counted = {one.node: one for found in self.counted for one in found if one.node}
        sizes = self.chunk_sizes or ()
        return parts_of(outputs, sizes, self.dim, counted) if have_graph == {True} else []

    def _counts(self) -> Counts:
        return Counts(self.chunk_sizes or (), self.function, self.arguments, self.counted)

    def _given_weights(self, name: str) -> list[Any]:
        """Return the weight of each replica's output by ``loss_weight``, if it gives one."""
        if self.loss_weight is None:
            return []
        self._weights = self._weights or [
            weight_of_chunk(self.loss_weight, self.function, *own) for own in self.arguments
        ]
        weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
        return [] if any(weight is None for weight in weights) else weights

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


def is_loss(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a 0-dim tensor of a type that has means, as losses are."""
    return (
        isinstance(value, Tensor)
        and not value.dim()
        and (value.is_floating_point() or value.is_complex())
    )
