"""The front door: `from umbra import LLM, SamplingParams` and `python -m umbra` (cli.py); only calls what lies below.

Light, since every module of the project imports umbra.errors. Refuses to start where another's module has the name of
one of the project's packages and is found first.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.engine.request import SamplingParams
    from text.chat import Chat
    from text.parser import Part
    from umbra.llm import LLM, Reply

__all__ = ["LLM", "Chat", "Part", "Reply", "SamplingParams"]
HOMES = {
    "LLM": "umbra.llm",
    "Chat": "text.chat",
    "Part": "text.parser",
    "Reply": "umbra.llm",
    "SamplingParams": "executor.engine.request",
}
PACKAGES = ("executor", "models", "ops", "serving", "text", "cpu_offload", "planner")
FOLDER = Path(__file__).parents[1]  # that all of them lie in


def __getattr__(name: str) -> Any:
    """Imports a name at its first use, so that `python -m umbra --help` does not import torch."""
    if name not in HOMES:
        raise AttributeError(f"module 'umbra' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES[name]), name)


def check_packages(*names: str) -> None:
    """Raises ImportError if what Python finds under one of `names` is not the project's; the command line says so and
    ends."""
    for name in names:
        spec = find_spec(name)
        if spec is None or not spec.origin or Path(spec.origin).is_relative_to(FOLDER):
            continue
        found = Path(spec.origin)
        found = found.parent if found.name == "__init__.py" else found
        shown = f"./{found.relative_to(Path.cwd())}" if found.is_relative_to(Path.cwd()) else found
        line = f"{shown} hides Umbra's package {name!r}: rename it or run from another folder"
        if sys.argv[0] == "-m" or Path(sys.argv[0]).name == "umbra":
            print(f"error: {line}", file=sys.stderr)
            sys.exit(2)
        raise ImportError(line)


check_packages(*PACKAGES)
