from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ArgumentError, ArgumentTypeError
from balanced_dp.units import format_bytes, parse_bytes

FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
units = st.sampled_from(list(FACTORS))


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("0", 0),
        (" 2 KIB\n", 2048),
        ("1.5gib", 3 * 2**29),
        ("0.5KiB", 512),
        ("1.2KiB", 1229),
        ("0.1TiB", 109951162778),
    ],
)
def test_sizes(size: str, num_bytes: int) -> None:
    assert parse_bytes(size) == num_bytes
    assert type(parse_bytes(size)) is int


@given(number=st.integers(0, 10**30), unit=units, space=st.sampled_from(["", " ", "\t"]))
def test_whole_numbers_of_units(number: int, unit: str, space: str) -> None:
    for text in (unit, unit.lower(), unit.upper(), unit.replace("i", ""), unit[0]):
        assert parse_bytes(f"{number}{space}{text}") == number * FACTORS[unit]


@given(num_bytes=st.integers(0, 2**80))
def test_bytes(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == num_bytes
    if num_bytes >= 1024:
        assert parse_bytes(str(num_bytes)) == num_bytes


@given(number=st.integers(1, 1023))
def test_a_forgotten_unit(number: int) -> None:
    with pytest.raises(ArgumentError, match=rf"{number} bytes; did you mean {number}GiB\?"):
        parse_bytes(str(number))


@given(num_bytes=st.integers(0, 2**60))
def test_written_sizes_read_back(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    factor = FACTORS[text.split()[1]]
    assert abs(parse_bytes(text) - num_bytes) <= factor * 0.005 + 1
    assert factor <= num_bytes or factor == 1


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "1.GiB", ".5GiB", "1GBB", "1 i", "1EB", "-1", "1e3", "1_000", "1 2", "0x10",
     "inf", "nan", "\u0661GiB", "1GiB1", "1,5GiB"],
)  # fmt: skip
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"capacity must be bytes or a size in B, KiB") as error:
        parse_bytes(text, "capacity")
    assert repr(text) in str(error.value)


@given(text=st.text())
def test_any_text(text: str) -> None:
    try:
        assert parse_bytes(text) >= 0
    except ArgumentError as error:
        assert repr(text) in str(error)


@pytest.mark.parametrize("size", [True, 1.5, None, b"1GiB", [1], float("nan")])
def test_types_that_are_refused(size: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="memory must be bytes as an int or text") as error:
        parse_bytes(size)
    assert repr(size) in str(error.value)


@pytest.mark.parametrize(
    ("size", "message"),
    [(-1, "reserve must not be negative, got -1"), ("9" * 400 + ".5TiB", "reserve is too large")],
)
def test_impossible_sizes(size: int | str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_bytes(size, "reserve")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (3_500_000, "3.34 MiB"),
        (11 * 2**30, "11.00 GiB"),
        (5 * 2**42, "20.00 TiB"),
        (-2048, "-2.00 KiB"),
        (0.4, "0 B"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
