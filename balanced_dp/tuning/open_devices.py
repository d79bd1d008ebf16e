"""The devices that training steps are measured on: accelerators, or emulated ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..devices import resolve_devices
from ..emulation import emulate_devices
from ..errors import ArgumentError
from ..torch_versions import accelerator_type


def accelerators(num_devices: int | None = None, emulate: bool = False) -> list[torch.device]:
    """Return the machine's accelerators to measure on.

    There are none to emulate devices: on request, or if the machine has fewer than two.

    Args:
        num_devices: the number of devices; None means all.
        emulate: whether to emulate devices in any case.

    Raises:
        ArgumentError: there are fewer accelerators.
    """
    found = [] if emulate else resolve_devices(None, accelerator_type())
    if len(found) < 2:
        return []
    if num_devices is not None and num_devices > len(found):
        raise ArgumentError(
            f"num_devices={num_devices}, but there are {len(found)} accelerators; any number of "
            "devices can be emulated (--emulate)"
        )
    return found[:num_devices]


@contextmanager
def open_devices(
    num_devices: int | None = None,
    *,
    memory: Sequence[int] | int | str | None = None,
    symbolic: bool = True,
    emulate: bool = False,
    as_cuda: bool = False,
) -> Iterator[Sequence[torch.device]]:
    """Yield the machine's accelerators if there are two or more, otherwise emulated devices.

    Args:
        num_devices: number of devices; None means all accelerators, or four emulated devices.
        memory: capacity of emulated devices, as in ``emulate_devices``.
        symbolic: whether emulated devices keep shapes only.
        emulate: whether to emulate devices in any case.
        as_cuda: whether emulated devices are named as CUDA's, as in ``emulate_devices``.

    Raises:
        ArgumentError: If there are fewer accelerators, or ``memory`` is given for them.
    """
    if found := accelerators(num_devices, emulate):
        if memory is not None:
            raise ArgumentError(
                f"memory={memory!r} limits emulated devices, but the accelerators of this machine "
                "are used; set emulate (--emulate) or omit memory"
            )
        yield found
        torch.get_device_module(found[0]).empty_cache()
        return
    # Each replica has a thread: more threads in each operator would only compete with it.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        num = 4 if num_devices is None else num_devices
        with emulate_devices(num, memory=memory, symbolic=symbolic, as_cuda=as_cuda) as devices:
            yield devices
    finally:
        torch.set_num_threads(num_threads)
