"""How earlier ways cut a batch: batch size -> chunk sizes, said again in our words.

Written from what is known of their behaviour, to compare with ours. Devices that get nothing have
no chunk.
"""

from __future__ import annotations

from collections.abc import Sequence


def even(batch_size: int, num_devices: int) -> tuple[int, ...]:
    """The rule of ``torch.chunk``, so of ``nn.DataParallel``, its function, PyTorch-Encoding's
    ``DataParallelModel`` and Hugging Face's ``Trainer``: shares rounded up, as far as they go.
    """
    share = -(-batch_size // num_devices)
    starts = range(0, batch_size, share or 1)
    return tuple(min(share, batch_size - start) for start in starts)


def others_evenly(batch_size: int, num_devices: int, first: int) -> tuple[int, ...]:
    """The rule of CenterNet's ``master_batch_size``, which makes a list of fixed chunks: what the
    first does not get is shared by the others, the larger chunks first.
    """
    share, extra = divmod(batch_size - first, num_devices - 1)
    return (first, *(share + 1 for _ in range(extra)), *[share] * (num_devices - 1 - extra))


def transformer_xl(batch_size: int, num_devices: int, gpu0_bsz: int) -> tuple[int, ...]:
    """The rule of Transformer-XL's ``BalancedDataParallel``: even, unless the others' share,
    rounded down, is larger than ``gpu0_bsz``. With one device it divides by zero.
    """
    if (batch_size - gpu0_bsz) // (num_devices - 1) <= gpu0_bsz:
        return even(batch_size, num_devices)
    return others_evenly(batch_size, num_devices, gpu0_bsz)


def balanced_repository(batch_size: int, num_devices: int, gpu0_bsz: int) -> tuple[int, ...]:
    """The rule of the repository Balanced-DataParallel: Transformer-XL's. With 0 for the first
    device its chunk is left out, and the others' are those of the devices after it.
    """
    chunk_sizes = transformer_xl(batch_size, num_devices, gpu0_bsz)
    return chunk_sizes if chunk_sizes[:1] != (0,) else chunk_sizes[1:]


def fixed(batch_size: int, chunk_sizes: Sequence[int]) -> tuple[int, ...]:
    """The rule of CornerNet's and CenterNet's ``DataParallel``: a list, for one batch size.

    Raises:
        ValueError: the batch is of another size.
    """
    if batch_size != sum(chunk_sizes):
        raise ValueError(f"chunks of {sum(chunk_sizes)} samples do not fit a batch of {batch_size}")
    return tuple(chunk_sizes)


def unweighted_mean(losses: Sequence[float]) -> float:
    """What PyTorch-Encoding, CornerNet, CenterNet and recipes for the balanced forks make of one
    loss for each device.
    """
    return sum(losses) / len(losses)
