"""Makes silent fallbacks loud: a warning with the op's name, an error in a case with `strict: true`.

torchair warns of a graph that is given up   told from here
torch_npu warns of an op run on the CPU      by itself, once an op, past Python: no handler hears it. A strict case is
                                             started with TORCH_NPU_FALLBACK_CPU_DISABLE=1, and then the op raises;
                                             that becomes one line here
"""

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

from errors import UserError

# "The static_capture_size_limit reached ..., we will fall back to eager for all subsequent executions."
FALLBACK = re.compile(r"fall(?:ing)? ?back", re.IGNORECASE)
# "The operator 'aten::x' would execute ... on CPU ..., but CPU fallback is disabled by TORCH_NPU_..."
REFUSED = re.compile(r"operator '([\w:.]+)'.*CPU fallback is disabled", re.DOTALL)
ABOUT_STRICT = "--set strict=true makes this an error"


def tell(fallback: str, strict: bool) -> None:
    if strict:
        raise UserError(f"strict: true: {fallback}")
    print(f"WARNING: {fallback} ({ABOUT_STRICT})", flush=True)


@contextlib.contextmanager
def loud_fallbacks(strict: bool) -> Iterator[None]:
    shown = warnings.showwarning

    def show(message: Warning | str, *where: Any) -> None:
        text = " ".join(str(message).split())
        if FALLBACK.search(text):
            tell(text, strict)
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
