"""Test reading and writing sizes as text, such as ``"11GiB"``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ArgumentError
from balanced_dp.memory.units import format_bytes, parse_bytes

FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@given(st.integers(0, 10**30), st.sampled_from([*FACTORS]), st.sampled_from(["", " ", "\t"]))
def test_whole_numbers_of_units(number, unit, space):
    for text in (unit, unit.lower(), unit.upper(), unit.replace("i", ""), unit[0]):
        assert parse_bytes(f"{number}{space}{text}") == number * FACTORS[unit]


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), (" 2 KIB\n", 2048), ("1.5gib", 3 * 2**29), ("1.2KiB", 1229)]
)
def test_fractions_and_blanks(text, size):
    assert parse_bytes(text) == size and type(parse_bytes(text)) is int


@given(st.integers(0, 2**80))
def test_a_number_may_lack_its_unit(size):
    assert parse_bytes(size) == size
    if size >= 1024:
        assert parse_bytes(str(size)) == size
    elif size:
        with pytest.raises(ArgumentError, match=rf"{size} bytes; did you mean {size}GiB\?"):
            parse_bytes(str(size))


@given(st.text())
def test_any_text_is_a_size_or_an_error(text):
    try:
        assert parse_bytes(text) >= 0
    except ArgumentError as error:
        assert repr(text) in str(error)


WRITTEN = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 5 * 2**42: "20.00 TiB", -2048: "-2.00 KiB"}


@pytest.mark.parametrize(("size", "text"), WRITTEN.items())
def test_sizes_are_written(size, text):
    assert format_bytes(size) == text
