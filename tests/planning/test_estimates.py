"""Estimates of other options: nothing appears or vanishes but what they avoid."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import LinearTerm, MemoryModel
from balanced_dp.planning.estimates import with_loss_on_each_device, with_spread

sizes = st.integers(0, 10**9)
chunks = st.lists(st.integers(1, 100), min_size=2, max_size=8)


@st.composite
def models(draw: st.DrawFn) -> MemoryModel:
    first = LinearTerm(draw(sizes), draw(sizes), draw(sizes))
    others = LinearTerm(draw(sizes), draw(sizes))
    return MemoryModel((first,), (), (others,), num_points=1, residual=0.0)


@given(models(), chunks)
def test_what_the_whole_batch_took_is_where_its_samples_are(model, split):
    other = with_loss_on_each_device(model)
    assert sum(other.predict(split)) == sum(model.predict(split))
    assert other.whole_bytes_per_sample == 0


@given(models(), chunks, sizes, sizes)
def test_copies_of_outputs_vanish_and_inputs_stay(model, split, gathered, inputs):
    whole = model.whole_bytes_per_sample
    other = with_loss_on_each_device(model, gathered, inputs)
    assert other.whole_bytes_per_sample == min(whole, inputs)
    moved = max(0, whole - gathered - inputs) * sum(split) + min(whole, inputs) * sum(split)
    assert sum(model.predict(split)) - sum(other.predict(split)) == whole * sum(split) - moved


@given(models(), chunks)
def test_what_only_device_0_holds_is_spread(model, split):
    before, after = model.predict(split), with_spread(model, len(split)).predict(split)
    excess = max(0, model.first_terms[0].fixed_bytes - model.other_terms[0].fixed_bytes)
    assert abs(sum(before) - sum(after)) <= len(split)  # rounding
    assert abs(before[0] - after[0] - excess * (1 - 1 / len(split))) <= 1
