"""Compute the loss of the batch from what the replicas computed for their chunks.

Most losses depend on their samples only through means and sums. A replica takes these over its
chunk; the loss of the batch is computed from those over the batch:

1. ``reductions`` notices each mean and sum over samples where torch computes it, and counts the
   entries that it is taken over.
2. ``trace`` records what is computed from them: a division by a count, the sum with a penalty.
3. ``batch_value`` adds up the means and sums of all replicas, and repeats these steps with them.
4. ``join`` does so for the 0-dim outputs of a call, or warns and averages them by chunk size.
"""
