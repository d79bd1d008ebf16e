"""Integrations with the training loops of other packages, each of which is optional."""
