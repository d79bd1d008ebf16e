"""The memory of each device: measured, broken down by use, and logged."""
