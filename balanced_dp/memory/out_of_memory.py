"""Recognize out-of-memory errors, find the device that ran out, and add advice to the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..errors import add_note

OUT_OF_MEMORY = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""A ``RuntimeError`` with one of these texts says that a device is out of memory.

If torch's allocator fails, the error is a ``torch.OutOfMemoryError``. But cuBLAS, for example, also
allocates memory without torch's allocator. If cuBLAS fails, the error is a ``RuntimeError``.

Source: the error of the first matrix product on an H100 with 2 MiB of free memory.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that a device is out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    )


def num_ooms(devices: Sequence[torch.device]) -> list[int]:
    """Return, for each device, how often torch's allocator has run out of memory so far."""
    return [torch.get_device_module(d).memory_stats(d).get("num_ooms", 0) for d in devices]


def which_ran_out(devices: Sequence[torch.device], before: Sequence[int]) -> int:
    """Return the index of the device that ran out of memory.

    cuBLAS and cuDNN allocate without torch, so torch's counters do not show their failures. After
    such a failure, the result is the device with the least free memory.

    Args:
        devices: the devices, one of which has run out of memory.
        before: the result of ``num_ooms(devices)`` from before memory ran out.
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
    """Context manager that adds chunk sizes and a remedy to an out-of-memory error of its block.

    Args:
        devices: the devices over which the batch is split.
        chunk_sizes: the chunk size of each device, which is the number of its samples.
        remedy: a function that takes the batch size (the sum of ``chunk_sizes``), and returns the
            remedy as text. It is called only if memory runs out.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            sizes = zip(devices, chunk_sizes, strict=True)
            split = ", ".join(f"{device}: {size}" for device, size in sizes)
            size = sum(chunk_sizes)
            add_note(error, f"the batch of {size} samples was split as {split}; {remedy(size)}")
        raise
