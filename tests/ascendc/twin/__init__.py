"""The host twin of Ascend C: compiles unmodified kernels with g++, runs them with checks, counts what they did.

README.md beside this file says what is checked, what is counted and what only hardware can tell.
"""

from tests.ascendc.twin.build import LIBRARY_WORKSPACE, Library, TwinError, build
from tests.ascendc.twin.host import Launch, host
from tests.ascendc.twin.run import Counts, run

__all__ = ["LIBRARY_WORKSPACE", "Counts", "Launch", "Library", "TwinError", "build", "host", "run"]
