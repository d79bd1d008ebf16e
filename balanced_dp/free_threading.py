"""Support for free-threaded builds of Python, which can run without the GIL."""

from __future__ import annotations

import sysconfig
import threading

looking_at_nodes = threading.RLock()
"""A lock that a thread must hold while it reads nodes of an autograd graph.

All threads share the nodes that accumulate the gradients of parameters. torch creates and frees the
Python object of such a node as if the GIL were held. So without the GIL and without this lock, one
thread could get an object that another thread is freeing.

Source: ``functionToPyObject`` in torch/csrc/autograd/python_cpp_function.cpp, torch 2.12.
"""


def is_free_threaded_build() -> bool:
    """Return whether this is a free-threaded build of Python, even if its GIL is enabled.

    In such a build, balanced_dp makes new replicas for each call. In other builds, it reuses a
    replica if the reference counts show that nothing else uses it. A free-threaded build has two
    counts for each object, one for the thread that created it and one for all other threads, so
    balanced_dp does not rely on them.
    """
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
