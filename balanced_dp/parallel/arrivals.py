"""Weights that travel beside computing, which waits for what it reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..devices import weight_stream


class Arrivals:
    """Transfers on the weight streams of CUDA devices, and the events that tell when they are done.

    Destination memory belongs to the streams that were current at ``expect``. It must not be freed
    before ``join``.

    Attributes:
        are_traced: whether ``torch.compile`` has seen parameters that were on their way. What it
            compiles reads them without waiting, so others are to be there before they are used.
    """

    are_traced: ClassVar[bool] = False

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._events: dict[torch.device, dict[int, torch.Event]] = {}

    def expect(self, devices: Iterable[torch.device]) -> None:
        """Begin transfers between ``devices`` when their current streams have come to here."""
        for device in devices:
            self._streams[device] = torch.get_device_module(device).current_stream(device)
            weight_stream(device).wait_stream(self._streams[device])

    def note(self, positions: Iterable[int]) -> None:
        """Record that the tensors of these positions are there at this point of the streams."""
        for device in self._streams:
            event = weight_stream(device).record_event()
            self._events.setdefault(device, {}).update(dict.fromkeys(positions, event))

    def on(self, device: torch.device) -> dict[int, torch.Event]:
        """Returns, by position, the event to wait for before a tensor is used on ``device``.

        On the device that it comes from, too: before it is written to.
        """
        return self._events.get(device, {})

    def join(self) -> None:
        """Let the streams that were current at ``expect`` wait for all transfers."""
        self._events.clear()
        while self._streams:
            device, stream = self._streams.popitem()
            stream.wait_stream(weight_stream(device))


def parameters_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Returns the parameters of a module by name, without waiting for their values."""
    own: Any = module._parameters
    plain: dict[str, Any] = own.plain if isinstance(own, ArrivingParameters) else own
    return plain


class ArrivingParameters(MutableMapping[str, Any]):
    """The parameters of a module while they arrive: each stream waits when it first reads one.

    Args:
        plain: the dictionary whose place this takes.
        device: where the parameters arrive.
        events: what to wait for.
    """

    def __init__(
        self, plain: dict[str, Any], device: torch.device, events: Iterable[torch.Event]
    ) -> None:
        self.plain = plain
        self._device = device
        self._events = list(dict.fromkeys(events))
        self._current_stream = torch.get_device_module(device).current_stream
        self._waited: set[int] = set()

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
        if torch.compiler.is_dynamo_compiling():  # its named_parameters() has waited
            return self.plain
        stream = self._current_stream(self._device)
        if stream.stream_id not in self._waited:
            for event in self._events:
                stream.wait_event(event)
            self._waited.add(stream.stream_id)
            Arrivals.are_traced |= torch.compiler.is_compiling()
        return self.plain
