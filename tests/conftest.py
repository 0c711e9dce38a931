"""tests/ascend is collected only by a Python that has torch_npu (see test.sh)."""

import gc
from importlib.util import find_spec

from hypothesis import settings

from umbra.base.errors import collect_seldom

collect_ignore = [] if find_spec("torch_npu") else ["ascend"]
# Machines are busy: no test fails for the time it took. `bash test.sh thorough` tries more examples, others each time.
settings.register_profile("umbra", deadline=None, max_examples=20, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=400)
settings.load_profile("umbra")
collect_seldom()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what all tests import, which would be looked through again and again
