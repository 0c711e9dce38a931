"""The front door: `from umbra import LLM, SamplingParams` and `python -m umbra` (cli.py); only calls what lies below.

Light, since every module of the project imports umbra.errors.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.engine.request import SamplingParams
    from text.answer import Part
    from text.chat import Chat
    from umbra.llm import LLM, Reply

__all__ = ["LLM", "Chat", "Part", "Reply", "SamplingParams"]
HOMES = {
    "LLM": "umbra.llm",
    "Chat": "text.chat",
    "Part": "text.answer",
    "Reply": "umbra.llm",
    "SamplingParams": "executor.engine.request",
}
PACKAGES = ("executor", "models", "ops", "serving", "text", "cpu_offload", "planner", "tools")
FOLDER = Path(__file__).parents[1]  # that all of them lie in


def __getattr__(name: str) -> Any:
    """Imports a name at its first use, so that `python -m umbra --help` does not import torch."""
    if name not in HOMES:
        raise AttributeError(f"module 'umbra' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES[name]), name)


class OwnPackages(MetaPathFinder):
    """Finds the project's packages in its own folder, also where the folder of a user's script has a `models.py` or
    another module of such a name. To that script, `import models` then gives the project's."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [str(FOLDER)]) if fullname in PACKAGES else None


def check_imported() -> None:
    """Raises ImportError if a user's own module of a package's name was imported before."""
    for name in PACKAGES:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and not Path(file).is_relative_to(FOLDER):
            line = f"{file} is imported as {name!r}, the name of a package of Umbra: give it another name"
            raise ImportError(line)


check_imported()
sys.meta_path.insert(0, OwnPackages())
