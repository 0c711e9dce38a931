"""The host twin of Ascend C: compiles unmodified kernels with g++, runs them with checks, counts what they did.

README.md beside this file says what is checked, what is counted and what only hardware can tell.
"""

from tests.fakes.ascend_c.build import LIBRARY_WORKSPACE, Library, TwinError, build, check, clang
from tests.fakes.ascend_c.host import Launch, host
from tests.fakes.ascend_c.run import Counts, run

__all__ = ["LIBRARY_WORKSPACE", "Counts", "Launch", "Library", "TwinError", "build", "check", "clang", "host", "run"]
