"""An order of many indices of which any part can be computed without the rest."""

from __future__ import annotations

import math
import random

from torch import Tensor

_NUM_ROUNDS = 10
"""With eight, the orders of eight indices are not equally frequent; a test counts them."""


class Permutation:
    """A pseudorandom permutation of ``range(size)``, the same for the same seeds everywhere.

    ``torch.randperm`` has to make all of it; this takes no memory, and time only for the positions
    that are asked for.

    Examples:
        >>> Permutation(10, 0, 1)(torch.arange(10)).sort().values.tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]

    Args:
        size: how many indices, at least 0.
        seeds: integers that choose it.

    Source:
        The generalized Feistel cipher with cycle walking of Black and Rogaway 2002, "Ciphers with
        Arbitrary Finite Domains" (https://doi.org/10.1007/3-540-45760-7_9). The rounds mix as the
        finalizer of MurmurHash3 does (https://github.com/aappleby/smhasher).
    """

    def __init__(self, size: int, *seeds: int) -> None:
        # Indices are places in a table that is hardly larger. Its rows are even in number: turning
        # a row or column of odd length makes even permutations only.
        self.size = size
        self.num_rows = -(-(math.isqrt(max(0, size - 1)) + 1) // 2) * 2
        self.num_columns = max(1, -(-size // self.num_rows))
        generator = random.Random(repr(seeds))
        self._keys = [generator.getrandbits(63) for _ in range(2 * _NUM_ROUNDS)]

    def __call__(self, positions: Tensor) -> Tensor:
        """Returns the indices at some positions.

        Args:
            positions: int64, each at least 0 and below ``size``.

        Shape:
            - positions and result: ``(*)``, the same.
        """
        indices = self._in_table(positions)
        while (outside := indices >= self.size).any():
            indices[outside] = self._in_table(indices[outside])
        return indices

    def _in_table(self, places: Tensor) -> Tensor:
        row, column = places // self.num_columns, places % self.num_columns
        for key, other in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _mixed(column ^ key)) % self.num_rows
            column = (column + _mixed(row ^ other)) % self.num_columns
        return row * self.num_columns + column


def _mixed(numbers: Tensor) -> Tensor:
    """Returns numbers of 32 bits that depend on every bit of the given ones."""
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):  # of 64 bits, as signed numbers
        numbers = (numbers ^ ((numbers >> 33) & 0x7FFFFFFF)) * factor
    return (numbers >> 31) & 0xFFFFFFFF
