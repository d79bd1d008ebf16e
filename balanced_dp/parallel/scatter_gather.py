"""The functions of ``scatter`` and ``gather`` in one place, as in ``torch.nn.parallel``."""

from .gather import ScalarOutputs, gather
from .scatter import Scattered, find_batch_size, scatter, scatter_arguments

__all__ = [
    "ScalarOutputs",
    "Scattered",
    "find_batch_size",
    "gather",
    "scatter",
    "scatter_arguments",
]
