"""Running each replica on its chunk, in one thread for each device."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def parallel_apply(
    calls: Sequence[Callable[[], Any]],
    devices: Sequence[torch.device],
    describe: Callable[[int], str],
) -> list[Any]:
    """Runs ``calls[i]`` with ``devices[i]`` current and returns the results.

    Each device has a thread, and calls on one device run in it one after another: they share its
    random number generator, which activation checkpointing rewinds. Calls that are all on one
    device run in the calling thread.

    The threads have what torch keeps for each thread of its own as the caller has it: grad mode,
    inference mode, autocast (device type, dtype and cache setting) and the current stream of each
    device; and the caller's context variables.

    Args:
        calls: what to run.
        devices: one for each call; a device may repeat.
        describe: gives the note that is added to the exception of call ``i``.

    Raises:
        BaseException: what the first of the failed calls raised, itself, when all have ended.
        KeyboardInterrupt: when all have ended; a second one does not wait for them.
    """
    state = ThreadState.of_caller(devices)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    indices: dict[torch.device, list[int]] = {}
    for index, device in enumerate(devices):
        indices.setdefault(device, []).append(index)
    if len(indices) == 1:
        _work(range(len(calls)), calls, devices[0], state, results, errors)
    else:
        threads = [
            threading.Thread(
                # Each thread runs in its own copy: a context cannot be entered twice at a time.
                target=contextvars.copy_context().run,
                args=(_work, on_device, calls, device, state, results, errors),
                name=f"replicas on {device}",
            )
            for device, on_device in indices.items()
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:  # the replicas still work on the caller's tensors
            for thread in threads:
                if thread.ident is not None:  # it has started
                    thread.join()
            raise
    if errors:
        index = min(errors)
        error = errors[index]
        add_note(error, describe(index))
        try:
            raise error
        finally:
            # The traceback holds this frame and the worker's, so these must not hold the error:
            # memory of the failed calls would wait for the garbage collector.
            errors.clear()
            results.clear()
            del error
    return [results[index] for index in range(len(calls))]


def _work(
    indices: Sequence[int],
    calls: Sequence[Callable[[], Any]],
    device: torch.device,
    state: ThreadState,
    results: dict[int, Any],
    errors: dict[int, BaseException],
) -> None:
    for index in indices:
        try:
            with state.restored(device):
                results[index] = calls[index]()
        except BaseException as error:
            errors[index] = error
            return


def describe_replicas(
    devices: Sequence[torch.device], chunk_sizes: Sequence[int] | None
) -> Callable[[int], str]:
    """Returns a function of the index of a replica, which says where it is and what it has."""

    def describe(index: int) -> str:
        where = f"in replica {index} on {devices[index]}"
        if chunk_sizes is None:
            return where
        return f"{where}, with {chunk_sizes[index]} of the batch's {sum(chunk_sizes)} samples"

    return describe


@dataclass(frozen=True, slots=True)
class ThreadState:
    """What torch keeps for each thread, to be carried from one to another."""

    grad_enabled: bool
    inference_mode: bool
    autocasts: list[dict[str, Any]]
    streams: dict[torch.device, torch.Stream]

    @classmethod
    def of_caller(cls, devices: Sequence[torch.device]) -> ThreadState:
        """Returns the state of the calling thread, as far as it concerns ``devices``."""
        types = {"cpu", *(device.type for device in devices)}
        accelerator = torch.accelerator.current_accelerator()
        return cls(
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocasts=[
                {
                    "device_type": device_type,
                    "dtype": torch.get_autocast_dtype(device_type),
                    "cache_enabled": torch.is_autocast_cache_enabled(),
                }
                for device_type in types
                if torch.amp.is_autocast_available(device_type)
                and torch.is_autocast_enabled(device_type)
            ],
            streams={
                device: torch.accelerator.current_stream(device)
                for device in devices
                if accelerator is not None and device.type == accelerator.type
            },
        )

    @contextlib.contextmanager
    def restored(self, device: torch.device) -> Iterator[None]:
        """Gives the thread this state, with ``device`` as the current one."""
        module = torch.get_device_module(device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference_mode))
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for autocast in self.autocasts:
                stack.enter_context(torch.autocast(**autocast))
            if hasattr(module, "device"):  # the CPU has no current device
                stack.enter_context(module.device(device))
            if device in self.streams:
                stack.enter_context(self.streams[device])
            yield


def add_note(error: BaseException, note: str) -> None:
    """Adds ``note`` to what a traceback shows of ``error``."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.args = (f"{error}\n{note}",)
