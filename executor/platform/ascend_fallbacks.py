"""Makes silent fallbacks loud: what torch_npu and torchair only mention in passing is told as a warning of ours, with
the op's name, and is an error in a case with `strict: true`."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

from errors import UserError

# torch_npu: "The operator 'aten::x' is not currently supported on the NPU backend and will fall back to run on ..."
# torchair: "The static_capture_size_limit reached ..., we will fall back to eager for all subsequent executions."
FALLBACK = re.compile(r"fall(?:ing)? ?back", re.IGNORECASE)
ABOUT_STRICT = "--set strict=true makes this an error"


def tell(fallback: str, strict: bool) -> None:
    if strict:
        raise UserError(f"strict: true: {fallback}")
    print(f"WARNING: {fallback} ({ABOUT_STRICT})", flush=True)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextlib.contextmanager
def loud_fallbacks(logger: logging.Logger, strict: bool) -> Iterator[None]:
    """Tells of every fallback that the block's warnings, or what it logs to `logger`, speak of."""
    listener = _Listener()
    logger.addHandler(listener)
    shown = warnings.showwarning

    def show(message: Warning | str, *where: object) -> None:
        if FALLBACK.search(str(message)):
            listener.heard.append(str(message))
        else:
            shown(message, *where)  # type: ignore[arg-type]

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = shown
        logger.removeHandler(listener)
    for text in dict.fromkeys(" ".join(t.split()) for t in listener.heard if FALLBACK.search(t)):
        tell(text, strict)
