"""Script for two processes: training with accelerate, compared with one process without it.

A rank raises AssertionError if its parameters differ at the end.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from balanced_dp.distributed import count_all_ranks, scale_loss

SHARES = (((0, 9), (4, 5)), ((2, 7), (1, 8)))
"""For each step and micro-batch, how many rows each rank has."""

TOLERANCE = 1e-10


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 5, dtype=torch.double)
    reference = copy.deepcopy(net)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for shares in SHARES:
        x, y = torch.randn(18, 6, dtype=torch.double), torch.randint(5, (18,))
        y[::3] = -100
        parts = zip(x.split(sum(shares, ())), y.split(sum(shares, ())), strict=True)
        own = list(parts)[accelerator.process_index :: 2]
        total = count_all_ranks(sum((labels != -100).sum() for _, labels in own))
        for inputs, labels in own:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), labels)
                scaled = scale_loss(loss, (labels != -100).sum(), total=total)
                accelerator.backward(scaled * accelerator.gradient_accumulation_steps)
                optimizer.step()
                optimizer.zero_grad()
        plain.zero_grad()
        cross_entropy(reference(x), y).backward()
        plain.step()
    pairs = zip(net.parameters(), reference.parameters(), strict=True)
    off = max((one - other).abs().max().item() for one, other in pairs)
    assert off < TOLERANCE, f"off by {off:g}"
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
