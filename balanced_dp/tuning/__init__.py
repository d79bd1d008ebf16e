"""Measure training steps of a workload, choose its split, and report all that was measured."""
