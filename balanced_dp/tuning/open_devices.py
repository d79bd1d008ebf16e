"""The devices that training steps are measured on: accelerators, or emulated ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..devices import resolve_devices
from ..emulation import emulate_devices
from ..errors import ArgumentError
from ..torch_versions import accelerator_count, accelerator_type


@contextmanager
def open_devices(
    num_devices: int,
    *,
    memory: Sequence[int] | int | str | None = None,
    symbolic: bool = True,
    emulate: bool = False,
    as_cuda: bool = False,
) -> Iterator[Sequence[torch.device]]:
    """Yield the machine's accelerators if there are two or more, otherwise emulated devices.

    Args:
        num_devices: number of devices.
        memory: capacity of emulated devices, as in ``emulate_devices``.
        symbolic: whether emulated devices keep shapes only.
        emulate: whether to emulate devices in any case.
        as_cuda: whether emulated devices are named as CUDA's, as in ``emulate_devices``.

    Raises:
        ArgumentError: If there are fewer accelerators, or ``memory`` is given for them.
    """
    check_devices(num_devices, memory, emulate)
    if uses_emulation(emulate):
        # Each replica has a thread: more threads in each operator would only compete with it.
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with emulate_devices(
                num_devices, memory=memory, symbolic=symbolic, as_cuda=as_cuda
            ) as devices:
                yield devices
        finally:
            torch.set_num_threads(num_threads)
        return
    accelerators = resolve_devices(None, accelerator_type())[:num_devices]
    yield accelerators
    torch.get_device_module(accelerators[0]).empty_cache()


def check_devices(num_devices: int, memory: object, emulate: bool) -> None:
    """Raise ArgumentError if ``open_devices`` cannot open these devices."""
    if uses_emulation(emulate):
        return
    count = accelerator_count()
    if num_devices > count:
        raise ArgumentError(
            f"num_devices={num_devices}, but there are {count} accelerators; any number of devices "
            "can be emulated (--emulate)"
        )
    if memory is not None:
        raise ArgumentError(
            f"memory={memory!r} limits emulated devices, but the accelerators of this machine are "
            "used; set emulate (--emulate) or omit memory"
        )


def uses_emulation(emulate: bool) -> bool:
    """Return whether devices are emulated: on request, or without two accelerators."""
    return emulate or accelerator_count() < 2


def default_num_devices(emulate: bool) -> int:
    """Return the number of accelerators of this machine, or 4 if devices are emulated."""
    return 4 if uses_emulation(emulate) else accelerator_count()
