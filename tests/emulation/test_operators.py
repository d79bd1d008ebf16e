from __future__ import annotations

from balanced_dp import EmulationError, emulate_devices
from balanced_dp.emulation.operators import look_up_operators

from ..at_once import at_once
from ..processes import python

AT_ONCE = """
import torch
from balanced_dp import emulate_devices
from tests.at_once import at_once

names = "relu sin cos tan exp log sqrt abs neg floor ceil round sigmoid tanh erf sgn trunc frac"

def call(number):
    x = torch.ones(2, 2, device=f"lazy:{number}")
    for name in names.split():
        getattr(torch, name)(x)

with emulate_devices(8):
    at_once(call)
print("done")
"""


def test_threads_may_be_the_first_to_call_an_operator():
    """Without Python's lock torch raised "expected != self_interpreter INTERNAL ASSERT FAILED"."""
    done = python("-c", AT_ONCE)
    assert done.stdout == "done\n", done.stderr


def test_nearly_all_operators_are_looked_up():
    assert look_up_operators() > 1900


def test_one_of_several_threads_opens_a_context(emulate):
    def enter(number):
        try:
            with emulate_devices(2) as devices:
                return len(devices)
        except EmulationError as error:
            assert "cannot be nested" in str(error)
            return 0

    assert set(at_once(enter)) <= {0, 2}
    emulate(2)
    assert set(at_once(enter)) == {0}
