"""The steps that a ``BalancedDataParallel`` goes through each time it is called.

They scatter the inputs, replicate the module, run the replicas, and gather the outputs or compute
the loss.
"""
