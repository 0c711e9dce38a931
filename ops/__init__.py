"""How things are computed: one signature per op (`interface.py`), its meaning (`reference.py`), implementations.

`ops/ascend` is made with a device, by its platform; the others are modules.
"""

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # the launcher, which must be quick, asks ops.ascend.vector_core what is built
    from ops.interface import Ops

IMPLEMENTATIONS = {
    "reference": "ops.reference",
    "cpu": "ops.cpu",
}


def load_ops(name: str) -> "Ops":
    """The implementation `name`, imported only now."""
    return cast("Ops", importlib.import_module(IMPLEMENTATIONS[name]))
