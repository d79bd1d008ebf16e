"""Let computing wait for the parameters that it reads while others are still on their way.

Parameters are copied on CUDA streams that nothing else uses, in buckets. ``Arrivals`` has an event
for each bucket. While a forward pass runs, the ``_parameters`` of its modules are
``ArrivingParameters``: a stream that reads one waits for the events of that module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..devices import weight_stream


class Arrivals:
    """The copies on the weight streams of CUDA devices, with the events that mark their completion.

    Destination memory belongs to the streams that were current at ``expect``. It must not be freed
    before ``join``.

    Attributes:
        are_traced: whether ``torch.compile`` has traced parameters that were on their way. Compiled
            code reads them without waiting, so from then on calls wait for all parameters first.
    """

    are_traced: ClassVar[bool] = False

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._events: dict[torch.device, dict[int, torch.Event]] = {}

    def expect(self, devices: Iterable[torch.device]) -> None:
        """Let the weight streams of ``devices`` wait for what their current streams have queued."""
        for device in devices:
            self._streams[device] = torch.get_device_module(device).current_stream(device)
            weight_stream(device).wait_stream(self._streams[device])

    def note(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        """Record an event after what the weight stream of ``device`` has queued for ``tensors``."""
        event = weight_stream(device).record_event()
        self._events.setdefault(device, {}).update(dict.fromkeys(map(id, tensors), event))

    def events(self, device: torch.device) -> dict[int, torch.Event]:
        """Return, by the identity of a tensor on ``device``, the event to wait for before its use.

        If it is an original, wait for the event before writing to it.
        """
        return self._events.get(device, {})

    def join(self) -> None:
        """Let the streams that were current at ``expect`` wait for all copies."""
        self._events.clear()
        while self._streams:
            device, stream = self._streams.popitem()
            stream.wait_stream(weight_stream(device))


def parameters_of(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the parameters of a module by name, without waiting for their values."""
    own: Any = module._parameters
    plain: dict[str, Any] = own.plain if isinstance(own, ArrivingParameters) else own
    return plain


class ArrivingParameters(MutableMapping[str, Any]):
    """The parameters of a module while they arrive: each stream waits when it first reads one.

    Args:
        plain: the dictionary that this one replaces.
        device: the device of the parameters.
        events: the events to wait for.
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
        """Return a plain dictionary."""
        return self._arrived().copy()

    def __reduce__(self) -> Any:
        return dict, (self._arrived(),)

    def __getitem__(self, name: str) -> Any:
        return self._arrived()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._arrived()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._arrived()[name]

    # Module.__getattr__ asks these for any attribute, so they do not wait.

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
