"""The front door: `from umbra import LLM, SamplingParams` and `python -m umbra` (cli.py); only calls what lies below.

The folders of the project (models/, ops/, executor/, ...) are sub-packages by the links beside this file.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbra.executor.engine.schedule.request import SamplingParams
    from umbra.llm import LLM, Reply
    from umbra.text.answer import Part
    from umbra.text.chat import Chat

__all__ = ["LLM", "Chat", "Part", "Reply", "SamplingParams"]
HOMES = {
    "LLM": "umbra.llm",
    "Chat": "umbra.text.chat",
    "Part": "umbra.text.answer",
    "Reply": "umbra.llm",
    "SamplingParams": "umbra.executor.engine.schedule.request",
}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use, so that `python -m umbra --help` does not import torch."""
    if name not in HOMES:
        raise AttributeError(f"module 'umbra' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(HOMES[name]), name)
