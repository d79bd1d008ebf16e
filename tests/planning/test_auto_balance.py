"""What "auto" learns from peaks, without devices."""

from __future__ import annotations

from balanced_dp.planning.auto_balance import AutoBalance
from balanced_dp.split import split_batch


def observe(auto: AutoBalance, batch_size: int) -> None:
    """Observe an iteration in which device 0 holds 40 bytes more than the others."""
    sizes = split_batch(batch_size, 4, auto.gpu0_bsz(batch_size))
    peaks = tuple(10 + 5 * size + 40 * (index == 0) for index, size in enumerate(sizes))
    auto.observe(batch_size, peaks, 50, 10)


def test_a_smaller_last_batch_does_not_begin_the_search_again():
    """Each epoch did, so the search never ended, and the value went on changing."""
    auto = AutoBalance((200,) * 4)
    for _ in range(3):
        observe(auto, 32)
    assert auto.is_frozen
    value = auto.gpu0_bsz(32)
    for _ in range(3):
        observe(auto, 1)
        assert auto.is_frozen
        observe(auto, 32)
        assert auto.is_frozen and auto.gpu0_bsz(32) == value
