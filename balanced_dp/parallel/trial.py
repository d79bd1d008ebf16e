"""Call a replica on other samples than it had, and judge how outputs depend on their number."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from . import nested
from .call_inputs import Arguments
from .losses.batch_value import BatchValues
from .losses.facts import Facts, UnknownKindError
from .losses.join import is_loss
from .losses.reductions import noticing
from .losses.step import UnclearError
from .losses.trace import Trace, tracing
from .parallel_apply import parallel_apply

_MAX_NUMEL = 2**16
"""The most entries of a parameter that is not trained, but copied for a trial."""

_TOLERANCE = 0.02
"""How much a value that is not float64 may depend on how many samples are computed at a time."""


@dataclass(slots=True, eq=False)
class Trial:
    """Calls a replica again, and compares what it returns.

    No gradients, buffers or random numbers of torch are changed by this, nor parameters, other than
    large ones without gradients that forward writes.

    Attributes:
        function: the replica, or what else was called.
        device: its device.
        dim: the batch dimension.
        num_samples: how many samples there are to choose from.
        scatter: returns the arguments on each of several devices, for so many of these samples.
    """

    function: Callable[..., Any]
    device: torch.device
    dim: int
    num_samples: int
    scatter: Callable[[Sequence[torch.device], Sequence[int]], Sequence[Arguments]]
    _tried: dict[Any, list[tuple[Trace, dict[str, Any]]]] = field(default_factory=dict, init=False)

    def learn(self, kind: int, values: BatchValues, name: str) -> None:
        """Learn how an output depends on the number of samples.

        Args:
            kind: the kind of its computation.
            values: those of the batch, whose ``facts`` and ``kinds`` are updated.
            name: the dotted path of the output.
        """
        size, most = values.facts.chunk_sizes[0], self.num_samples
        # A single sample may lose its dimension, and have no statistics.
        other = next((n for n in (2, 3, 1) if n != size and n <= most), None)
        if other is None:
            return
        # Both start with the same buffers, which the call itself may have written to.
        if size + other <= most:
            pair = self._outputs(name, [size, other])
        else:
            pair = [*self._outputs(name, [size]), *self._outputs(name, [other])]
        if len(pair) < 2 or not all(is_loss(output) for _, output in pair):
            return
        traces, outputs = zip(*pair, strict=True)
        facts = Facts([size, other], values.facts.known, True, is_trial=True)
        try:
            with torch.no_grad():
                BatchValues(traces, facts, values.device, values.kinds).of(outputs, name)
        except UnclearError as error:
            values.kinds[kind] = str(error)
        values.facts.doubts.extend(facts.doubts)

    def difference(self, values: BatchValues, name: str) -> str:
        """Return how what is joined from two times two samples differs from all four, or ""."""
        size, few = self._few(name, lambda one: is_loss(one) and not one.isnan())
        if not few:
            return ""
        traces, outputs = zip(*few, strict=True)
        known, kinds = dict(values.facts.known), dict(values.kinds)
        try:
            with torch.no_grad():
                # Two and four samples show what two and two are to be joined by.
                for pair, sizes in (((0, 4), [size, 2 * size]), ((0, 1), [size, size])):
                    facts = Facts(sizes, known, True, is_trial=True)
                    joined = BatchValues([traces[i] for i in pair], facts, values.device, kinds)
                    value = joined.of([outputs[i] for i in pair], name).item()
        except (UnclearError, UnknownKindError):  # another loss than in training
            return ""
        a, b, *again, found, found_again = [output.item() for output in outputs]
        if [a, b, found] != [*again, found_again]:  # it is random
            return ""
        eps = torch.finfo(outputs[0].dtype).eps
        relative, absolute = (1e-6, 1e-9) if eps < 1e-9 else (max(_TOLERANCE, 8 * eps), 1e-5)
        if abs(value - found) > relative * max(abs(a), abs(b), abs(found)) + absolute:  # no NaN
            return (
                f"for {2 * size} samples it is {found:g}, but {value:g} if joined from two halves"
            )
        return ""

    def changes(self, name: str) -> str:
        """Return how a number for two samples differs from that for four, or ""."""
        size, few = self._few(name, _is_number)
        if not few:
            return ""
        numbers = [number.item() if torch.is_tensor(number) else number for _, number in few]
        a, b, *again, found, found_again = numbers
        if [a, b, found] != [*again, found_again] or found in (a, b):
            return ""
        return f"for {2 * size} samples it is {found}, but {a} for half of them"

    def axes(self, name: str) -> list[int] | None:
        """Return the dimensions of an output that have another size for more samples, if known."""
        _, few = self._few(name, lambda one: isinstance(one, torch.Size))
        shapes = [shape for _, shape in few]
        if len({len(shape) for shape in shapes}) != 1:
            return None
        pairs = zip(shapes[0], shapes[-1], strict=True)
        return [axis for axis, (size, other) in enumerate(pairs) if size != other]

    def _few(
        self, name: str, is_kind: Callable[[Any], bool]
    ) -> tuple[int, list[tuple[Trace, Any]]]:
        """Return an output of a kind, in evaluation mode: of two parts, again, and twice the whole.

        Before them comes the number of samples of a part: two, or four if forward fails with two or
        returns another kind, or one if there are less than four samples. With none of these, there
        are no outputs.
        """
        for size in (2, 4) if self.num_samples > 3 else (1,):
            parts = self._outputs(name, [size, size], evaluates=True)
            whole = self._outputs(name, [2 * size], evaluates=True)
            few = [*parts, *whole]
            if parts and whole and all(is_kind(output) for _, output in few):
                return size, few
        return 0, []

    def _outputs(
        self, name: str, sizes: Sequence[int], evaluates: bool = False
    ) -> list[tuple[Trace, Any]]:
        """Return an output for other samples, and how it was computed; nothing if that fails.

        Of an output with dimensions it is the shape.

        Args:
            name: its dotted path.
            sizes: how many samples each output is for; they are the last ones.
            evaluates: whether modules are in evaluation mode, and all is computed twice.
        """
        key = (*sizes, evaluates)
        if key not in self._tried:
            try:
                self._tried[key] = self._call(sizes, evaluates)
            except Exception:  # of whatever forward does with so few samples
                self._tried[key] = []
        return [(trace, outputs.get(name)) for trace, outputs in self._tried[key]]

    @torch.no_grad()
    def _call(self, sizes: Sequence[int], evaluates: bool) -> list[tuple[Trace, dict[str, Any]]]:
        devices = [torch.device("cpu"), *[self.device] * len(sizes)]
        _, *arguments = self.scatter(devices, [self.num_samples - sum(sizes), *sizes])
        arguments *= 1 + evaluates
        traces, modules = [Trace(self.dim) for _ in arguments], []
        if evaluates and isinstance(self.function, nn.Module):
            modules = [module for module in self.function.modules() if module.training]
        with (
            torch.random.fork_rng(
                [] if self.device.type == "cpu" else [self.device], device_type=self.device.type
            ),
            warnings.catch_warnings(),
            noticing(),
            tracing(traces),
        ):
            warnings.simplefilter("ignore")  # the call itself has warned
            for module in modules:
                module.training = False
            try:
                functions = [_isolated(self.function) for _ in arguments]
                outputs = parallel_apply(functions, arguments, [self.device] * len(arguments))
            finally:
                for module in modules:
                    module.training = True
        return list(zip(traces, outputs, strict=True))


def _is_number(value: object) -> bool:
    """Return whether a value is a number, or a 0-dim tensor."""
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and not value.dim())


def _kept(output: Any) -> dict[str, Any]:
    """Return the numbers in nested containers, and the shapes of tensors, by dotted paths."""
    return {
        name: leaf if _is_number(leaf) else leaf.shape
        for name, leaf in nested.leaves(output)
        if isinstance(leaf, torch.Tensor) or _is_number(leaf)
    }


def _isolated(function: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that returns what is kept, and leaves a module's tensors as they are."""
    if not isinstance(function, nn.Module):
        return lambda *args, **kwargs: _kept(function(*args, **kwargs))
    tensors = {name: buffer.clone() for name, buffer in function.named_buffers()}
    copies: dict[int, torch.Tensor] = {}
    for name, parameter in function.named_parameters():
        copy = parameter.data  # with a version of its own
        if not parameter.requires_grad and parameter.numel() <= _MAX_NUMEL:
            copy = copy.clone()  # counts and means are written in forward
        copy.requires_grad_(parameter.requires_grad)
        if isinstance(parameter, nn.Parameter):
            copy = nn.Parameter(copy, parameter.requires_grad)
        vars(copy).update(vars(parameter))
        tensors[name] = copies[id(parameter)] = copy

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with _in_rnns(function, copies):
            return _kept(functional_call(function, tensors, args, kwargs))

    return call


@contextlib.contextmanager
def _in_rnns(module: nn.Module, copies: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let RNNs, which put their weights together in place, do so with copies of these."""
    rnns = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    before = [dict(vars(rnn)) for rnn in rnns]
    for rnn in rnns:
        rnn._flat_weights = [copies.get(id(weight), weight) for weight in rnn._flat_weights]
    try:
        yield
    finally:
        for rnn, attributes in zip(rnns, before, strict=True):
            vars(rnn).update(attributes)
