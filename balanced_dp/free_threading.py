"""What differs on builds of Python that can do without its lock."""

from __future__ import annotations

import functools
import sysconfig
import threading

looking_at_nodes = threading.RLock()
"""Held while nodes of an autograd graph are looked at.

Threads share the nodes of parameters, and torch makes and frees the Python object of a node as if
Python's lock were there: others got an object that was being freed.

Source: ``functionToPyObject`` in torch/csrc/autograd/python_cpp_function.cpp, torch 2.12.
"""


@functools.cache
def is_free_threaded_build() -> bool:
    """Return whether Python was built to run without its lock, whether or not it is on.

    References are counted by each thread there, so the lock makes no difference to that.
    """
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
