"""Integrations with training loops of other, optional packages."""
