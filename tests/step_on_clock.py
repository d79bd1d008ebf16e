"""How long a step takes on the stand-in's clock, in units of the largest chunk's own computing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .cuda_stand_in import StandIn
from .cuda_stand_in.clock import Span, computing_s, length_s

NUM_LAYERS, WIDTH = 24, 256
SPLITS = [(16, 16, 16, 16), (8, 19, 19, 18), (0, 22, 21, 21)]


class Layers(nn.Module):
    """Linear layers alone, whose products are what the clock sees, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def step_ratio(
    stand_in: StandIn,
    model: nn.Module,
    split: Sequence[int],
    transfer_share: float,
    has_forward: bool,
) -> tuple[float, list[Span]]:
    """Return how much longer than its largest chunk's computing a step takes, and its record.

    Args:
        stand_in: the devices.
        model: a ``Layers`` on them, wrapped.
        split: how the model splits a batch of their sum.
        transfer_share: how long the gradients of one device travel, next to the backward pass of
            the largest chunk. Weights travel as long.
        has_forward: whether the step begins with the weights going out; else with backward.
    """
    x = torch.randn(sum(split), WIDTH)

    def forward() -> Tensor:
        loss: Tensor = model(x).mean()
        return loss

    for _ in range(3):  # the first calls look at the loss
        forward().backward()
    for parameter in model.parameters():
        parameter.grad = None
    loss = None if has_forward else forward()
    with stand_in.recorded() as work:
        (forward() if loss is None else loss).backward()
    # For each layer the gradients of its input and of its weight, but not that of the batch.
    backward_operations = 2 * max(split) * WIDTH**2 * (2 * NUM_LAYERS - 1)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    spans = stand_in.run(work, 1.0, gradient_bytes / (transfer_share * backward_operations))
    return length_s(spans) / computing_s(spans), spans
