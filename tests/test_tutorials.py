"""The official DataParallel tutorial, with the shapes that it prints."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from balanced_dp import BalancedDataParallel


class RandomDataset(Dataset):
    def __init__(self, size, length):
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index):
        return self.data[index]

    def __len__(self):
        return self.len


class Model(nn.Module):
    def __init__(self, input_size, output_size):
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)

    def forward(self, input):
        output = self.fc(input)
        print(f"\tIn Model: input size {input.size()} output size {output.size()}\n", end="")
        return output


def train(devices, gpu0_bsz, capsys) -> list[tuple[list[int], str]]:
    """Runs the tutorial's loop; returns for each batch the sizes inside and the line outside."""
    model = BalancedDataParallel(gpu0_bsz, Model(5, 2).to(devices[0]), device_ids=devices)
    printed = []
    for data in DataLoader(RandomDataset(5, 100), batch_size=30, shuffle=True):
        output = model(data.to(devices[0]))
        print("Outside: input size", data.size(), "output_size", output.size())
        *inside, outside = capsys.readouterr().out.splitlines()
        sizes = []
        for line in inside:
            size = int(line.split("[")[1].split(",")[0])
            expected = f"input size torch.Size([{size}, 5]) output size torch.Size([{size}, 2])"
            assert line == f"\tIn Model: {expected}"
            sizes.append(size)
        printed.append((sorted(sizes, reverse=True), outside))
    return printed


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize(
    ("num_devices", "of_30", "of_10"),
    [
        (1, [30], [10]),
        (2, [15, 15], [5, 5]),
        (3, [10, 10, 10], [4, 4, 2]),
        (7, [5] * 6, [2] * 5),
        (8, [4] * 7 + [2], [2] * 5),
    ],
)
def test_the_even_split_prints_the_tutorial_s_shapes(devices, capsys, num_devices, of_30, of_10):
    outside = "Outside: input size torch.Size([{0}, 5]) output_size torch.Size([{0}, 2])"
    expected = [(of_30, outside.format(30))] * 3 + [(of_10, outside.format(10))]
    assert train(devices[:num_devices], 30, capsys) == expected


def test_without_devices_the_model_sees_the_whole_batch(capsys):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    model = BalancedDataParallel(30, Model(5, 2))
    model(torch.randn(30, 5))
    assert "input size torch.Size([30, 5])" in capsys.readouterr().out


def test_a_balanced_split_prints_a_smaller_first_chunk(devices, capsys):
    printed = train(devices[:3], 4, capsys)
    assert [sizes for sizes, _ in printed] == [[13, 13, 4]] * 3 + [[4, 4, 2]]
