"""The balanced split in other people's training loops; each needs its own package."""
