"""Rank the ways to train a batch: the even split, others, weights, and where the loss is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..planning.memory_model import MemoryModel
from ..planning.split_planner import Goal, Planner, utilizations
from ..split import best_gpu0_bsz, even_share, split_batch, split_by_weights
from .measurement import Measurement, by_gpu0_bsz


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
        """Return the relative speed of its split."""
        return relative_speed(self.chunk_sizes)

    @property
    def is_data_parallel(self) -> bool:
        """Return whether ``nn.DataParallel`` does the same."""
        return not self.features

    @property
    def features(self) -> set[str]:
        """Return what of it ``nn.DataParallel`` does not have."""
        is_uneven = self.gpu0_bsz is not None or self.device_weights is not None
        has = {"split": is_uneven, "loss on each device": not self.gather, "spread": self.spread}
        return {feature for feature, is_there in has.items() if is_there}

    @property
    def kind(self) -> tuple[bool, bool, bool, bool]:
        """Return what distinguishes it except for the numbers."""
        return self.gather, self.spread, self.gpu0_bsz is None, self.device_weights is None

    @property
    def line(self) -> str:
        """Return the expression that wraps ``model``."""
        if self.is_data_parallel:
            return "nn.DataParallel(model)"
        arguments = [str(self.gpu0_bsz), "model"]
        if self.device_weights is not None:
            arguments.append(f"device_weights={list(self.device_weights)}")
        arguments += ["gather=False"] * (not self.gather) + ["spread=True"] * self.spread
        return f"BalancedDataParallel({', '.join(arguments)})"

    def utilization(self, budgets: Sequence[int]) -> float:
        """Return the utilization of the bottleneck device."""
        return max(utilizations(self.peak_bytes, budgets))

    def fits(self, budgets: Sequence[int]) -> bool:
        """Return whether no device holds more than its budget."""
        if self.measured is not None:
            return fits(self.measured, budgets)
        return self.utilization(budgets) <= 1


def fits(measured: Measurement, budgets: Sequence[int]) -> bool:
    """Return whether a split ran and no device held more than its budget."""
    return measured.status == "ok" and max(utilizations(measured.peak_bytes, budgets)) <= 1


def relative_speed(chunk_sizes: Sequence[int]) -> float:
    """Return the even chunk over the largest one, which the others wait for; at most 1."""
    return even_share(sum(chunk_sizes), len(chunk_sizes)) / max(chunk_sizes)


def find_options(
    model: MemoryModel,
    measurements: Sequence[Measurement],
    batch_size: int,
    budgets: Sequence[int],
    gather: bool,
    spread: bool,
) -> tuple[Option, ...]:
    """Return the options with the same ``gather`` and ``spread`` that may be the best.

    For the batch these are the even split, and of the measured values of ``gpu0_bsz`` the largest
    that fits and the one with the lowest utilization. All measured weights and other batches are
    added, and the largest batch that is predicted to fit, if it is too large to be measured.
    """
    planner, num_devices = Planner(model, budgets), len(budgets)
    by_split = {m.chunk_sizes: m for m in measurements}

    def is_refuted(sizes: tuple[int, ...]) -> bool:
        return sizes in by_split and not fits(by_split[sizes], budgets)

    def option(
        size: int,
        split: Callable[[int], tuple[int, ...]],
        gpu0_bsz: int | None = None,
        weights: tuple[int, ...] | None = None,
    ) -> Option:
        largest = planner.largest_batch(split)
        while is_refuted(split(largest)):
            largest -= 1
        found = Option(
            gather=gather,
            spread=spread,
            gpu0_bsz=gpu0_bsz,
            device_weights=weights,
            chunk_sizes=split(size),
            predicted_bytes=model.predict(split(size)),
            measured=by_split.get(split(size)),
            max_batch_size=largest,
        )
        # Chunks are whole numbers, so a batch may fit though a smaller one does not.
        return replace(found, max_batch_size=max(largest, size)) if found.fits(budgets) else found

    def with_value(size: int, value: int) -> Option:
        if value >= even_share(size, num_devices):
            return option(size, lambda n: split_batch(n, num_devices, n))
        return option(size, lambda n: split_batch(n, num_devices, value), value)

    def with_weights(weights: tuple[int, ...]) -> Option:
        return option(sum(weights), lambda n: split_by_weights(n, weights), None, weights)

    def found_options() -> Iterator[Option]:
        even = even_share(batch_size, num_devices)
        full = {
            value: max(utilizations(m.peak_bytes, budgets))
            for value, m in by_gpu0_bsz(measurements, batch_size).items()
            if m.status == "ok"
        }
        fitting = [value for value, utilization in full.items() if utilization <= 1]
        for value in {even, best_gpu0_bsz(full), *fitting[-1:]} if full else {even}:
            yield with_value(batch_size, value)
        for measured in measurements:
            if measured.gpu0_bsz is None:
                yield with_weights(measured.chunk_sizes)
            elif measured.batch_size != batch_size:
                yield with_value(measured.batch_size, measured.chunk_sizes[0])
        largest_measured = max((m.batch_size for m in measurements), default=0)
        for choose in (planner.even_share, planner.balanced_gpu0_bsz):
            # It was too large to be measured.
            if (largest := planner.max_batch_size(choose)) > largest_measured:
                yield with_value(largest, choose(largest))

    return tuple({(found.line, found.batch_size): found for found in found_options()}.values())


def ranked(
    options: Iterable[Option], batch_size: int, budgets: Sequence[int], goal: Goal
) -> list[Option]:
    """Return the options that fit, the best first.

    For the goal ``"batch"`` each is for its own largest batch, otherwise for ``batch_size``. An
    option is left out if a better one has no other features and is at least as good in speed,
    utilization (in whole percent) and largest batch.
    """
    candidates = [option for option in options if option.fits(budgets)]
    if goal == "batch":
        # What was measured may not fit though it was predicted to; a smaller batch does.
        ascending = sorted(candidates, key=lambda option: option.batch_size)
        candidates = list({option.kind: option for option in ascending}.values())
    else:
        candidates = [option for option in candidates if option.batch_size == batch_size]

    def merits(option: Option) -> dict[Goal, float]:
        return {
            "speed": -round(option.speed, 2),
            # At their largest batches, all are full.
            "headroom": 0.0 if goal == "batch" else round(option.utilization(budgets), 2),
            "batch": -(option.batch_size if goal == "batch" else option.max_batch_size),
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
