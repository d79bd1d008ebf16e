"""Print sentences, which a terminal wraps between words."""

from __future__ import annotations

import re
import sys
import textwrap

from rich.console import Console

_WHOLE = re.compile(r"\w+\([^()]*\)|[\d.]+ [KMGT]iB")
"""What is not cut: calls, which are copied, and sizes."""


def open_console(*, stderr: bool = False) -> Console:
    """Return the console for results, or that on stderr where stdout is for something else."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal else 160  # else tables are wrapped to the width of a terminal
    return Console(stderr=stderr, width=width, markup=False, highlight=False, emoji=False)


def say(text: str) -> None:
    """Print a sentence on stderr, with the name of the command."""
    print_text(open_console(stderr=True), f"balanced-dp: {text}")


def print_text(console: Console, text: str) -> None:
    """Print a sentence, wrapped but for long paths, and the lines of code below it as they are."""
    sentence, *code = text.split("\n")
    if console.is_terminal:
        whole = _WHOLE.sub(lambda match: match[0].replace(" ", "\0"), sentence)
        wrapped = textwrap.wrap(
            whole, console.width, break_long_words=False, break_on_hyphens=False
        )
        sentence = "\n".join(wrapped).replace("\0", " ")
    console.print("\n".join([sentence, *code]), soft_wrap=True)
