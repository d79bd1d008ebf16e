"""Rank the ways to train a batch: the even split, others, weights, and where the loss is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..planning.memory_model import MemoryModel
from ..planning.split_planner import Goal, Planner, utilizations
from ..split import best_gpu0_bsz, even_share, split_batch, split_by_weights
from .measurement import Measurement


@dataclass(frozen=True, slots=True)
class Option:
    """Describe one way to train a batch.

    Attributes:
        gather: whether outputs are gathered; otherwise the loss is computed on each device.
        spread: whether parameters are spread over all devices.
        gpu0_bsz: the most samples of device 0; None for no limit.
        device_weights: the weight of each device, or None.
        chunk_sizes: the chunk size of each device.
        predicted_bytes: the predicted peak of each device.
        measured: what a step took; None if it was not measured.
        max_batch_size: the largest batch that fits with the same arguments.
    """

    gather: bool
    spread: bool
    gpu0_bsz: int | None
    device_weights: tuple[int, ...] | None
    chunk_sizes: tuple[int, ...]
    predicted_bytes: tuple[int, ...]
    measured: Measurement | None
    max_batch_size: int

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Return the peak of each device, measured if possible."""
        return self.predicted_bytes if self.measured is None else self.measured.peak_bytes

    @property
    def batch_size(self) -> int:
        """Return the number of samples in the whole batch."""
        return sum(self.chunk_sizes)

    @property
    def speed(self) -> float:
        """Return the even chunk over the largest one, which the others wait for; at most 1."""
        return even_share(self.batch_size, len(self.chunk_sizes)) / max(self.chunk_sizes)

    @property
    def is_data_parallel(self) -> bool:
        """Return whether ``nn.DataParallel`` does the same."""
        return self.num_changes == 0

    @property
    def num_changes(self) -> int:
        """Return how many of its features ``nn.DataParallel`` does not have."""
        is_uneven = self.gpu0_bsz is not None or self.device_weights is not None
        return (not self.gather) + self.spread + is_uneven

    @property
    def line(self) -> str:
        """Return the expression that wraps ``model``."""
        if self.is_data_parallel:
            return "nn.DataParallel(model)"
        arguments = [f"gpu0_bsz={self.gpu0_bsz}", "module=model"]
        if self.device_weights is not None:
            arguments.append(f"device_weights={list(self.device_weights)}")
        arguments += ["gather=False"] * (not self.gather) + ["spread=True"] * self.spread
        return f"BalancedDataParallel({', '.join(arguments)})"

    def utilization(self, budgets: Sequence[int]) -> float:
        """Return the utilization of the bottleneck device."""
        return max(utilizations(self.peak_bytes, budgets))

    def fits(self, budgets: Sequence[int]) -> bool:
        """Return whether no device holds more than its budget."""
        ran = self.measured is None or self.measured.status == "ok"
        return ran and self.utilization(budgets) <= 1


def find_options(
    model: MemoryModel,
    measurements: Iterable[Measurement],
    batch_size: int,
    budgets: Sequence[int],
    gather: bool,
    spread: bool,
) -> tuple[Option, ...]:
    """Return the options with the same ``gather`` and ``spread`` that are the best in something.

    For the batch these are the even split, and of the measured values of ``gpu0_bsz`` the largest
    that fits and the one with the lowest utilization. For the largest batch these are the even
    split and the best ``gpu0_bsz``. For both, weights are added if capacities differ.
    """
    planner, num_devices = Planner(model, budgets), len(budgets)
    by_split = {m.chunk_sizes: m for m in measurements}

    def option(
        sizes: tuple[int, ...],
        gpu0_bsz: int | None,
        weights: tuple[int, ...] | None,
        max_batch_size: int,
    ) -> Option:
        needs = model.predict(sizes)
        # Chunks are whole numbers, so a batch may fit though a smaller one does not.
        fits = max(utilizations(needs, budgets)) <= 1
        return Option(
            gather=gather,
            spread=spread,
            gpu0_bsz=gpu0_bsz,
            device_weights=weights,
            chunk_sizes=sizes,
            predicted_bytes=needs,
            measured=by_split.get(sizes),
            max_batch_size=max(max_batch_size, sum(sizes) * fits),
        )

    def with_value(size: int, value: int) -> Option:
        sizes = split_batch(size, num_devices, value)
        if value >= even_share(size, num_devices):
            return option(sizes, None, None, planner.max_batch_size(planner.even_share))
        return option(sizes, value, None, planner.max_batch_size(lambda size: min(size, value)))

    def with_weights(weights: tuple[int, ...]) -> Option:
        largest = planner.largest_batch(lambda size: split_by_weights(size, weights))
        return option(weights, None, weights, largest)

    def found() -> Iterator[Option]:
        even = even_share(batch_size, num_devices)
        full = {
            m.chunk_sizes[0]: max(utilizations(m.peak_bytes, budgets))
            for m in by_split.values()
            if m.batch_size == batch_size and m.gpu0_bsz is not None and m.status == "ok"
        }
        fitting = [value for value, utilization in full.items() if utilization <= 1]
        for value in {even, best_gpu0_bsz(full), *sorted(fitting)[-1:]} if full else {even}:
            yield with_value(batch_size, value)
        for choose in (planner.even_share, planner.balanced_gpu0_bsz):
            if largest := planner.max_batch_size(choose):
                yield with_value(largest, choose(largest))
        if len(set(budgets)) > 1:
            weighted = planner.weighted_split(batch_size)
            yield with_weights(weighted.chunk_sizes)
            if weighted.max_batch_size:
                yield with_weights(weighted.max_batch_chunk_sizes)

    return tuple({(option.line, option.batch_size): option for option in found()}.values())


def ranked(
    options: Iterable[Option], batch_size: int, budgets: Sequence[int], goal: Goal
) -> list[Option]:
    """Return the options that fit, the best first.

    Without those that another one equals or exceeds in speed, utilization in whole percent and
    largest batch with no more changes. For the goal ``"batch"`` each option is for its own largest
    batch, otherwise for ``batch_size``.
    """
    candidates = [
        option
        for option in options
        if option.fits(budgets)
        and option.batch_size == (option.max_batch_size if goal == "batch" else batch_size)
    ]

    def merits(option: Option) -> dict[Goal, float]:
        return {
            "speed": -round(option.speed, 2),
            "headroom": round(option.utilization(budgets), 2) * (goal != "batch"),
            "batch": -option.max_batch_size,
        }

    def key(option: Option) -> tuple[float, ...]:
        found = merits(option)
        return found.pop(goal), option.num_changes, *found.values()

    def exceeds(other: Option, option: Option) -> bool:
        pairs = zip(merits(other).values(), merits(option).values(), strict=True)
        return other.num_changes <= option.num_changes and all(a <= b for a, b in pairs)

    best: list[Option] = []
    for option in sorted(candidates, key=key):
        if not any(exceeds(other, option) for other in best):
            best.append(option)
    return best
