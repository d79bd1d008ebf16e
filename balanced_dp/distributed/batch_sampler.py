"""Which samples each rank gets: every one once an epoch, in shares of unlike size."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from ..errors import ArgumentError
from ..parallel.nested import items, rebuild
from ..split import as_integer, split_by_weights
from .ranks import num_ranks


class BalancedBatchSampler(Sampler[list[int]]):
    """Batches of indices for one rank, whose share of each batch is ``chunk_sizes[rank]``.

    It is the ``batch_sampler`` of a ``DataLoader``, with workers or without. Over all ranks every
    sample comes exactly once an epoch: the last batch, if it is smaller, is split in the same
    proportion, without repeating or dropping any (but for ``drop_last``). All ranks have the same
    number of batches. A rank whose share of one is 0 gets an empty list; give the ``DataLoader``
    ``EmptyBatches``, which makes a batch of it, since a small last batch has such shares, too.

    Examples:
        >>> samplers = [
        ...     BalancedBatchSampler(range(10), 4, (1, 3), rank=rank, world_size=2, shuffle=False)
        ...     for rank in range(2)
        ... ]
        >>> [list(sampler) for sampler in samplers]
        [[[0], [4], []], [[1, 2, 3], [5, 6, 7], [8, 9]]]

    Args:
        dataset: what is sampled; only its length is asked for.
        batch_size: samples in the whole batch, at least 1.
        chunk_sizes: how many of them each rank gets, as of ``split_ranks``.
        rank: whose samples these are; by default, without ``world_size``, that of the default
            process group.
        world_size: how many ranks there are; by default those of the default process group.
        shuffle: whether each epoch has an order of its own.
        seed: chooses the orders, the same on all ranks; that of an epoch is ``torch.randperm``'s of
            ``seed + epoch``, as in ``DistributedSampler``.
        drop_last: whether a smaller last batch is left out.

    Attributes:
        epoch: the epoch of the next iteration; ``set_epoch`` sets it.

    Raises:
        ArgumentError: an argument is out of its range, or the chunks are not those of the batch.
        ArgumentTypeError: an argument is not of its type.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        chunk_sizes: Sequence[int],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.world_size = as_integer("world_size", num_ranks(world_size), minimum=1)
        is_known = rank is not None or world_size is not None
        self.rank = as_integer("rank", rank if is_known else dist.get_rank())
        self.num_samples = len(dataset)
        self.batch_size = as_integer("batch_size", batch_size, minimum=1)
        self.chunk_sizes = tuple(as_integer("chunk_sizes", size, 0) for size in chunk_sizes)
        self.shuffle = shuffle
        self.seed = as_integer("seed", seed)
        self.drop_last = drop_last
        if not 0 <= self.rank < self.world_size:
            raise ArgumentError(
                f"rank must be from 0 to {self.world_size - 1} of world_size={self.world_size}, "
                f"got {self.rank}"
            )
        if len(self.chunk_sizes) != self.world_size:
            raise ArgumentError(
                f"chunk_sizes must be one for each of {self.world_size} ranks, "
                f"got {len(self.chunk_sizes)}"
            )
        if sum(self.chunk_sizes) != self.batch_size:
            raise ArgumentError(
                f"chunk_sizes must add up to batch_size={self.batch_size}, got "
                f"{reprlib.repr(self.chunk_sizes)}, in all {sum(self.chunk_sizes)}"
            )
        self.epoch = 0
        self._first = 0  # sample of the order with which the next iteration begins
        self._began = 0  # and that with which the last one began
        self._num_handed_out = 0  # batches of the last one

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, the same on each rank."""
        rounded_up = 0 if self.drop_last else self.batch_size - 1
        return (self.num_samples + rounded_up) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # From the first batch on: a DataLoader with workers makes an iterator that it never uses.
        self._began, self._first = self._first, 0
        self._num_handed_out = 0
        for batch in self._batches(self._began):
            self._num_handed_out += 1
            yield batch

    def _batches(self, first: int) -> Iterator[list[int]]:
        """Yields the batches of this rank, from a sample of the order on."""
        order = torch.arange(self.num_samples, device="cpu")  # whatever the default device is
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator, device="cpu")
        for start in range(first, self.num_samples, self.batch_size):
            batch, sizes = order[start : start + self.batch_size], self.chunk_sizes
            if len(batch) < self.batch_size:
                if self.drop_last:
                    return
                sizes = split_by_weights(len(batch), sizes)
            yield batch.split(list(sizes))[self.rank].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration; the same on all ranks, before each epoch.

        For the epoch of a state that was loaded, the iteration goes on where that was; any other
        begins with its first batch.
        """
        epoch = as_integer("epoch", epoch)
        if epoch != self.epoch:
            self._first = self._began = self._num_handed_out = 0
        self.epoch = epoch

    def state_dict(self, num_batches: int | None = None) -> dict[str, int | bool]:
        """Return how far this epoch has come; it is the same on all ranks.

        It counts samples of the whole batch, so it can be loaded with other ranks, shares and
        batch sizes.

        Args:
            num_batches: how many batches training has done since this iteration began, as of
                ``enumerate(loader, 1)``; after a resumption it counts from there. By default those
                that were handed out, which is wrong for a ``DataLoader`` with workers: they are
                handed batches in advance.

        Raises:
            ArgumentError: more batches than were handed out.
        """
        if num_batches is None:
            num_batches = self._num_handed_out
        num_batches = as_integer("num_batches", num_batches)
        if not 0 <= num_batches <= self._num_handed_out:
            raise ArgumentError(
                f"num_batches must be from 0 to {self._num_handed_out}, the batches that this "
                f"iteration has handed out, got {num_batches}"
            )
        done = self._began + num_batches * self.batch_size
        return {
            "epoch": self.epoch,
            "num_samples_done": min(self.num_samples, done),
            "num_samples": self.num_samples,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration where the state's stopped.

        Args:
            state: of ``state_dict``.

        Raises:
            ArgumentError: it is of another dataset or order, or no such state.
            ArgumentTypeError: a number in it is none.
        """
        names = {"epoch", "num_samples_done", "num_samples", "shuffle", "seed"}
        if not names <= set(state):
            raise ArgumentError(f"the state has no {', '.join(sorted(names - set(state)))}")
        for name in ("num_samples", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise ArgumentError(
                    f"the state is of a sampler with {name}={state[name]}, this one has "
                    f"{name}={getattr(self, name)}: its samples would not be the ones that are left"
                )
        done = as_integer("num_samples_done", state["num_samples_done"], minimum=0)
        self.epoch = as_integer("epoch", state["epoch"])
        self._first = self._began = min(done, self.num_samples)
        self._num_handed_out = 0


@dataclass(repr=False, eq=False)
class EmptyBatches:
    """A ``collate_fn`` that also makes batches of no samples, for ranks without a share.

    Their tensors have no rows, and the other dimensions and the dtypes of a batch of the dataset's
    first sample; what is no tensor is that batch's.

    Examples:
        >>> loader = torch.utils.data.DataLoader(
        ...     range(3), batch_sampler=[[0, 1], [], [2]], collate_fn=EmptyBatches(range(3))
        ... )
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [], [2]]

    Args:
        dataset: whose samples are collated.
        collate_fn: makes a batch of samples.
    """

    dataset: Dataset[Any] | Sequence[Any]
    collate_fn: Callable[..., Any] = default_collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch of the samples."""
        if samples:
            return self.collate_fn(samples)
        return _without_rows(self.collate_fn([self.dataset[0]]))


def _without_rows(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    named = items(batch)
    if named is None:
        return batch
    return rebuild(batch, [_without_rows(value) for _, value in named])
