"""Test that the checks of gradients pass on every kind of devices, and that they can fail."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp.validation.gradients import (
    TOLERANCE,
    GradientChecks,
    outcome_of,
    relative_difference,
)

CHECKS = (
    "every split",
    "padding, loss on each device",
    "padding, loss in forward",
    "gradient accumulation",
    "smaller last batch",
    "parameters on all devices",
    "evaluation after .data writes",
)


@pytest.mark.parametrize("num_devices", [2, 3])
def test_gradients_are_right_on_each_kind_of_devices(devices, num_devices):
    checks = list(GradientChecks(devices[:num_devices]).run())
    assert [check.what for check in checks] == list(CHECKS)
    assert [check for check in checks if check.outcome != "ok"] == []
    assert all(check.value < TOLERANCE for check in checks)


def broken(monkeypatch, damage):
    """Return the outcomes of checks on models that ``damage`` has changed."""
    opened = GradientChecks._split

    @contextmanager
    def damaged(self, *args, **kwargs):
        with opened(self, *args, **kwargs) as model:
            damage(model)
            yield model

    monkeypatch.setattr(GradientChecks, "_split", damaged)
    return list(GradientChecks([torch.device("cpu")] * 2).run())


def test_a_gradient_that_is_off_by_a_millionth_is_wrong(monkeypatch):
    def damage(model):
        model.module.head.weight.register_hook(lambda gradient: gradient * (1 + 1e-6))

    *gradients, evaluation = broken(monkeypatch, damage)
    assert {check.outcome for check in gradients} == {"not ok"}
    assert gradients[0].note == "wrong: " + ", ".join(f"gpu0_bsz={n}" for n in range(5))
    assert evaluation.outcome == "ok"


def test_a_padded_loss_that_is_weighted_by_samples_is_wrong(monkeypatch):
    def damage(model):
        model.loss_weight = lambda tokens: len(tokens)

    wrong = [check.what for check in broken(monkeypatch, damage) if check.outcome == "not ok"]
    assert wrong == ["padding, loss in forward"]


def test_a_missing_gradient_is_wrong(monkeypatch):
    def damage(model):
        model.module.tokens.weight.requires_grad_(False)

    *gradients, _ = broken(monkeypatch, damage)
    assert {check.value for check in gradients} == {math.inf}


def test_evaluation_with_the_weights_of_before_is_wrong(monkeypatch, emulated):
    opened = GradientChecks._split

    @contextmanager
    def stale(self, *args, **kwargs):
        with opened(self, *args, **kwargs) as model, torch.no_grad(), model.shared_weights():
            yield model

    monkeypatch.setattr(GradientChecks, "_split", stale)
    check = outcome_of("", "", GradientChecks(emulated[:2]).evaluation())
    assert check.note == "wrong: write 1, write 2"


def test_an_error_is_wrong_and_does_not_end_the_others(monkeypatch):
    def damage(model):
        if not model.gathers_outputs:
            raise RuntimeError("NCCL is\n out of order")

    checks = broken(monkeypatch, damage)
    assert [(c.what, c.note) for c in checks if c.outcome == "not ok"] == [
        ("padding, loss on each device", "RuntimeError: NCCL is out of order")
    ]
    assert len(checks) == len(CHECKS)


NUMBERS = st.lists(st.floats(-1e3, 1e3).filter(lambda x: abs(x) > 1e-3), min_size=1, max_size=5)


@given(NUMBERS, st.floats(-1, 1), st.sampled_from([2.0**-20, 1.0, 2.0**20]), st.data())
def test_the_difference_is_relative_to_the_largest_entry(numbers, error, scale, data):
    expected = torch.tensor(numbers, dtype=torch.double)
    found = expected.clone()
    found[data.draw(st.integers(0, len(numbers) - 1))] += error * expected.abs().max()
    difference = relative_difference([found * scale, None], [expected * scale, None])
    assert difference == pytest.approx(abs(error), abs=1e-12)


@given(NUMBERS, st.data())
def test_nan_is_a_difference(numbers, data):
    expected = torch.tensor(numbers)
    found = expected.clone()
    found[data.draw(st.integers(0, len(numbers) - 1))] = math.nan
    assert math.isnan(relative_difference([found, expected], [expected, expected]))


@given(st.lists(st.sampled_from([0.0, 1e-16, 2e-10, math.nan, math.inf]), min_size=1, max_size=5))
def test_a_check_is_right_if_all_of_its_cases_are(differences):
    cases = [(f"case {i}", difference) for i, difference in enumerate(differences)]
    check = outcome_of("what", "note", iter(cases))
    wrong = [case for case, difference in cases if difference not in (0.0, 1e-16)]
    assert check.outcome == ("not ok" if wrong else "ok")
    assert check.note == (f"wrong: {', '.join(wrong)}" if wrong else "note")
    if not any(map(math.isnan, differences)):
        assert check.value == max(differences)
