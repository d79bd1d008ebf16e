"""Fit models to points of known terms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ArgumentError, MemoryModel
from balanced_dp import LinearTerm as Term
from balanced_dp.planning.memory_model import fit


def splits(*terms):
    """Return splits over two devices, with these terms on the first."""
    for batch_size in (40, 80, 160):
        for own in (1, batch_size // 4, batch_size // 2):
            first = round(max(term(own, batch_size) for term in terms))
            other = batch_size - own
            yield (own, other), [(first, 300 + 50 * other)]


def test_a_fit_finds_two_terms_that_take_turns():
    terms = (Term(1000.0, 10.0, 100.0), Term(5000.0, 200.0, 0.0))
    model = fit(splits(*terms))
    assert model.residual < 0.001
    assert model.num_points == 9
    for c in ((5, 55), (30, 30), (2, 98)):
        expected = round(max(term(c[0], sum(c)) for term in terms))
        assert model.predict(c) == pytest.approx((expected, 300 + 50 * c[1]), rel=0.01)


amounts = st.integers(2**10, 2**40)


@given(amounts, amounts, amounts)
def test_coefficients_of_one_term_are_exact(fixed, own, whole):
    [term] = fit(splits(Term(fixed, own, whole))).first_terms
    for chunk, batch in ((1, 40), (7, 1000), (2**20, 2**24)):
        assert term(chunk, batch) == pytest.approx(fixed + own * chunk + whole * batch, rel=1e-9)


def test_parameters_may_be_spread_over_the_other_devices_unevenly():
    """Where all of them have as many samples, it shows by how much."""
    splits = [(3, 3, 3, 3), (0, 4, 4, 4), (6, 6, 6, 6), (2, 4, 3, 3)]

    def peaks(sizes):
        offsets = (0, -70, 0, -300)
        return [[1000 + 50 * n + offset for n, offset in zip(sizes, offsets, strict=True)]]

    model = fit([(sizes, peaks(sizes)) for sizes in splits])
    assert model.offsets == (-70, 0, -300)
    assert model.residual < 1e-9
    assert model.predict((5, 5, 4, 1)) == tuple(peaks((5, 5, 4, 1))[0])
    assert model.predict((5, 5, 0, 0)) == (1250, 1180, 0, 0)
    assert fit([(sizes, peaks(sizes)) for sizes in splits[3:]]).offsets == ()


def test_a_fit_needs_several_devices_and_a_point():
    with pytest.raises(ArgumentError, match="two or more devices"):
        fit([])


def test_an_idle_device_needs_nothing():
    model = MemoryModel((Term(5, 1, 1),), (Term(3, 0, 1),), (Term(2, 1),), 3, 0.0)
    assert model.predict((0, 4, 0)) == (7, 6, 0)
    assert model.predict((2, 2, 0)) == (11, 4, 0)
