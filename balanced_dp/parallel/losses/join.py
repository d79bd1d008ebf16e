"""Join the 0-dim outputs of the replicas into the outputs for the whole batch.

Replica i gets chunk i, a part of the batch, and computes the loss

    l_i = m_i + sum_k a_k c_ik.

Here m_i is a mean over the n_i samples of the chunk, c_ik is a cross entropy (a mean over t_ik
targets), and a_k is its factor. ``graph.py`` finds these terms in the autograd graph of l_i. The
loss of the batch is

    loss = sum_i n_i m_i / sum_i n_i + sum_k a_k sum_i t_ik c_ik / sum_i t_ik.

The values of the c_ik are known, so m_i is computed by subtracting the a_k c_ik from l_i. Instead
of means, the m_i or the c_ik may be sums, which are added up over the replicas. If the autograd
graph does not show that m_i is a mean or a sum over samples, the m_i are averaged with the n_i as
weights, and one warning is issued.

In a call with gradients, one more kind of loss is recognized: the masked mean, which is
``(entries * mask).sum() / mask.sum()``. The masked mean of each replica is weighted by the sum of
the replica's mask. In the first calls, ``Call._counts_of`` compares each divisor with the sum of
its mask. These checks end with the first call that shows whether the loss is a masked mean.

A call without gradients has no autograd graph to follow. There, an output is joined as follows:

- An output that is a cross entropy is joined like a cross entropy in a call with gradients.
- Any other output is joined as in the last call with gradients, if both calls have equally many
  cross entropies and the same arguments. The values of the arguments may differ, but an argument
  that is None counts as missing. If the output is a masked mean, however, it is averaged with the
  n_i as weights, and a warning is issued.
- In all other cases, ``Call._by_value`` compares the value of the output with the value of each
  cross entropy. If the output is a multiple of a cross entropy, it is joined like this cross
  entropy. Otherwise, it is averaged with a warning.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...emulation.machine import is_symbolic
from ...errors import warn
from .. import nested
from .cross_entropy import Counted, ignore_if_empty, memory_of
from .graph import Composition, are_equal, composition_of, how_samples_mix, masked_mean_of
from .weights import ScalarOutputs, Tensors, joined, weight_of_chunk

_REMEDY = (
    "Return its terms and combine them after the call, or return a row for each sample (with "
    "squeeze(-1), not squeeze()), or give loss_weight or scalar_outputs"
)
_NOT_SHOWN = "no call with gradients and the same arguments has shown how it is computed"

Rows = Sequence[Sequence[Counted]]
"""For each cross entropy of a call, its ``Counted`` record from each replica."""


@dataclass(slots=True, eq=False)
class OutputHistory:
    """What earlier calls of a model have shown about its outputs.

    Attributes:
        losses: what the last call with gradients has shown about each output. The key is the
            function and the dotted path of the output. The value is a pair. Its first item is the
            terms that add up to the output. Its second item describes the call: the number of cross
            entropies, and the dotted paths of the arguments that were not None.
        masked: a dict that says whether an output is a masked mean. The key is the function and the
            dotted path of the output. An output for which this is not yet known has no entry.
        seen: a set with three kinds of entries:

            - a function and a bool: ``Call.look_for_mixing`` has checked whether the samples of a
              chunk affect each other in this function, with chunks of equal size (True) or of
              different sizes (False).
            - a function and the dotted path of an output: ``Call.join`` has joined this output,
              which was a single number on each replica instead of one row for each sample.
            - a string that describes an input or output: a warning was issued about it.
    """

    losses: dict[Any, tuple[Composition, Any]] = field(default_factory=dict)
    masked: dict[Any, bool] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)

    def __reduce__(self) -> tuple[type[OutputHistory], tuple[()]]:
        return OutputHistory, ()  # a copy of the model begins with an empty history


@dataclass(eq=False)
class Call:
    """One call of a function on several devices: its chunks, and how 0-dim outputs are joined.

    The chunks are the parts of the batch, one for each device.

    Attributes:
        history: what earlier calls of the model have shown about its outputs.
        function: the function that each replica computes.
        devices: the device of each replica.
        chunk_sizes: how many samples each replica has; empty if the batch was not split.
        dim: the batch dimension.
        scalar_outputs: how 0-dim outputs are joined, as in ``BalancedDataParallel``. With
            ``"auto"``, the autograd graph of each loss is followed to the means and sums in it.
        loss_weight: a function that returns the weight of a replica's losses. If None, the autograd
            graph determines the weight.
        arguments: the arguments that each replica gets.
        counted: for each replica, a record of each cross entropy that it has computed; empty if
            cross entropies are not recorded, as with ``scalar_outputs="mean"``.
    """

    history: OutputHistory
    function: Callable[..., Any]
    devices: Sequence[torch.device]
    chunk_sizes: tuple[int, ...]
    dim: int
    scalar_outputs: ScalarOutputs = "auto"
    loss_weight: Callable[..., Any] | None = None
    arguments: Sequence[nested.Arguments] = ()
    counted: Sequence[list[Counted]] = ()

    def join(self, outputs: Tensors, name: str, device: torch.device) -> Tensor:
        """Return the value of a 0-dim output for the whole batch, from the replicas' values.

        The result is differentiable. The weight of each replica comes from ``loss_weight``, from
        the number of targets of a cross entropy, or from the autograd graph. If none of these gives
        weights, the weights are the chunk sizes, and a warning is issued.

        If cross entropies are not recorded (as with ``scalar_outputs="mean"``), or if the devices
        compute no values (``emulate_devices(symbolic=True)``), only ``loss_weight`` is used.
        Without ``loss_weight``, the weights are the chunk sizes, and no warning is issued.

        Args:
            outputs: the value of the output on each replica, a 0-dim floating-point or complex
                tensor.
            name: the dotted path of the output in the result of the function, such as ``loss``, or
                "" if the output is the whole result.
            device: the device of the result.
        """
        sizes, key = self.chunk_sizes or (1,) * len(outputs), (self._code, name)
        self.history.seen.add(key)
        given = [w.get(name) if isinstance(w, Mapping) else w for w in self._given_weights]
        if given and all(weight is not None for weight in given):
            ignore_if_empty([output.grad_fn for output in outputs], given)
            return joined(outputs, given, device)
        if not self.counted or is_symbolic(outputs[0].device):
            return joined(outputs, sizes, device)
        rows = list(zip(*self.counted, strict=False))
        loss = self._composition_of(outputs, key, rows)
        if loss.unclear:
            if counts := self._counts_of(outputs, key, device):
                return joined(outputs, counts, device)
            what = "All of it but its cross entropies" if loss.parts else "It"
            self.warn(name, loss.unclear, f"{what} is averaged, weighted by chunk size. {_REMEDY}")
        weights = [None if own[0].kind == "sum" else [one.count for one in own] for own in rows]
        if len(loss.parts) == 1 and not loss.kinds:  # nothing but a multiple of a cross entropy
            return joined(outputs, weights[loss.parts[0][0]], device)
        total = torch.zeros((), dtype=outputs[0].dtype, device=device)
        for place, factor, paths in loss.parts:
            values = [one.value * factor for one in rows[place]]
            for path in paths:
                by = [dict(nested.leaves(arguments))[path] for arguments in self.arguments]
                values = [v / torch.as_tensor(n).view(()) for v, n in zip(values, by, strict=True)]
            outputs = [o - value.to(o.dtype) for o, value in zip(outputs, values, strict=True)]
            total = total + joined(values, weights[place], device)
        rest = joined(outputs, None if loss.kinds == {"sum"} else sizes, device)
        return (total + rest).to(rest.dtype)

    def _counts_of(self, outputs: Tensors, key: Any, device: torch.device) -> list[Tensor]:
        """Return how many entries the mask on each replica selects, if the output is a masked mean.

        A masked mean is ``(entries * mask).sum() / divisor``, where the divisor is the number of
        entries that the mask selects. If no mask selects an entry, return 1 for each replica. If
        the output is not a masked mean, return an empty list.

        The autograd graph shows the divisor and the mask, but not that they belong together. So the
        first calls compare their values, which means waiting for the devices. The first of these
        cases that applies determines the result:

        - A mask has other values than 0 and 1, or it selects entries but the divisor is not the
          number of these entries: the output is not a masked mean, and the checks end.
        - The masks select no entry, or all entries: the output counts as a masked mean in this
          call, and the next call checks again.
        - All chunks have the same size, and the masks select equally many entries in each: the
          masks may select features, the same ones for each sample. So the output does not count as
          a masked mean in this call, and the next call checks again.
        - Otherwise, the output is a masked mean, and the checks end.

        Until the checks end, a call with at most one sample in each chunk compares nothing, and the
        result is an empty list.
        """
        found, known = [*map(masked_mean_of, outputs)], self.history.masked
        masks = [own[-1] for own in found if own]
        lengths = {*map(divmod, map(len, masks), self.chunk_sizes)}
        may_be = known.get(key, max(self.chunk_sizes) > 1)
        # The length of a mask of samples is a multiple of the chunk size, the same multiple on each
        # replica. A factor that is broadcast over the samples, for example, has another length.
        if not all(found) or not may_be or len(lengths) > 1 or lengths.pop()[1]:
            return []
        counts = torch.stack([mask.sum(dtype=torch.double).to(device) for mask in masks])
        if key not in known:
            is_partial = 0 < float(counts.sum()) < sum(map(Tensor.numel, masks))
            is_masked = all(_is_count(divisor, mask) for _, divisor, mask in found)
            # A mask of features is the same for each sample. In chunks of equal size, it selects
            # equally many entries. So equal counts do not show that a mask selects samples.
            is_alike = len({*self.chunk_sizes}) == len({*counts.tolist()}) == 1
            if not is_masked or (is_partial and not is_alike):
                known[key] = is_masked
            if not is_masked or (is_partial and is_alike):
                return []
        # If no mask selects an entry, each replica has the loss of the whole batch, 0 or 0 / 0. So
        # all weights may be 1.
        weights = [*counts.where(counts.any(), 1)]
        ignore_if_empty([node for node, *_ in found], weights)
        return weights

    def is_number(self, tensor: Tensor, name: str) -> bool:
        """Return whether an output is a single number, and not one row for each sample.

        A 0-dim tensor is a number. Any other tensor of one entry may be a number, or the row of a
        single sample. It counts as a number in two cases:

        - A chunk of the call has several samples, which would give several rows.
        - An earlier call has joined the output as a number.

        Args:
            tensor: the output of one replica.
            name: the dotted path of the output.
        """
        is_of_several = max(self.chunk_sizes, default=0) > 1
        has_been = (self._code, name) in self.history.seen
        return not tensor.dim() or (tensor.numel() == 1 and (is_of_several or has_been))

    def _composition_of(self, outputs: Tensors, key: Any, rows: Rows) -> Composition:
        leaves = nested.leaves(self.arguments[0])
        form = len(rows), {path for path, value in leaves if value is not None}
        equal = [all(map(Counted.is_, own, outputs)) for own in rows]
        loss, known = self.history.losses.get(key, (Composition(), None))
        if any(equal):
            loss = Composition([(equal.index(True), 1.0, ())])
        elif torch.is_grad_enabled():
            nodes = [tuple(one.value.grad_fn for one in own) for own in rows]
            counted = {own: (i, rows[i][0].kind) for i, own in enumerate(nodes)}
            arguments = {
                tuple(memory_of(t) for _, t in own): own[0][0]
                for own in zip(*map(nested.leaves, self.arguments), strict=False)
                if all(isinstance(t, Tensor) and t.numel() == 1 and not t.is_sparse for _, t in own)
            }
            loss = composition_of(outputs, self.chunk_sizes, counted, arguments)
        elif form != known:
            return self._by_value(outputs, rows)
        if torch.is_grad_enabled():
            self.history.losses[key] = (loss, form)
        return loss

    def _by_value(self, outputs: Tensors, rows: Rows) -> Composition:
        """Return the ``Composition`` of an output, by comparing it with each cross entropy.

        The output is joined like a cross entropy if it is this cross entropy times a factor that is
        the same on each replica. For a summed cross entropy, the absolute value of the factor must
        also be 1, or 1 divided by a one-element tensor argument of the call, because any other
        factor may depend on the chunk. If the output is like no cross entropy, the ``Composition``
        is marked as unclear. This method waits for the values of the output and of the cross
        entropies.

        Hugging Face's Trainer needs the comparison, because it may evaluate before any call with
        gradients has shown how the loss of the model is computed. For example, the loss may be a
        summed cross entropy divided by an argument. The comparison is also needed in inference
        mode. Tensors have no version counters there, so only the value of an output shows that it
        is a cross entropy (see ``Counted.is_``).
        """
        numbers: list[Any] = [t for t in nested.tensors(self.arguments[0]) if t.numel() == 1]
        for place, own in enumerate(rows):
            pairs = [(float(o), float(one.value)) for o, one in zip(outputs, own, strict=True)]
            factor = next((output / value for output, value in pairs if value), 0.0)
            # A summed cross entropy may be divided by a number that differs between the chunks. The
            # value for the whole batch is known only if this number is 1 or an argument.
            by_argument = (are_equal([1, abs(factor * float(x))], 1e-6) for x in (1, *numbers))
            is_known = own[0].kind == "mean" or any(by_argument)
            if factor and is_known and all(are_equal([o, v * factor], 1e-6) for o, v in pairs):
                return Composition([(place, 1.0, ())])
        return Composition(unclear=_NOT_SHOWN)

    @functools.cached_property
    def _given_weights(self) -> list[Any]:
        """What ``loss_weight`` returns for each replica; empty if ``loss_weight`` is None."""
        if self.loss_weight is None:
            return []
        return [weight_of_chunk(self.loss_weight, self.function, own) for own in self.arguments]

    def warn(self, path: str | None, reason: str, remedy: str = _REMEDY) -> None:
        """Warn once that an output may differ from its value for the whole batch.

        After a warning in a call without gradients, there may be a second warning about the same
        output in a call with gradients, because the reason may be another one.

        Args:
            path: the dotted path of the output; None means the whole result of the function.
            reason: why the output may differ.
            remedy: what the user may do about it.
        """
        what = "the result" if path is None else f"output {path or '(the whole)'}"
        what = f"{what} of {nested.described(self.function)}"
        key = what if torch.is_grad_enabled() else f"{what} without gradients"
        if not self.history.seen & {what, key}:
            self.history.seen.add(key)
            warn(
                f"{what} may differ from its value for the whole batch: {reason}. {remedy}; "
                "model.check(batch) shows the difference"
            )

    def with_joined_losses(self, outputs: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """Return the outputs of the replicas, each loss replaced by the loss of the whole batch.

        A loss is an output that is a floating-point or complex tensor with a single number for all
        samples of a replica. Its value for the whole batch is computed on ``device``, and copied to
        the device of each replica. Without ``scalar_outputs="auto"``, or with a single replica, the
        outputs are returned as they are.
        """
        if self.scalar_outputs != "auto" or len(outputs) < 2:
            return outputs
        leaves = [dict(nested.leaves(output)) for output in outputs]
        values = dict[str, Tensor]()
        for name, first in leaves[0].items():
            own: list[Any] = [each.get(name) for each in leaves]
            if all(has_means(one) and self.is_number(one, name) for one in own):
                value = self.join([one.reshape(()) for one in own], name, device)
                values[name] = value.view_as(first)
        return [
            nested.replaced(output, {n: v.to(own[n].device, copy=True) for n, v in values.items()})
            for output, own in zip(outputs, leaves, strict=True)
        ]

    def look_for_mixing(self, outputs: Sequence[Any]) -> None:
        """Warn if the result for a sample is computed from other samples of the same chunk.

        A chunk is the part of the batch that a replica gets. In the first call of a function with
        chunks of different sizes, the autograd graphs of the outputs are searched for such
        computations. Chunks of equal size do not show which dimensions are samples. So in the first
        call with chunks of equal size, only the targets of cross entropies are read. If they are
        the row numbers 0, 1, 2, ... in any order, as in a contrastive loss, a warning is issued. A
        call in which no output has an autograd graph does not count as the first.
        """
        sizes, is_even = self.chunk_sizes, len({*self.chunk_sizes}) < 2
        key = self._code, is_even
        if key in self.history.seen or len(sizes) < 2 or is_symbolic(self.devices[0]):
            return
        leaves = zip(*map(nested.tensors, outputs), strict=False)
        found = [own for own in leaves if all(one.grad_fn for one in own)]
        if not found:
            return
        self.history.seen.add(key)
        if is_even:
            rows = zip(*self.counted, strict=False)
            compares = any(all(map(Counted.compares_samples, own)) for own in rows)
            how = "cross entropy targets are row numbers, as in contrastive loss" * compares
        else:
            # Every two replicas of different sizes are compared. To rule out shapes that follow the
            # sizes by chance, each of these comparisons must find an operator.
            pairs = combinations(zip(sizes, *found, strict=True), 2)
            hows = (how_samples_mix(a, b, (m, n)) for (m, *a), (n, *b) in pairs if m != n)
            how = (first := next(hows)) and first * all(hows)
        if how:
            reason = f"{how}, so each device uses only its own chunk"
            self.warn(None, reason, "Compute this after the call, from gathered outputs")

    @property
    def _code(self) -> Any:
        """A key for the function: its code object, or its ``id`` if it has no code object.

        A function that is defined again, as in a loop, has the same code object, so the same key.
        """
        function = inspect.unwrap(self.function)
        return getattr(function, "__code__", id(function))


def has_means(value: object) -> TypeGuard[Tensor]:
    """Return whether ``value`` is a floating-point or complex tensor, so that it has a mean."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_count(divisor: Tensor, mask: Tensor) -> bool:
    """Return whether ``divisor`` is the number of entries that ``mask`` selects.

    Return False if the mask has other values than 0 and 1. If the mask selects no entry, return
    True for any divisor.
    """
    count = mask.sum(dtype=torch.double)
    is_close = (divisor.double() - count.to(divisor.dtype)).abs().max() < 1e-5
    return torch.equal(mask * mask, mask) and bool(is_close | (count == 0))
