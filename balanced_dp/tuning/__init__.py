"""Measure training steps with several splits of the batch, and report which split is best.

A split is the chunk size (the number of samples) of each device.
"""
