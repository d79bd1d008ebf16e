"""A call of ``BalancedDataParallel``: scatter, replicate, run, gather or compute the loss."""
