"""The command ``balanced-dp validate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ArgumentError
from . import arguments

if TYPE_CHECKING:
    from ..validation import Check

_STDOUT = Path("-")


def validate(
    num_devices: arguments.NumDevices = None,
    emulate: arguments.Emulate = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report to FILE; - for stdout."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write Markdown for an issue to FILE; - for stdout."),
    ] = None,
) -> None:
    """Check gradients, predicted memory and speed on the GPUs of this machine.

    Runs on all GPUs, with replicas that share it on a single one, and without any on emulated
    devices. Ends with exit code 1 if a gradient is wrong.
    """
    from ..report.json_file import write_atomically
    from ..report.validation import validation_json, validation_markdown
    from ..tuning.open_devices import default_num_devices
    from ..validation import ValidationSettings
    from ..validation import validate as run_checks
    from ..validation.all_checks import NUM_CHECKS
    from . import console

    if json_file == markdown == _STDOUT:
        raise ArgumentError("--json and --markdown both name stdout")
    arguments.check_writable(json_file, markdown)
    if num_devices is None:
        num_devices = default_num_devices(emulate)
    settings = ValidationSettings(num_devices, emulate)
    takes_stdout = _STDOUT in (json_file, markdown)
    console.print_description(settings.description, on_stderr=takes_stdout)
    with console.progress_bar("predicting peaks of memory", NUM_CHECKS) as update:

        def on_check(check: Check) -> None:
            update(advance=1, description=f"checked {check.part}: {check.what}")

        report = run_checks(settings, on_check)
    if not takes_stdout:
        console.print_validation(report)
    for file, as_text in ((json_file, validation_json), (markdown, validation_markdown)):
        if file == _STDOUT:
            print(as_text(report), end="")
        elif file is not None:
            write_atomically(file, as_text(report))
            print(f"wrote {file}", file=sys.stderr)
    if not report.gradients_are_right:
        raise typer.Exit(1)
