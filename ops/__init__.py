"""The ops that models are written in: their signatures (`interface.py`), meaning (`reference.py`) and implementations.

The platform makes the ops of `ops/ascend` for its device; the other implementations are modules.
"""

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # the launcher imports ops.ascend.vector_core and must start quickly
    from ops.interface import Ops

IMPLEMENTATIONS = {
    "reference": "ops.reference",
    "cpu": "ops.cpu",
}


def load_ops(name: str) -> "Ops":
    """Imports and returns the implementation `name`."""
    return cast("Ops", importlib.import_module(IMPLEMENTATIONS[name]))
