"""tests/ascend and tests/triton are each collected only by a Python of their own (see test.sh): one that has torch_npu,
and one whose Triton interprets."""

import os
from importlib.util import find_spec

collect_ignore = [] if find_spec("torch_npu") else ["ascend"]
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("triton")
