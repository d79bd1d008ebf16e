"""A measured way to train a batch, and the choice of the best one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..search import Split, utilizations
from ..split import EQUAL, even_share, split_batch

Goal = Literal["speed", "headroom", "batch"]
"""What makes an option the best.

In the order above: the smallest largest chunk, the lowest utilization, or the largest batch.
"""


def arguments_of(split: Split) -> dict[str, Any]:
    """Return the ``gpu0_bsz`` and ``device_weights`` that split a batch into these chunks."""
    batch_size, num_devices = sum(split), len(split)
    if split != split_batch(batch_size, num_devices, split[0]):
        return {"gpu0_bsz": None, "device_weights": split}
    is_even = split[0] >= even_share(batch_size, num_devices)
    return {"gpu0_bsz": None if is_even else split[0], "device_weights": None}


@dataclass(frozen=True, slots=True)
class Option:
    """A measured way to train a batch. Tuples are in the order of the devices.

    Attributes:
        gather: whether outputs are gathered; otherwise the loss is computed on each device.
        spread: whether parameters are spread over all devices.
        gpu0_bsz: maximum chunk size of device 0; None for no limit.
        device_weights: the weight of each device, or None.
        chunk_sizes: the chunk size of each device.
        peak_bytes: the peak of allocated bytes of each device, up to the failure if memory ran out.
        uses: bytes of each device at its peak, by use, as in ``memory_breakdown``.
        seconds: wall time of the step, which means nothing on emulated devices.
        out_of_memory: the message of the error if memory ran out, or None.
        ran_out: the index of the device that ran out of memory, or None.
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
        """The even chunk divided by the largest chunk, for which all devices wait; at most 1."""
        return even_share(self.batch_size, len(self.chunk_sizes)) / max(1, *self.chunk_sizes)

    @property
    def samples_per_s(self) -> float:
        """The samples per second of wall time, 0 if memory ran out."""
        return self.batch_size / self.seconds if self.seconds and not self.out_of_memory else 0.0

    @property
    def is_even(self) -> bool:
        """Whether the split is that of ``nn.DataParallel``."""
        return self.gpu0_bsz is None and self.device_weights is None

    @property
    def features(self) -> set[str]:
        """The features of this option that ``nn.DataParallel`` does not have."""
        has = {"split": not self.is_even, "loss on each": not self.gather, "spread": self.spread}
        return {feature for feature, is_there in has.items() if is_there}

    @property
    def kind(self) -> tuple[bool, bool]:
        """The arguments that a search does not change: ``gather`` and ``spread``."""
        return self.gather, self.spread

    @property
    def arguments(self) -> str:
        """The arguments of ``BalancedDataParallel`` after ``gpu0_bsz`` and the module."""
        weights = self.device_weights
        given = [] if weights is None else [f"device_weights={list(weights)}"]
        given += ["gather=False"] * (not self.gather) + ["spread=True"] * self.spread
        return "".join(f", {argument}" for argument in given)

    @property
    def line(self) -> str:
        """The expression that wraps ``model``."""
        if not self.features:
            return "nn.DataParallel(model)"
        return f"BalancedDataParallel({self.gpu0_bsz}, model{self.arguments})"

    def utilization(self, budgets: Sequence[int]) -> float:
        """Return the utilization of the bottleneck device."""
        return max(utilizations(self.peak_bytes, budgets))

    def fits(self, budgets: Sequence[int]) -> bool:
        """Return whether the option ran and no device held more than its budget."""
        return self.out_of_memory is None and self.utilization(budgets) <= 1


def largest_batch(option: Option, options: Iterable[Option], budgets: Sequence[int]) -> Option:
    """Return the option with the largest batch that fits, without features that ``option`` lacks.

    ``gpu0_bsz`` may differ from that of ``option``. The even split is allowed, too, and so is
    ``gpu0_bsz`` in place of weights.
    """
    others = (o for o in options if o.features <= option.features and o.fits(budgets))
    same = (o for o in others if o.device_weights is None or option.device_weights is not None)
    return max(same, key=lambda other: other.batch_size, default=option)


def ranked(
    options: Sequence[Option], batch_size: int, budgets: Sequence[int], goal: Goal
) -> list[Option]:
    """Return the options that fit, the best first.

    Of options that differ only in ``gpu0_bsz``, or only in the weights, the fastest and the least
    full with ``batch_size`` samples are considered, or for the goal ``"batch"`` the one with the
    largest batch. An option is left out if a better one has no additional features and is at
    least as good in speed, utilization (to one percent) and largest batch.
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
        for limit in (1.0, least * (1 + EQUAL)):  # the fastest, and the least full
            below = (option for option in of_kind if option.utilization(budgets) <= limit)
            found = max(below, key=lambda option: option.chunk_sizes[0])
            candidates += [found] * (found not in candidates)

    def merits(option: Option) -> dict[Goal, float]:
        return {
            "speed": -round(option.speed, 2),
            # Compared to one percent. At their largest batches, all options are full.
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
