"""The steps of each call of a ``BalancedDataParallel`` or a ``BalancedCriterion``.

A call scatters the inputs, replicates the module, runs the replicas, and joins their outputs or
losses. With ``gather=False``, a ``BalancedDataParallel`` leaves the outputs on their devices.
"""
