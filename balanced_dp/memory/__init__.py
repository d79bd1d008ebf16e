"""What each device's memory holds: measured, explained, logged."""
