"""What differs in free-threaded builds of Python."""

from __future__ import annotations

import sysconfig
import threading

looking_at_nodes = threading.RLock()
"""A lock to hold while reading nodes of an autograd graph.

Threads share the nodes of parameters. torch creates and frees the Python object of a node as if
the GIL were held, so another thread could get an object that is being freed.

Source: ``functionToPyObject`` in torch/csrc/autograd/python_cpp_function.cpp, torch 2.12.
"""


def is_free_threaded_build() -> bool:
    """Return whether this is a free-threaded build of Python, even if its GIL is enabled.

    With or without the GIL, such a build counts references separately for each thread.
    """
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
