"""Containers in which tests nest tensors."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object
    y: object = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: object
