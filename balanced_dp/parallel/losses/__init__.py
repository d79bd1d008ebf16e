"""Compute the loss of the batch from the losses of its chunks.

A loss is a sum of terms, and each term is a mean or a sum over samples. A mean over the batch is
the mean of those over the chunks, weighted by their numbers of entries; sums are added up. These
steps find out which of the two a term is, and over how many entries:

1. ``counted`` counts the targets of each cross entropy where torch computes it.
2. ``calls`` notes the calls of torch functions where autograd records no graph.
3. ``graph`` walks the graph of a loss and returns its terms.
4. ``join`` adds up the losses of the chunks by these terms.
"""
