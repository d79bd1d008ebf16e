"""Each class of docs/migration.md next to ours: the split, and gradients of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, balanced_data_parallel

from ..modules import assert_same_gradients

STOCK, XL = "nn.DataParallel", "Transformer-XL's BalancedDataParallel"
REPOSITORY = "the repository Balanced-DataParallel"
LISTS = "CornerNet's and CenterNet's DataParallel"


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize(
    ("whose", "batch_size", "num_devices", "gpu0_bsz", "weights", "found"),
    [
        *((STOCK, *row) for row in [(16, 4, 16, None, (4, 4, 4, 4)), (9, 4, 9, None, (3, 3, 3))]),
        *(
            (STOCK, *row)
            for row in [(10, 8, 10, None, (2,) * 5), (10, 4, None, None, (3, 3, 3, 1))]
        ),
        (XL, 32, 4, 2, None, (2, 10, 10, 10)),
        (XL, 4, 3, 1, None, (1, 2, 1)),  # theirs: 2, 2
        (XL, 9, 4, 2, None, (2, 3, 2, 2)),  # theirs: 3, 3, 3
        (REPOSITORY, 158, 6, 1, None, (1, 32, 32, 31, 31, 31)),
        (REPOSITORY, 9, 4, 0, None, (0, 3, 3, 3)),  # theirs: a chunk fewer than there are devices
        (LISTS, 114, 4, 18, None, (18, 32, 32, 32)),
        (LISTS, 107, 4, 18, None, (18, 30, 30, 29)),  # the last batch is smaller
        (LISTS, 28, 3, None, (4, 8, 16), (4, 8, 16)),
        (LISTS, 21, 3, None, (4, 8, 16), (3, 6, 12)),
    ],
)
def test_splits_and_gradients_of_each_class(
    whose, batch_size, num_devices, gpu0_bsz, weights, found
):
    """The batches of Transformer-XL's script are in dimension 1, and it has unreduced losses."""
    module, dim = nn.Linear(4, 3).double(), int(whose == XL)
    reference = copy.deepcopy(module)
    x = torch.randn((5, batch_size, 4) if dim else (batch_size, 4), dtype=torch.double)
    devices = ["cpu"] * num_devices
    model = BalancedDataParallel(gpu0_bsz, module, devices, dim=dim, device_weights=weights)
    if whose == STOCK:
        assert [len(chunk) for chunk in x.chunk(num_devices)] == [*found]
        model(x)
        torch.testing.assert_close(balanced_data_parallel(1, module, x, devices), reference(x))
    for call in (model, reference):
        call(x).square().mean().backward()
    assert tuple(size for size in model.chunk_sizes if size or whose != STOCK) == found
    assert_same_gradients(module, reference)
