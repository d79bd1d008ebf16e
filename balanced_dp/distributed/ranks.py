"""Split batches over ranks: the chunk size of each rank, and a batch sampler for the chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

from ..errors import ArgumentError
from ..parallel.nested import leaves, replaced
from ..split import as_integer, split_batch, split_by_weights

_ORDER = ("num_samples", "shuffle", "seed")
"""Attributes of a ``BalancedBatchSampler`` that, with the epoch, determine the order of samples."""


def split_ranks(
    batch_size: int,
    world_size: int | None = None,
    *,
    rank0_bsz: int | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return the chunk size (number of samples) of each rank; the sum is ``batch_size``.

    With ``rank0_bsz`` alone, rank 0 gets at most ``rank0_bsz`` samples, and the rest is divided
    evenly over the other ranks. With ``weights``, chunk sizes are in proportion to the weights.
    Together with ``weights``, ``rank0_bsz`` is a limit: if rank 0 would get more samples, it gets
    ``rank0_bsz``, and the rest is divided over the other ranks in proportion.

    If the devices have different memory, the weight of a rank is the memory that its device has
    left for samples. To find out how many bytes a rank needs without samples, measure the peaks of
    two chunk sizes with ``balanced_dp.tuning.step.measure_step`` on one emulated device, and
    extrapolate to 0 samples. Then add what the emulated device does not count: the buckets of
    ``DistributedDataParallel``, which are as large as the gradients, and the CUDA context.

    Examples:
        >>> split_ranks(32, 4, rank0_bsz=2)
        (2, 10, 10, 10)
        >>> split_ranks(32, weights=[24 - 3, 11 - 3, 11 - 3])  # GiB, without the fixed 3 GiB
        (18, 7, 7)

    Args:
        batch_size: number of samples in the whole batch, at least 0.
        world_size: number of ranks. The default is the number of weights or, without weights, the
            size of the default process group.
        rank0_bsz: maximum chunk size of rank 0, at least 0.
        weights: one number for each rank, at least 0 and not all 0.

    Raises:
        ArgumentError: in each of these cases:

            - An argument is out of range, or ``weights`` are not numbers.
            - Both ``rank0_bsz`` and ``weights`` are missing.
            - The number of weights is not ``world_size``.
            - ``rank0_bsz`` leaves samples for the other ranks, but their weights are all 0.

        ArgumentTypeError: an argument other than ``weights`` is not an integer.
        ValueError: both ``world_size`` and ``weights`` are missing, and there is no process group.
    """
    if weights is None:
        if rank0_bsz is None:
            raise ArgumentError("give rank0_bsz or weights to determine the split")
        rank0_bsz = as_integer("rank0_bsz", rank0_bsz, minimum=0)
        world_size = dist.get_world_size() if world_size is None else world_size
        return split_batch(batch_size, world_size, rank0_bsz)
    if world_size is not None and world_size != len(weights):
        raise ArgumentError(
            f"world_size={world_size}, but weights are given for {len(weights)} ranks"
        )
    return split_by_weights(batch_size, weights, rank0_bsz)


class BalancedBatchSampler(Sampler[list[int]]):
    """A batch sampler for one rank, which yields ``chunk_sizes[rank]`` indices of each batch.

    Use it as the ``batch_sampler`` of a ``DataLoader``. In each epoch, every sample is yielded
    exactly once over all ranks. A smaller last batch is split in the same proportion. With
    ``drop_last``, it is dropped instead. All ranks have the same number of batches.

    A rank whose chunk of a batch is empty gets an empty list. Even if all ``chunk_sizes`` are above
    0, a small last batch may have empty chunks. So use ``EmptyBatches`` as the ``collate_fn`` of
    the ``DataLoader``.

    Examples:
        >>> samplers = [
        ...     BalancedBatchSampler(range(10), 4, (1, 3), rank=rank, world_size=2, shuffle=False)
        ...     for rank in range(2)
        ... ]
        >>> [list(sampler) for sampler in samplers]
        [[[0], [4], []], [[1, 2, 3], [5, 6, 7], [8, 9]]]

    Args:
        dataset: the dataset to sample from; only its length is used.
        batch_size: number of samples in the whole batch, at least 1.
        chunk_sizes: the chunk size of each rank, from ``split_ranks``.
        rank: the rank of this process; by default its rank in the default process group. If
            ``world_size`` is given, ``rank`` must be given, too.
        world_size: number of ranks; by default that of the default process group.
        shuffle: whether to shuffle the samples in each epoch.
        seed: seed of the shuffling, which must be the same on all ranks. The order of the samples
            in an epoch is that of ``torch.randperm`` with the seed ``seed + epoch``, as in
            ``DistributedSampler``.
        drop_last: whether to drop a smaller last batch.

    Attributes:
        epoch: the epoch of the next pass over the sampler. It is 0 at first, and is set by
            ``set_epoch`` and ``load_state_dict``.

    Raises:
        ArgumentError: a number is out of range, ``chunk_sizes`` does not have one size for each
            rank, or the sum of ``chunk_sizes`` is not ``batch_size``.
        ArgumentTypeError: ``batch_size``, a chunk size or ``rank`` is not an integer, or ``rank``
            is missing although ``world_size`` is given.
        ValueError: ``world_size`` is not given, and there is no process group.
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
        if world_size is None:
            world_size = dist.get_world_size()
            rank = dist.get_rank() if rank is None else rank
        self.world_size = world_size
        self.rank = as_integer("rank", rank)
        self.num_samples = len(dataset)
        self.batch_size = as_integer("batch_size", batch_size, minimum=1)
        self.chunk_sizes = tuple(as_integer("a chunk size", n, minimum=0) for n in chunk_sizes)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        if not 0 <= self.rank < self.world_size:
            raise ArgumentError(f"rank must be from 0 to {world_size - 1}, got {self.rank}")
        found = len(self.chunk_sizes), sum(self.chunk_sizes)
        if found != (self.world_size, self.batch_size):
            raise ArgumentError(
                f"chunk_sizes must be {world_size} sizes, one for each rank, with the sum "
                f"batch_size={batch_size}, got {found[0]} sizes with the sum {found[1]}"
            )
        self.epoch = 0
        # A pass that resumes skips the first samples of its epoch. The current pass skips _start
        # samples, and the next pass skips _next_start samples. The current pass has yielded
        # _num_yielded batches.
        self._next_start = self._start = self._num_yielded = 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which is the same on all ranks."""
        rounded_up = 0 if self.drop_last else self.batch_size - 1
        return (self.num_samples + rounded_up) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        # This method is a generator, so that the attributes do not change before the first batch is
        # requested. So an iterator that a DataLoader with workers creates, but never uses, changes
        # no attributes.
        self._start, self._next_start = self._next_start, 0
        self._num_yielded = 0
        order = torch.arange(self.num_samples, device="cpu")  # not on the default device
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator, device="cpu")
        end = self.num_samples - (self.batch_size - 1 if self.drop_last else 0)
        for start in range(self._start, end, self.batch_size):
            batch, sizes = order[start : start + self.batch_size], self.chunk_sizes
            if len(batch) < self.batch_size:
                sizes = split_by_weights(len(batch), sizes)
            self._num_yielded += 1
            yield batch.split(list(sizes))[self.rank].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines the order of the samples.

        Call this method before each epoch, with the same epoch on all ranks. If a state of this
        epoch was loaded by ``load_state_dict``, the next pass resumes at the position in that
        state. If not, the next pass begins with the first batch.
        """
        if epoch != self.epoch:
            self._next_start = self._start = self._num_yielded = 0
        self.epoch = epoch

    def state_dict(self, num_batches: int | None = None) -> dict[str, int | bool]:
        """Return the sampler's position in the epoch as a dict, which is the same on all ranks.

        The position is the number of samples that all ranks together have used. So the state can be
        loaded with another number of ranks, other chunk sizes and another batch size.

        Args:
            num_batches: number of batches that the training loop has used in the current pass over
                the ``DataLoader``, as counted by ``enumerate(loader, 1)``. In a resumed pass,
                batches from before the resumption do not count. The default is the number of
                batches that the sampler has yielded in the current pass. This default is too high
                for a ``DataLoader`` with workers, since workers fetch batches in advance.

        Raises:
            ArgumentError: ``num_batches`` is negative, or higher than the number of batches that
                the sampler has yielded in the current pass.
        """
        if num_batches is None:
            num_batches = self._num_yielded
        if not 0 <= num_batches <= self._num_yielded:
            raise ArgumentError(
                f"num_batches must be from 0 to {self._num_yielded}, the number of batches that "
                f"this iteration has yielded, got {num_batches}"
            )
        done = self._start + num_batches * self.batch_size
        position = {"epoch": self.epoch, "num_samples_done": min(self.num_samples, done)}
        return position | {name: getattr(self, name) for name in _ORDER}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, so that the next pass resumes at the position of the state.

        Args:
            state: a result of ``state_dict``.

        Raises:
            ArgumentError: the state is of a sampler with another number of samples, another
                ``shuffle`` or another ``seed``.
        """
        for name in _ORDER:
            if state[name] != getattr(self, name):
                raise ArgumentError(
                    f"the state was saved with {name}={state[name]}, but this sampler has "
                    f"{name}={getattr(self, name)}; load it into a sampler with "
                    f"{name}={state[name]}, or begin a new epoch without loading the state"
                )
        self.epoch = state["epoch"]
        self._next_start = self._start = state["num_samples_done"]
        self._num_yielded = 0


@dataclass(repr=False, eq=False)
class EmptyBatches:
    """A ``collate_fn`` that also makes batches without samples, for ranks with empty chunks.

    An empty batch is made from a batch of the dataset's first sample, by cutting the tensors to
    size 0 in dimension 0. The dtypes and the other sizes of the tensors do not change. 0-dim
    tensors, and objects that are not tensors, do not change at all.

    Examples:
        >>> loader = torch.utils.data.DataLoader(
        ...     range(3), batch_sampler=[[0, 1], [], [2]], collate_fn=EmptyBatches(range(3))
        ... )
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [], [2]]

    Args:
        dataset: the dataset of the samples.
        collate_fn: the function that makes a batch from a list of samples.
    """

    dataset: Dataset[Any] | Sequence[Any]
    collate_fn: Callable[..., Any] = default_collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return a batch of ``samples``, which may be an empty list."""
        if samples:
            return self.collate_fn(samples)
        batch = self.collate_fn([self.dataset[0]])
        tensors = (pair for pair in leaves(batch) if isinstance(pair[1], Tensor))
        return replaced(batch, {path: tensor[:0] for path, tensor in tensors if tensor.dim()})
