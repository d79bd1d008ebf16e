"""What a training step costs with a frozen gpu0_bsz="auto", next to the same value as a number."""

from __future__ import annotations

import time

import torch
from torch import nn

from balanced_dp import BalancedDataParallel, emulate_devices


def test_a_frozen_value_costs_nothing(benchmark):
    torch.set_num_threads(1)
    with emulate_devices(2) as devices:
        module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)]).to(devices[0])
        optimizer = torch.optim.AdamW(module.parameters())
        models = {"auto": BalancedDataParallel("auto", module)}

        def step(name: str, optimizer: torch.optim.Optimizer = optimizer) -> float:
            start = time.perf_counter()
            optimizer.zero_grad()
            models[name](torch.ones(4000, 64)).sum().backward()
            optimizer.step()
            return time.perf_counter() - start

        for _ in range(20):
            step("auto")
        auto = models["auto"]
        assert auto._policy.search.is_over
        models["fixed"] = BalancedDataParallel(auto.gpu0_bsz, module)
        # In turns, so that both see the same machine.
        seconds = {name: [] for name in models}
        for _ in range(50):
            for name, measured in seconds.items():
                measured.append(step(name))
        benchmark.pedantic(step, args=("auto",), rounds=10)
        ratio = sorted(seconds["auto"])[25] / sorted(seconds["fixed"])[25]
        benchmark.extra_info["ratio_to_fixed"] = ratio
        print(f"\na step with a frozen auto takes {ratio:.3f} of one with the number")
        models.clear()
        del module, optimizer, auto, step
