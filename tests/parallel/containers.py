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


@dataclasses.dataclass
class Partly:
    x: object
    later: object = dataclasses.field(init=False, repr=False, compare=False)


class Named(list):
    """A list with an attribute."""

    def __init__(self, values, name):
        super().__init__(values)
        self.name = name

    def __repr__(self):
        return f"Named({list(self)}, {self.name})"


class Titled(dict):
    """A dictionary whose constructor needs an argument."""

    def __init__(self, title, **items):
        super().__init__(items)
        self.title = title

    def __repr__(self):
        return f"Titled({self.title}, {super().__repr__()})"


class MirroredDict(dict):
    """A dictionary whose items are also attributes, as in transformers' ``ModelOutput``."""

    def __init__(self, **kwargs):
        super().__init__(kwargs)
        vars(self).update(kwargs)

    def __repr__(self):
        own = vars(self)
        is_kept = [own[name] is value for name, value in self.items()]
        return f"{type(self)}({super().__repr__()}, {is_kept}, {own is self})"


class AttributeDict(MirroredDict):
    """A dictionary that is its own ``__dict__``, an old recipe to make items attributes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.__dict__ = self
