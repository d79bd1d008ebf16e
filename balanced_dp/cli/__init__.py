"""The command ``balanced-dp``; it needs the extra ``cli``."""
