"""The time of a training step, as computed by the clock of the stand-in for CUDA devices.

The unit of time is the computing time of the largest chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .cuda_stand_in import StandIn
from .cuda_stand_in.clock import Span, computing_s, length_s

NUM_LAYERS, WIDTH = 24, 256
SPLITS = [(16, 16, 16, 16), (8, 19, 19, 18), (0, 22, 21, 21)]


class Layers(nn.Module):
    """Linear layers and a loss. The clock counts only matrix products as computing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def step_ratio(
    stand_in: StandIn,
    model: nn.Module,
    split: Sequence[int],
    transfer_share: float,
    has_forward: bool,
) -> tuple[float, list[Span]]:
    """Return the time of a step divided by the computing time of the largest chunk, and its spans.

    Args:
        stand_in: the stand-in for CUDA devices.
        model: a data-parallel wrapper of ``Layers`` on the stand-in's devices.
        split: the chunk sizes of the model for a batch of ``sum(split)`` samples.
        transfer_share: the time to copy the gradients of one device, divided by the time of the
            backward pass of the largest chunk. Weights take as long.
        has_forward: whether the step includes the forward pass with the copies of weights, and not
            only the backward pass.
    """
    x = torch.randn(sum(split), WIDTH)

    def forward() -> Tensor:
        loss: Tensor = model(x).mean()
        return loss

    for _ in range(3):  # the first calls also find out what the loss is a mean over
        forward().backward()
    for parameter in model.parameters():
        parameter.grad = None
    loss = None if has_forward else forward()
    with stand_in.recorded() as work:
        (forward() if loss is None else loss).backward()
    # For each layer, the gradients of its input and of its weight, but none of the batch itself.
    backward_operations = 2 * max(split) * WIDTH**2 * (2 * NUM_LAYERS - 1)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    spans = stand_in.run(work, 1.0, gradient_bytes / (transfer_share * backward_operations))
    return length_s(spans) / computing_s(spans), spans
