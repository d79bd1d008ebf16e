"""A torch.nn.DataParallel that gives the first GPU a smaller share of the batch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    # Type checkers do not run __getattr__, so they read the names here. This line never runs.
    from .api import *  # noqa: F403
else:
    # The module api imports torch, which takes seconds. The help of the command line does not need
    # torch. So api is imported only when one of its names is used.
    def __getattr__(name: str) -> Any:
        api = import_module(".api", __name__)
        if name in globals():  # a submodule, which api has imported
            return globals()[name]
        if name == "__all__":
            return sorted(public for public in vars(api) if not public.startswith("_"))
        return getattr(api, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
