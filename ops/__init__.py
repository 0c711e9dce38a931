"""The ops that models are computed with: their signatures (interface.py), their meaning (reference.py), how weights are
kept (format.py), and one folder for each implementation. A platform may create its ops with its device; the other
implementations are modules.
"""

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # the launcher imports packages of this one and must start quickly
    from umbra.ops.interface import Ops

IMPLEMENTATIONS = {"reference": "umbra.ops.reference", "cpu": "umbra.ops.cpu.ops"}


def load_ops(name: str) -> "Ops":
    """Imports and returns the implementation `name`."""
    return cast("Ops", importlib.import_module(IMPLEMENTATIONS[name]))
