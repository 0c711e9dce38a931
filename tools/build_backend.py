"""What pip builds the project with: setuptools, for editable installs alone: cases, checkpoints and the native
module stay in the tree.
"""

import sys

from setuptools.build_meta import build_editable, get_requires_for_build_editable, prepare_metadata_for_build_editable

__all__ = ["build_editable", "build_wheel", "get_requires_for_build_editable", "prepare_metadata_for_build_editable"]


def build_wheel(*_: object) -> str:
    sys.exit("error: Umbra runs from its folder and installs only as editable: pip install -e .")
