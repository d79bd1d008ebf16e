"""Run each replica on its chunk of the batch, in one thread for each device."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..devices import has_streams, on_stream
from ..emulation.machine import is_emulated
from ..errors import add_note
from .losses.cross_entropy import run_counted
from .nested import Arguments


def parallel_apply(
    functions: Sequence[Callable[..., Any]],
    arguments: Sequence[Arguments],
    devices: Sequence[torch.device],
    chunk_sizes: Sequence[int] = (),
) -> list[Any]:
    """Call ``functions[i]`` with ``arguments[i]`` on ``devices[i]``; return the list of results.

    The calls for the first device run in the calling thread. Every further device has a new thread
    for its calls. With several emulated devices, the first device has a new thread, too.

    Calls on the same device run one after the other. If they ran at the same time, they would take
    random numbers from the same generator in turns, and activation checkpointing could not draw the
    numbers of one call again.

    During each call, ``devices[i]`` is the current device, and the grad mode, the inference mode,
    the autocast state and the current streams are those of the caller. Calls in new threads have a
    copy of the caller's context variables.

    If Ctrl-C interrupts this function while it waits for its threads, the threads run on in the
    background, and their results are lost.

    Args:
        functions: the function of each call.
        arguments: the arguments of each call.
        devices: the device of each call. Several calls may have the same device.
        chunk_sizes: the number of samples of each call, for the note that is added to an exception;
            empty if unknown.

    Raises:
        BaseException: the exception of the failed call with the lowest index, after all threads
            have ended. A note that is added to the exception names the call by its index and
            device.
    """
    restored = _state_of_caller(devices)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    others = list(dict.fromkeys(devices))
    # In a forward pass, each thread numbers the autograd nodes that it creates. In the backward
    # pass, autograd runs the nodes of all emulated devices in one thread, the highest number first.
    # So if the forward pass of each device runs in a new thread, corresponding nodes of the devices
    # have the same number. Autograd runs all nodes of one number before those of lower numbers, so
    # the backward passes of all devices advance together, as on GPUs.
    has_own_threads = is_emulated(devices[0]) and len(others) > 1
    first = None if has_own_threads else others.pop(0)

    # Emulated devices share the cores, so each device's thread gets a part of torch's threads.
    # OpenMP keeps a pool of threads for each device's thread. If all pools together had more
    # threads than there are cores, the threads would sleep between operators, and waking threads
    # takes time.
    num_threads = torch.get_num_threads()

    def work(device: torch.device) -> None:
        if has_own_threads:
            torch.set_num_threads(max(1, num_threads // len(others)))
        for index in [i for i, own in enumerate(devices) if own == device]:
            args, kwargs = arguments[index]
            try:
                with restored(device):
                    results[index] = run_counted(index, functions[index], *args, **kwargs)
            except BaseException as error:
                errors[index] = error
                return

    try:
        threads = []
        for device in others:
            # Two threads cannot run in the same contextvars.Context, so each thread gets a copy.
            args, name = (work, device), f"replicas on {device}"
            run = contextvars.copy_context().run
            threads.append(threading.Thread(target=run, args=args, name=name, daemon=True))
            threads[-1].start()
        if first is not None:
            work(first)
        for thread in threads:
            thread.join()
        if errors:
            index = min(errors)
            note = f"in replica {index} on {devices[index]}"
            if chunk_sizes:
                note += f", with {chunk_sizes[index]} of the batch's {sum(chunk_sizes)} samples"
            add_note(errors[index], note)
            raise errors[index]
        return [results[index] for index in range(len(functions))]
    finally:
        if has_own_threads:
            # work() has also set the number for threads that are started later.
            torch.set_num_threads(num_threads)
        # The traceback of an error refers to this frame. If this frame still referred to the error,
        # only the garbage collector would free the replica's memory.
        errors.clear()
        results.clear()


def _state_of_caller(
    devices: Sequence[torch.device],
) -> Callable[[torch.device], contextlib.AbstractContextManager[None]]:
    """Record torch's state of this thread; return a function that sets this state in any thread.

    The function takes a device and returns a context manager. Inside the context, the device is
    the current device, and the thread has the recorded state: grad mode, inference mode, autocast
    state, and the current stream of the device.
    """
    contexts: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
        functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    for kind in {"cpu", *(device.type for device in devices)}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            options = torch.get_autocast_dtype(kind), True, torch.is_autocast_cache_enabled()
            contexts.append(functools.partial(torch.autocast, kind, *options))
    streams = {d: torch.get_device_module(d).current_stream(d) for d in devices if has_streams(d)}

    @contextlib.contextmanager
    def restored(device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            # The CPU has no current device.
            if hasattr(module := torch.get_device_module(device), "device"):
                stack.enter_context(module.device(device))
            if device in streams:
                stack.enter_context(on_stream(streams[device]))
            yield

    return restored
