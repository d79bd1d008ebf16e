"""The command ``balanced-dp validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import arguments

if TYPE_CHECKING:
    from ..validation import Check


def validate(
    num_devices: arguments.NumDevices = None,
    emulate: arguments.Emulate = False,
    json_file: arguments.JsonFile = None,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write Markdown for an issue to FILE; - is stdout."),
    ] = None,
) -> None:
    """Check gradients, predicted memory and speed on the GPUs of this machine.

    Runs on all GPUs, with replicas that share it on a single one, and without any on emulated
    devices. Ends with exit code 1 if a gradient is wrong.
    """
    from ..report.validation import validation_json, validation_markdown
    from ..tuning.open_devices import default_num_devices
    from ..validation import ValidationSettings
    from ..validation import validate as run_checks
    from ..validation.all_checks import NUM_CHECKS
    from . import console

    arguments.check_outputs({"--json": json_file, "--markdown": markdown})
    if num_devices is None:
        num_devices = default_num_devices(emulate)
    settings = ValidationSettings(num_devices, emulate)
    takes_stdout = arguments.STDOUT in (json_file, markdown)
    output = console.stderr_console() if takes_stdout else console.stdout_console()
    output.print(f"Validating on {settings.description}")
    with console.progress_bar("predicting peaks of memory", NUM_CHECKS) as update:

        def on_check(check: Check) -> None:
            update(advance=1, description=f"checked {check.part}: {check.what}")

        report = run_checks(settings, on_check)
    if not takes_stdout:
        console.print_validation(report)
    console.write(json_file, validation_json, report)
    console.write(markdown, validation_markdown, report)
    if not report.gradients_are_right:
        raise typer.Exit(1)
