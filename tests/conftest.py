"""tests/ascend is collected only by a Python that has torch_npu (see test.sh)."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch_npu") else ["ascend"]
