"""Run each replica on its chunk, in one thread for each device."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from ..devices import has_streams, is_emulated, is_symbolic, on_stream
from ..errors import add_note
from ..free_threading import is_free_threaded_build
from .losses.cross_entropy import run_counted
from .nested import Arguments

TURN_SECONDS = 0.2
"""How long replicas on symbolic devices wait for the one before, which may wait for them."""

PATIENCE_SECONDS = 20.0
"""After how long a first call is said not to end, on devices that have several replicas."""

logger = logging.getLogger(__name__)

Job = deque[tuple[int, Callable[[], Any]]]
"""The calls for one device, each with its index."""


def parallel_apply(
    functions: Sequence[Callable[..., Any]],
    arguments: Sequence[Arguments],
    devices: Sequence[torch.device],
    chunk_sizes: Sequence[int] | None = None,
    workers: Workers | None = None,
) -> list[Any]:
    """Call ``functions[i]`` on ``arguments[i]`` with ``devices[i]`` current; return the results.

    Calls for the first device run in the calling thread, unless it is one of several emulated ones;
    those for each other device run in a thread of their own. Calls on the same device run one after
    the other, since they share its random number generator, which activation checkpointing rewinds.
    Each call has the caller's grad mode, inference mode, autocast state and current streams, and
    with several devices a copy of its context variables.

    The first exception of a replica is logged at once, for another replica may wait for it forever.

    Args:
        functions: one for each call.
        arguments: one for each call.
        devices: one for each call; a device may repeat.
        chunk_sizes: samples of each call, for the note that is added to an exception.
        workers: the threads to use; by default the call starts and ends its own.

    Raises:
        BaseException: the exception of the first call that failed, unchanged, after all have ended.
        KeyboardInterrupt: after all have ended, or at once if a replica has failed.
    """
    restored = _state_of_caller(devices)
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    jobs: dict[torch.device, Job] = {}
    for index, (device, function) in enumerate(zip(devices, functions, strict=True)):
        args, kwargs = arguments[index]
        call = functools.partial(run_counted, index, function, *args, **kwargs)
        jobs.setdefault(device, deque()).append((index, call))

    def work(device: torch.device, job: Job) -> None:
        while job:
            index, call = job.popleft()
            try:
                with restored(device):
                    results[index] = call()
            except BaseException as error:
                num_others = len(functions) - len(results) - len(errors) - len(job) - 1
                is_first = not errors
                errors[index] = error
                job.clear()
                if num_others and is_first and isinstance(error, Exception):
                    text = f"{error!r} {_describe(index, devices, chunk_sizes)}"  # holds no frames
                    logger.warning("%s; it is raised when the other replicas have ended", text)

    others = list(jobs.items())
    # Autograd runs the nodes of all emulated devices in one thread, the highest sequence number
    # first, and each thread counts by itself. If all forward passes run in such threads, the
    # numbers are alike, and backward passes take turns, as if side by side on accelerators.
    are_alike = is_emulated(devices[0]) and len(others) > 1
    first = None if are_alike else others.pop(0)
    with _reserved(workers) as threads, _watched(jobs, threads):
        ends: list[threading.Event] = []
        try:
            for device, job in others:
                # Each in a copy of its own: a context cannot be entered twice at a time.
                run = contextvars.copy_context().run
                run_job = functools.partial(run, work, device, job)
                ends.append(threads.submit(device, run_job))
                if is_symbolic(device):
                    # Without numbers to compute, threads would only pass the interpreter's lock to
                    # each other.
                    ends[-1].wait(TURN_SECONDS)
            if first is not None:
                contextvars.copy_context().run(work, *first) if others else work(*first)
            for error in errors.values():
                if isinstance(error, KeyboardInterrupt):
                    raise error
            _wait(ends)
        except BaseException as interrupt:
            for error in errors.values():
                if error is not interrupt:  # the others may wait for that replica, so leave them
                    threads.release()
                    raise interrupt from error
            _wait(ends)  # they still work on the caller's tensors
            raise
    if errors:
        error = errors[min(errors)]
        add_note(error, _describe(min(errors), devices, chunk_sizes))
        try:
            raise error
        finally:
            # The traceback holds this frame and the worker's, so these must not hold the error:
            # memory of the failed calls would wait for the garbage collector.
            errors.clear()
            results.clear()
            del error
    outputs = [results[index] for index in range(len(functions))]
    results.clear()  # a thread may refer to it a moment longer
    return outputs


@contextlib.contextmanager
def _watched(jobs: Mapping[torch.device, Job], workers: Workers) -> Iterator[None]:
    """Context manager that logs it if the first call of a model does not end.

    Replicas of one device run one after the other. One that waits for the others, as in
    synchronized batch norm, waits forever.
    """
    shared = [str(device) for device, job in jobs.items() if len(job) > 1]
    timer = threading.Timer(
        PATIENCE_SECONDS,
        logger.warning,
        [
            f"replicas on {', '.join(shared)} have not ended after {PATIENCE_SECONDS} s. Those of "
            "one device run one after the other, so none may wait for another one, as synchronized "
            "batch norm does; use a device for each, such as those of emulate_devices"
        ],
    )
    timer.daemon = True
    if shared and not workers.have_run:
        timer.start()
    try:
        yield
        workers.have_run = True
    finally:
        timer.cancel()


def _wait(events: Sequence[threading.Event]) -> None:
    for event in events:
        event.wait()


class Workers:
    """Threads that wait for calls: one for each device, started when it is first needed.

    They end with ``close``, or with this object. A forked process starts its own. Unlike
    ``ThreadPoolExecutor``, they accept work after the main thread has ended, while others train.
    """

    def __init__(self) -> None:
        self._threads: dict[torch.device, tuple[threading.Thread, SimpleQueue[Any]]] = {}
        self.in_use = threading.Lock()
        """Held by the call that uses the threads."""
        self.have_run = False
        """Whether a call has ended without an exception."""

    def __reduce__(self) -> tuple[type[Workers], tuple[()]]:
        return Workers, ()  # a copy of the model has its own

    def submit(self, device: torch.device, work: Callable[[], None]) -> threading.Event:
        """Run ``work`` in the thread of ``device``, and return an event that is set at its end.

        A device always has the same thread: torch keeps library handles, and their memory, for
        each thread that uses a device.
        """
        if device not in self._threads or not self._threads[device][0].is_alive():  # after a fork
            queue: SimpleQueue[Any] = SimpleQueue()
            name = f"replicas on {device}"
            thread = threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
            thread.start()
            self._threads[device] = thread, queue
        end = threading.Event()
        self._threads[device][1].put((work, end))
        return end

    def release(self) -> list[threading.Thread]:
        """Let the threads end when they have done their work. A later call starts new ones."""
        ended, self._threads = list(self._threads.values()), {}
        for _, queue in ended:
            queue.put(None)
        return [thread for thread, _ in ended]

    __del__ = release

    def close(self) -> None:
        """End the threads, and wait for them unless called by one."""
        threads = self.release()
        # Inside forward, several may call this, and none may wait for another.
        if threading.current_thread() not in threads:
            for thread in threads:
                thread.join()


def _serve(queue: SimpleQueue[Any]) -> None:
    while (item := queue.get()) is not None:
        work, end = item
        try:
            work()
        finally:
            end.set()
        del item, work, end


@contextlib.contextmanager
def _reserved(workers: Workers | None) -> Iterator[Workers]:
    """Yield threads that no other call uses: ``workers``, or new ones while these are in use.

    On free-threaded builds of Python they are always new. There, what a thread has made and another
    one releases is freed by the thread that made it, when that runs again or ends. A thread that
    waits for the next call would keep the outputs and activations of the last one.
    """
    if is_free_threaded_build():
        workers = None
        if torch.is_grad_enabled():
            _start_threads_of_autograd()
    if workers is not None and workers.in_use.acquire(blocking=False):
        try:
            yield workers
        finally:
            workers.in_use.release()
    else:
        with contextlib.closing(Workers()) as own:
            yield own


@functools.cache
def _start_threads_of_autograd() -> None:
    """Start autograd's threads before ours.

    A thread may get the identity of one that has ended, and with it what that one has made. Those
    of autograd rarely run Python code, so they would keep it.
    """
    x = torch.ones((), device="cpu", requires_grad=True)
    torch.autograd.grad(x, x)


def _describe(
    index: int, devices: Sequence[torch.device], chunk_sizes: Sequence[int] | None
) -> str:
    """Return where a replica is and how many samples it has."""
    where = f"in replica {index} on {devices[index]}"
    if chunk_sizes is None:
        return where
    return f"{where}, with {chunk_sizes[index]} of the batch's {sum(chunk_sizes)} samples"


def _state_of_caller(
    devices: Sequence[torch.device],
) -> Callable[[torch.device], contextlib.AbstractContextManager[None]]:
    """Return a function from a device to a context manager that makes it current.

    In it, a thread has the state that torch keeps for the calling thread, such as grad mode.
    """
    cache = torch.is_autocast_cache_enabled()
    contexts: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
        functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    for kind in {"cpu", *(device.type for device in devices)}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            autocast = functools.partial(torch.autocast, kind, dtype, cache_enabled=cache)
            contexts.append(autocast)
    with_streams = filter(has_streams, devices)
    streams = {d: torch.get_device_module(d).current_stream(d) for d in with_streams}

    @contextlib.contextmanager
    def restored(device: torch.device) -> Iterator[None]:
        module = torch.get_device_module(device)
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            if hasattr(module, "device"):  # the CPU has no current device
                stack.enter_context(module.device(device))
            if device in streams:
                stack.enter_context(on_stream(streams[device]))
            yield

    return restored
