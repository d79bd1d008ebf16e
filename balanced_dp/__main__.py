"""``python -m balanced_dp`` runs the command ``balanced-dp``."""

from .cli.commands import main

main()
