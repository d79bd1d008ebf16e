"""``python -m balanced_dp`` is the command ``balanced-dp``."""

from .cli.commands import main

main()
