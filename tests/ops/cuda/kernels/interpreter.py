"""Triton's interpreter, in which kernels run on CPU tensors. To be imported before Triton is."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

from triton.runtime import interpreter

_patch: Any = interpreter._patch_lang_tensor


def patched(tensor: Any, scope: Any) -> None:
    """As the interpreter's own, with bounds of loops that NumPy 2.4 takes: arrays of one element are no integers."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = patched
