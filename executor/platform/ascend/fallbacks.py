"""Reports fallbacks that would be silent: a warning with the op's name, an error in a case with `strict: true`.

- torchair issues a Python warning when it gives a graph up; it is caught here.
- torch_npu warns once for each op that runs on the CPU, but not through Python, so nothing here sees it. A strict case
  is started with TORCH_NPU_FALLBACK_CPU_DISABLE=1: the op then raises, and the error becomes one line here.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

from umbra.base.errors import UserError

# "The static_capture_size_limit reached ..., we will fall back to eager for all subsequent executions."
FALLBACK = re.compile(r"fall(?:ing)? ?back", re.IGNORECASE)
# "The operator 'aten::x' would execute ... on CPU ..., but CPU fallback is disabled by TORCH_NPU_..."
REFUSED = re.compile(r"operator '([\w:.]+)'.*CPU fallback is disabled", re.DOTALL)
ABOUT_STRICT = "strict: true makes this an error"


def report(fallback: str, strict: bool) -> None:
    """Print the fallback, or raise it if `strict`."""
    if strict:
        raise UserError(f"strict: true: {fallback}")
    print(f"WARNING: {fallback} ({ABOUT_STRICT})", flush=True)


@contextlib.contextmanager
def loud_fallbacks(strict: bool) -> Iterator[None]:
    """Context in which fallbacks are printed, or raised if `strict`."""
    shown = warnings.showwarning

    def show(message: Warning | str, *where: Any) -> None:
        text = " ".join(str(message).split())
        if FALLBACK.search(text):
            report(text, strict)
        else:
            shown(message, *where)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    except RuntimeError as error:
        if refused := REFUSED.search(str(error)):
            raise UserError(f"strict: true: {refused[1]} has no NPU kernel and would run on the CPU") from error
        raise
    finally:
        warnings.showwarning = shown
