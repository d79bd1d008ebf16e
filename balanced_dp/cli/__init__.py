"""Run the command ``balanced-dp``. Requires the extra ``cli``."""
