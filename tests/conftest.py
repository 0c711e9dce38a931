"""tests/ascend is collected only by a Python that has torch_npu (see test.sh)."""

from importlib.util import find_spec

from hypothesis import settings

collect_ignore = [] if find_spec("torch_npu") else ["ascend"]
# Machines are busy: no test fails for the time it took.
settings.register_profile("umbra", deadline=None)
settings.load_profile("umbra")
