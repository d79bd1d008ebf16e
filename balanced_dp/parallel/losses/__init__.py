"""Join the losses of the replicas into that of the whole batch: see ``graph`` and ``join``."""
