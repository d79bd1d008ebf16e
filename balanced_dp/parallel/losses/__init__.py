"""Join the losses of the replicas into the loss of the whole batch: see ``graph`` and ``join``."""
