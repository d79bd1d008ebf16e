"""Define ``Option``: a way to train a batch, with its measurements. Rank options that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..search import Split, utilizations
from ..split import EQUAL, even_share, split_batch

Goal = Literal["speed", "headroom", "batch"]
"""What makes an option (a way to train a batch, with its measurements) the best option.

- ``"speed"``: the device with the most samples has as few samples as possible.
- ``"headroom"``: the fullest device is as little full as possible.
- ``"batch"``: the batch is as large as possible.
"""


def arguments_of(split: Split) -> dict[str, Any]:
    """Return the ``gpu0_bsz`` and ``device_weights`` that give the chunk sizes in ``split``."""
    batch_size, num_devices = sum(split), len(split)
    if split != split_batch(batch_size, num_devices, split[0]):
        return {"gpu0_bsz": None, "device_weights": split}
    is_even = split[0] >= even_share(batch_size, num_devices)
    return {"gpu0_bsz": None if is_even else split[0], "device_weights": None}


@dataclass(frozen=True, slots=True)
class Option:
    """A way to train a batch, and the memory and time measured in a training step.

    The attributes that are tuples have one entry for each device, in the order of the devices.

    Attributes:
        gather: whether outputs are gathered on one device. Otherwise each device computes the loss
            of its own samples.
        spread: whether parameters are spread over all devices. Otherwise device 0 holds all of
            them.
        gpu0_bsz: the maximum number of samples on device 0; None means no limit.
        device_weights: the numbers in proportion to which the batch is split; None if the batch is
            split by ``gpu0_bsz``, or evenly.
        chunk_sizes: the number of samples of each device.
        peak_bytes: the maximum of the allocated bytes of each device during the step. If memory ran
            out, the maximum up to the failure.
        uses: for each device, a dict from each use of memory (such as ``"activation"``) to its
            bytes at the device's peak, as in ``memory_breakdown``. Each dict is empty if memory
            ran out.
        seconds: the wall time of the step, which means nothing on emulated devices; 0 if memory ran
            out.
        out_of_memory: the message of the out-of-memory error; None if memory did not run out.
        ran_out: the index of the device that ran out of memory; None if memory did not run out.
    """

    gather: bool
    spread: bool
    gpu0_bsz: int | None
    device_weights: tuple[int, ...] | None
    chunk_sizes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    uses: tuple[dict[str, int], ...]
    seconds: float
    out_of_memory: str | None = None
    ran_out: int | None = None

    @property
    def batch_size(self) -> int:
        """The number of samples in the whole batch."""
        return sum(self.chunk_sizes)

    @property
    def speed(self) -> float:
        """The relative speed: 1 for the even split, less if a device gets more than its even share.

        All devices wait for the device with the largest chunk. So the speed is the size of the
        largest chunk of the even split, divided by the size of the largest chunk of this option.
        For example, the speed of the split ``(2, 10, 10, 10)`` is 8 / 10.
        """
        return even_share(self.batch_size, len(self.chunk_sizes)) / max(1, *self.chunk_sizes)

    @property
    def samples_per_s(self) -> float:
        """The number of samples per second of wall time; 0 if memory ran out."""
        return self.batch_size / self.seconds if self.seconds and not self.out_of_memory else 0.0

    @property
    def is_even(self) -> bool:
        """Whether the split is that of ``nn.DataParallel``."""
        return self.gpu0_bsz is None and self.device_weights is None

    @property
    def features(self) -> set[str]:
        """The features of this option that ``nn.DataParallel`` lacks, such as ``"spread"``."""
        has = {"split": not self.is_even, "loss on each": not self.gather, "spread": self.spread}
        return {feature for feature, is_there in has.items() if is_there}

    @property
    def kind(self) -> tuple[bool, bool]:
        """``(gather, spread)``. Options of the same kind differ only in the split of the batch."""
        return self.gather, self.spread

    @property
    def arguments(self) -> str:
        """The arguments of ``BalancedDataParallel`` after ``gpu0_bsz`` and the module, as code.

        An example is ``", gather=False"``. The text is empty if there are no further arguments.
        """
        weights = self.device_weights
        given = [] if weights is None else [f"device_weights={list(weights)}"]
        given += ["gather=False"] * (not self.gather) + ["spread=True"] * self.spread
        return "".join(f", {argument}" for argument in given)

    @property
    def line(self) -> str:
        """The code that wraps ``model`` for this option, such as ``"nn.DataParallel(model)"``."""
        if not self.features:
            return "nn.DataParallel(model)"
        return f"BalancedDataParallel({self.gpu0_bsz}, model{self.arguments})"

    def utilization(self, budgets: Sequence[int]) -> float:
        """Return how full the fullest device is: its peak as a fraction of its budget.

        Args:
            budgets: the bytes that each device may hold.
        """
        return max(utilizations(self.peak_bytes, budgets))

    def fits(self, budgets: Sequence[int]) -> bool:
        """Return whether memory did not run out and no device held more than its budget.

        Args:
            budgets: the bytes that each device may hold.
        """
        return self.out_of_memory is None and self.utilization(budgets) <= 1


def largest_batch(option: Option, options: Iterable[Option], budgets: Sequence[int]) -> Option:
    """Return the option with the largest batch among those that fit and have no other features.

    An option is a way to train a batch, with its measurements. ``Option.features`` lists its
    features: an uneven split, the loss on each device, parameters spread over all devices. The
    result has the features of ``option``, or only some of them. The split of ``option`` limits the
    split of the result:

    - If ``option`` has the even split, the result has the even split, too.
    - If ``option`` has a ``gpu0_bsz``, the result may have any ``gpu0_bsz``, or the even split.
    - If ``option`` has ``device_weights``, the result may have any split.

    Args:
        option: the option that limits the features. It is returned if none of ``options``
            qualifies.
        options: the options to choose from.
        budgets: the bytes that each device may hold.
    """
    others = (o for o in options if o.features <= option.features and o.fits(budgets))
    same = (o for o in others if o.device_weights is None or option.device_weights is not None)
    return max(same, key=lambda other: other.batch_size, default=option)


def ranked(
    options: Sequence[Option], batch_size: int, budgets: Sequence[int], goal: Goal
) -> list[Option]:
    """Return the best of the options that fit in memory, in descending order of merit.

    An option is a way to train a batch, with its measurements. The options that fit and have
    ``batch_size`` samples are divided into groups. The options of a group have the same ``gather``
    and ``spread``. They differ only in ``gpu0_bsz``, or only in ``device_weights``. From each
    group, two options are considered:

    - the option with the most samples on device 0. If the options of the group differ only in
      ``gpu0_bsz``, this is the fastest one.
    - the option with the lowest utilization (peak divided by budget) of its fullest device.

    For the goal ``"batch"``, a group contains options of all batch sizes. The even split has a
    group of its own. From each group, only the option with the largest batch is considered.

    An option is left out if a better-ranked option has the same ``Option.features`` or only some of
    them, and is at least as good in each of these respects:

    - the speed, rounded to about one percent,
    - the utilization of the fullest device, rounded to about one percent; not compared for the goal
      ``"batch"``,
    - the batch size of ``largest_batch(option, options, budgets)``.

    Args:
        options: the measured options.
        batch_size: the number of samples in the requested batch.
        budgets: the bytes that each device may hold.
        goal: what makes an option the best.
    """
    kinds: dict[tuple[bool, ...], list[Option]] = {}
    for option in options:
        if option.fits(budgets) and (goal == "batch" or option.batch_size == batch_size):
            is_apart = goal == "batch" and option.is_even
            kind = (*option.kind, option.device_weights is None, is_apart)
            kinds.setdefault(kind, []).append(option)
    candidates: list[Option] = []
    for of_kind in kinds.values():
        if goal == "batch":
            candidates.append(max(of_kind, key=lambda option: option.batch_size))
            continue
        least = min(option.utilization(budgets) for option in of_kind)
        for limit in (1.0, least * (1 + EQUAL)):  # the fastest option, and the least full
            below = (option for option in of_kind if option.utilization(budgets) <= limit)
            candidates.append(max(below, key=lambda option: option.chunk_sizes[0]))

    def merits(option: Option) -> dict[Goal, float]:
        return {
            "speed": -round(option.speed, 2),
            # Rounded to about one percent. For the goal "batch", the utilization does not count,
            # because each option is full at its largest batch.
            "headroom": round(math.log(option.utilization(budgets)), 2) * (goal != "batch"),
            "batch": -largest_batch(option, options, budgets).batch_size,
        }

    def key(option: Option) -> tuple[float, ...]:
        found = merits(option)
        return found.pop(goal), len(option.features), *found.values()

    def exceeds(other: Option, option: Option) -> bool:
        pairs = zip(merits(other).values(), merits(option).values(), strict=True)
        return other.features <= option.features and all(a <= b for a, b in pairs)

    best: list[Option] = []
    for option in sorted(candidates, key=key):
        if not any(exceeds(other, option) for other in best):
            best.append(option)
    return best
