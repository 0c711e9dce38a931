"""Turns the errors that PyTorch raises, if the GPU refuses memory or a call, into one line."""

import re

from umbra.base.errors import one_line

NO_MEMORY = re.compile(r"CUDA out of memory\. Tried to allocate (\S+ \S+)\.")
FAILED = re.compile(r"CUDA error: ([^\n]*)|CUDA driver error: ([^\n]*)")


def refusal(error: RuntimeError) -> str:
    """The line of an error for what the GPU refused; empty for other errors."""
    if wanted := NO_MEMORY.search(str(error)):
        return f"out of memory: the GPU has no {wanted[1]} left: lower batch_size or input_max_len, or offload experts"
    if failed := FAILED.search(str(error)):
        return one_line(f"the GPU failed: {failed[1] or failed[2]} (the rank's log has the stack)")
    return ""
