"""Weights that travel beside computing, which waits for what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from .devices import copy_stream


class Arrivals:
    """Tells when tensors that travel on the copy streams of CUDA devices may be used.

    Where they come from they may be written to, and where they go to they may be read. Their memory
    belongs to the streams that were current; it is given back after ``join``.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._events: dict[torch.device, dict[int, torch.Event]] = {}

    def expect(self, devices: Iterable[torch.device]) -> None:
        """Begin transfers, on the copy streams of ``devices``, after the current streams' work."""
        for device in devices:
            self._streams[device] = torch.get_device_module(device).current_stream(device)
            copy_stream(device).wait_stream(self._streams[device])

    def note(self, positions: Iterable[int]) -> None:
        """Note that the tensors of these positions are there when the copy streams are so far."""
        for device in self._streams:
            event = copy_stream(device).record_event()
            self._events.setdefault(device, {}).update(dict.fromkeys(positions, event))

    def on(self, device: torch.device) -> dict[int, torch.Event]:
        """Returns, by position, the events to wait for before a tensor is used on ``device``."""
        return self._events.get(device, {})

    def join(self) -> None:
        """Let the streams that were current wait for all of the transfers."""
        self._events.clear()
        while self._streams:
            device, stream = self._streams.popitem()
            stream.wait_stream(copy_stream(device))

    def __del__(self) -> None:
        self.join()  # where an exception came first


def parameters_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Returns the parameters of a module by name, without waiting for their values."""
    own: Any = module._parameters
    plain: dict[str, Any] = own.plain if isinstance(own, ArrivingParameters) else own
    return plain


class ArrivingParameters(MutableMapping[str, Any]):
    """The parameters of a module while they arrive: the current stream waits at the first read.

    Then the plain dictionary takes its place again, unless forward has made another stream current,
    which waits for itself.

    Args:
        attributes: those of the module, whose ``_parameters`` this replaces.
        device: where its parameters arrive.
        events: what to wait for.
    """

    def __init__(
        self, attributes: dict[str, Any], device: torch.device, events: Iterable[torch.Event]
    ) -> None:
        self._attributes = attributes
        self.plain: dict[str, Any] = attributes["_parameters"]
        self._current_stream = torch.get_device_module(device).current_stream
        self._device = device
        self._stream = self._current_stream(device)
        self._events = list(dict.fromkeys(events))
        attributes["_parameters"] = self

    def step_aside(self) -> None:
        """Give the module its plain dictionary."""
        self._attributes["_parameters"] = self.plain

    def copy(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return self._arrived().copy()

    def __reduce__(self) -> Any:
        return dict, (self._arrived(),)

    def __getitem__(self, name: str) -> Any:
        return self._arrived()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._arrived()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._arrived()[name]

    # Any other attribute of a module is looked for here, too.

    def __contains__(self, name: object) -> bool:
        return name in self.plain

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def _arrived(self) -> dict[str, Any]:
        stream = self._current_stream(self._device)
        for event in self._events:
            stream.wait_event(event)
        if stream == self._stream:
            self.step_aside()
        return self.plain
