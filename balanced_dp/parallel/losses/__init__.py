"""What the loss of a chunk is a mean or a sum over, and the loss of the batch that follows."""
