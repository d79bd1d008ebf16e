"""Print sentences, which a terminal wraps between words."""

from __future__ import annotations

import sys
import textwrap

from rich.console import Console


def open_console(*, stderr: bool = False) -> Console:
    """Return the console for results, on stderr if stdout has other output."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else 160  # else tables are wrapped to the width of a terminal
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def say(text: str) -> None:
    """Print a sentence on stderr, with the name of the command."""
    print_text(open_console(stderr=True), f"balanced-dp: {text}")


def print_text(console: Console, text: str) -> None:
    """Print sentences; a terminal wraps them between words, and other readers get one line."""
    if console.is_terminal:
        lines = text.split("\n")
        text = "\n".join(
            textwrap.fill(line, console.width, break_long_words=False, break_on_hyphens=False)
            for line in lines
        )
    console.print(text, soft_wrap=True)
