"""The front door: `from umbra import LLM, SamplingParams` and `python -m umbra` (cli.py); only calls into executor/."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.engine.request import SamplingParams
    from executor.run.report import Completion
    from text.chat import Chat
    from umbra.llm import LLM

__all__ = ["LLM", "Chat", "Completion", "SamplingParams"]
HOMES = {
    "LLM": "umbra.llm",
    "Chat": "text.chat",
    "Completion": "executor.run.report",
    "SamplingParams": "executor.engine.request",
}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use, so that `python -m umbra --help` does not import torch."""
    if name not in HOMES:
        raise AttributeError(f"module 'umbra' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES[name]), name)
