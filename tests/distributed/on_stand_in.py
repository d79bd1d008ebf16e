"""Script for two ranks: training on stand-in CUDA devices, compared with one process.

A rank raises AssertionError if its parameters differ at the end, or if it detects a race.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from balanced_dp import BalancedDataParallel
from balanced_dp.distributed import convert, count_all_ranks, scale_loss
from tests import cuda_stand_in
from tests.cuda_stand_in import process_group

SHARES = (((0, 9), (4, 5)), ((2, 7), (9, 0)))
"""For each step and micro-batch, how many rows each rank has."""
TOLERANCE = 1e-10


def main() -> None:
    dist.init_process_group(process_group.register())
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    plain = copy.deepcopy(net)
    with cuda_stand_in.opened() as stand_in:
        wrapped = BalancedDataParallel(None, net.to(stand_in.devices[0]), spread=True)
        assert len(set(wrapped.homes().values())) > 1
        model = convert(wrapped, device=stand_in.devices[rank])
        assert not model.module._forward_pre_hooks
        train(model, plain, rank, stand_in.devices[rank])
        found = [p.detach().cpu() for p in model.parameters()]
    torch.testing.assert_close(found, list(plain.parameters()), rtol=TOLERANCE, atol=TOLERANCE)
    del model
    dist.destroy_process_group()


def train(model: nn.Module, plain: nn.Module, rank: int, device: torch.device) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for shares in SHARES:
        x, y = torch.randn(18, 6, dtype=torch.double), torch.randint(5, (18,))
        y[::3] = -100
        parts = zip(x.split(sum(shares, ())), y.split(sum(shares, ())), strict=True)
        own = [(inputs.to(device), labels.to(device)) for inputs, labels in list(parts)[rank::2]]
        total = count_all_ranks(sum((labels != -100).sum() for _, labels in own))
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index, (inputs, labels) in enumerate(own):
            model.require_backward_grad_sync = index == len(own) - 1
            loss = cross_entropy(model(inputs), labels)
            scale_loss(loss, (labels != -100).sum(), total=total).backward()
        cross_entropy(plain(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


if __name__ == "__main__":
    main()
