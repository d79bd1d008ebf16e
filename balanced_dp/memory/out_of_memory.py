"""Tell whether memory ran out and on which device, and add the remedy to the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..errors import add_note

OUT_OF_MEMORY = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""Messages of RuntimeErrors about failed allocations outside of torch's allocator, as by cuBLAS.

Source: the first matrix product on an H100 with 2 MiB of free memory.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that a device is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    )


def num_ooms(devices: Sequence[torch.device]) -> list[int]:
    """Return how often torch's allocator of each device ran out of memory."""
    return [torch.get_device_module(d).memory_stats(d).get("num_ooms", 0) for d in devices]


def which_ran_out(devices: Sequence[torch.device], before: Sequence[int]) -> int:
    """Return the index of the device that ran out of memory.

    cuBLAS and cuDNN allocate without torch, so torch's counters do not show their failures. After
    such a failure, the result is the device with the least free memory.

    Args:
        devices: the devices.
        before: the earlier result of ``num_ooms``.
    """
    ran_out = [now > count for count, now in zip(before, num_ooms(devices), strict=True)]
    if any(ran_out):
        return ran_out.index(True)
    free_bytes = [torch.get_device_module(device).mem_get_info(device)[0] for device in devices]
    return free_bytes.index(min(free_bytes))


@contextmanager
def advising(
    devices: Sequence[torch.device], chunk_sizes: Sequence[int], remedy: Callable[[int], str]
) -> Iterator[None]:
    """Add the split and the remedy to an out-of-memory error of a ``with`` block.

    Args:
        devices: the devices that share the batch.
        chunk_sizes: the chunk size of each device.
        remedy: returns the remedy for a batch size. It is called when memory runs out.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            sizes = zip(devices, chunk_sizes, strict=True)
            split = ", ".join(f"{device}: {size}" for device, size in sizes)
            size = sum(chunk_sizes)
            add_note(error, f"the batch of {size} was split {split}; {remedy(size)}")
        raise
