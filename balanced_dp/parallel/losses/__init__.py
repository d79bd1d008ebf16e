"""Join the losses of the replicas: see ``graph`` and ``join``."""
