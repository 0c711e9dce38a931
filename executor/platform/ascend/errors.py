"""Turns the errors that torch_npu raises, if the device refuses memory or a call, into one line. Lost connections
(ERR02 DIST) are another matter: `lost_rank` of facts.py."""

import re

from umbra.base.errors import one_line

NO_MEMORY = re.compile(r"NPU out of memory\. Tried to allocate (\S+ \S+)")
FAILED = re.compile(r"ERR\d{5} (PTA|OPS|GRAPH)|NPU function error|ACL \w+ synchronize failed|\baclrt\w+: error \d+$")
OF_EXPERTS = re.compile(r"^layer \d+, step \d+: [^:]+: ")  # what a step with shadow experts says first


def refusal(error: RuntimeError) -> str:
    """The line of an error for what the NPU refused; empty for other errors."""
    if wanted := NO_MEMORY.search(str(error)):
        return f"out of memory: the NPU has no {wanted[1]} left: lower batch_size or input_max_len, or use more ranks"
    if not FAILED.search(str(error)):
        return ""
    # The first line is torch_npu's, the first one after its code is CANN's.
    said, _, cann = str(error).partition("[ERROR]")
    where = "".join(OF_EXPERTS.findall(said))
    said = where + said[max(said.find("NPU function error"), len(where)) :]  # without a place in torch_npu's sources
    reasons = [said.strip().partition("\n")[0], *cann.strip().split("\n")[1:2]]
    why = "; ".join(reason[:500] for reason in reasons if reason)
    return one_line(f"the NPU failed: {why} (the rank's log has the stack, ~/ascend/log what the device did)")
