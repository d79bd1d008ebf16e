"""Define workloads: a model, its batches, its loss and its optimizer, but no devices."""

from __future__ import annotations

import copy
import functools
import importlib
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import ArgumentError, ArgumentTypeError
from .models import TokenTransformer

Batch = tuple[tuple[Any, ...], dict[str, Any], Any]
"""A batch: positional arguments of the model, its keyword arguments, and the target."""

_UNNAMED = "workload"


@dataclass(frozen=True, slots=True)
class Workload:
    """Define everything that a training step needs except the devices.

    Attributes:
        model: a module, which is copied for training, or a function that returns a new module. A
            function should not name a device: if it names none, the module is created on device 0.
            So if device 0 is emulated without values, the module may be larger than the memory of
            this machine.
        make_batch: a function that takes a batch size and returns a batch on the CPU. The batch is
            a tuple ``(args, kwargs, target)``: the positional arguments of the model, its keyword
            arguments, and the target. If the only argument of the model is a tensor ``x``, the
            batch may be ``(x, target)``.
        loss: a function that takes the model's output and the target, and returns the loss as a
            0-dim tensor.
        make_optimizer: a function that takes the model's parameters and returns an optimizer.
        precision: the dtype of autocast, ``torch.bfloat16`` or ``torch.float16``. None means no
            autocast.
        name: the name of the workload in reports. If no name is given, ``find_workload`` uses its
            argument ``target`` as the name.
        batch_size: the batch size that the commands ``tune`` and ``plan`` use by default.
    """

    model: Callable[[], nn.Module] | nn.Module
    make_batch: Callable[[int], Batch | tuple[torch.Tensor, Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW
    precision: torch.dtype | None = None
    name: str = _UNNAMED
    batch_size: int = 32

    def new_model(self) -> nn.Module:
        """Return a new module: a copy of the module ``model``, or what ``model()`` returns.

        Raises:
            ArgumentTypeError: ``model`` does not return a module.
        """
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        module = self.model()
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"model of {self.name} must return an nn.Module, but returned "
                f"{type(module).__name__}"
            )
        return module

    def new_batch(self, batch_size: int) -> Batch:
        """Return a batch of ``batch_size`` samples as ``(args, kwargs, target)``.

        ``args`` and ``kwargs`` are the positional and the keyword arguments of the model.

        Raises:
            ArgumentTypeError: ``make_batch`` returns neither ``(args, kwargs, target)`` nor
                ``(tensor, target)``.
        """
        batch = self.make_batch(batch_size)
        match batch:
            case (torch.Tensor() as argument, target):
                return (argument,), {}, target
            case (tuple() | list() as args, dict() as kwargs, target):
                return tuple(args), kwargs, target
        types = ", ".join(type(item).__name__ for item in batch) if isinstance(batch, tuple) else ""
        raise ArgumentTypeError(
            f"make_batch of {self.name} must return (arguments, keyword arguments, target) or "
            f"(tensor, target), such as ((x,), {{}}, y) or (x, y), but returned "
            f"{type(batch).__name__}{f' of {types}' if types else ''}"
        )


def find_workload(target: str) -> Workload:
    """Return the built-in workload named ``target``, or what the function named ``target`` returns.

    A function is named as ``package.module:function`` or ``folder/file.py:function``.

    Raises:
        ArgumentError: If there is no such workload or function, or the function fails.
        ArgumentTypeError: If the function does not return a ``Workload``.
    """
    if target in BUILT_IN:
        return replace(BUILT_IN[target](), name=target)
    module_name, _, function_name = target.rpartition(":")  # a path may have a colon, too
    if not (module_name and function_name):
        hint = f" (a script? balanced-dp run {target})" if Path(target).is_file() else ""
        raise ArgumentError(
            f"there is no workload {target!r}{hint}; the built-in "
            f"workloads are {', '.join(BUILT_IN)}; name a workload of your own as "
            "package.module:function or file.py:function"
        )
    path = Path(module_name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ArgumentError(f"workload {target!r} cannot be made: {path} is not a file")
        module_name = path.stem
        sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        workload = function() if callable(function) else function
    except (Exception, SystemExit) as error:  # the module is the user's code
        hint = "; to measure a script, use balanced-dp run" * isinstance(error, SystemExit)
        raise ArgumentError(
            f"workload {target!r} cannot be made: {type(error).__name__}: {error}{hint}"
        ) from error
    if not isinstance(workload, Workload):
        raise ArgumentTypeError(
            f"{target} must return a balanced_dp.Workload, but returned {type(workload).__name__}; "
            "to measure a script, use balanced-dp run"
        )
    return replace(workload, name=target) if workload.name == _UNNAMED else workload


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@functools.cache
def encoded_text() -> tuple[torch.Tensor, int]:
    """Return English text as a tensor of character indices, and the number of distinct characters.

    The text has about 0.5 MB. It is the Python language reference, which the module
    ``pydoc_data.topics`` of the standard library contains.
    """
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


def character_batch(starts: torch.Tensor) -> Batch:
    """Return a batch of excerpts of ``encoded_text``, each with 64 characters.

    The target at each position is the next character of the text.

    Args:
        starts: the index of the first character of each excerpt.
    """
    samples = encoded_text()[0][starts[:, None] + torch.arange(65)]
    return (samples[:, :-1],), {}, samples[:, 1:]


def char_lm() -> Workload:
    """Train the demo's transformer on real text, 64 characters a sample."""
    encoded, vocabulary = encoded_text()

    def make_batch(batch_size: int) -> Batch:
        return character_batch(torch.arange(batch_size) * 67 % (len(encoded) - 65))

    sizes = {"width": 128, "num_heads": 4, "num_layers": 4}
    model = functools.partial(TokenTransformer, vocabulary, 64, causal=True, dropout=0.0, **sizes)
    return Workload(model, make_batch, _token_loss)


def gpt2_small() -> Workload:
    """Train GPT-2 small (124M parameters, vocabulary 50257), 256 tokens a sample."""
    return _gpt2(width=768, num_heads=12, num_layers=12)


def gpt2_medium() -> Workload:
    """Train GPT-2 medium (355M parameters, vocabulary 50257), 256 tokens a sample."""
    return replace(_gpt2(width=1024, num_heads=16, num_layers=24), batch_size=16)


def gpt2_large() -> Workload:
    """Train GPT-2 large (774M parameters, vocabulary 50257), 256 tokens a sample."""
    return replace(_gpt2(width=1280, num_heads=20, num_layers=36), batch_size=12)


def _gpt2(**sizes: int) -> Workload:
    def make_batch(batch_size: int) -> Batch:
        # The memory of a training step does not depend on the values of the tokens.
        tokens = torch.arange(batch_size * 257).view(batch_size, 257) % 50257
        return (tokens[:, :-1],), {}, tokens[:, 1:]

    return Workload(lambda: TokenTransformer(50257, 1024, True, **sizes), make_batch, _token_loss)


def bert_base() -> Workload:
    """Train BERT-base as a masked LM (110M parameters, vocabulary 30522), 128 tokens a sample."""

    def make_batch(batch_size: int) -> Batch:
        tokens = torch.arange(batch_size * 128).view(batch_size, 128) % 30522
        labels = tokens.where(torch.arange(128) % 7 == 0, -100)
        return (tokens,), {}, labels

    return Workload(lambda: TokenTransformer(30522, 512, causal=False), make_batch, _token_loss)


BUILT_IN: dict[str, Callable[[], Workload]] = {
    "char-lm": char_lm,
    "gpt2-small": gpt2_small,
    "gpt2-medium": gpt2_medium,
    "gpt2-large": gpt2_large,
    "bert-base": bert_base,
}
"""A dict from the name of each built-in workload to the function that returns the workload."""
