"""The steps of a call of ``BalancedDataParallel``.

They scatter the inputs, replicate the module, run the replicas, and gather the outputs or compute
the loss.
"""
