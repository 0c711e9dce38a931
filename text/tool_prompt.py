"""Describes tools in a system message, for chat templates that render calls and results but no tools."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.text.formats import OutputMarks
from umbra.text.tool_arguments import to_json

TOOLS = re.compile(r"(?<![\w.'\"])tools(?![\w'\"])")


def renders_tools(template: str) -> bool:
    """Says whether a chat template reads the variable `tools`."""
    return TOOLS.search(template) is not None


def described(tools: Sequence[Mapping[str, Any]], format: OutputMarks) -> str:
    """Returns a text that describes `tools` and how a call is written in `format`, whose arguments are JSON."""
    functions = "\n".join(to_json(tool["function"]) for tool in tools)
    name, arguments = "NAME", '{"PARAMETER": VALUE}'
    if format.call:
        written = format.call + format.before_name + name + format.before_arguments + arguments + format.after_arguments
        written = f"{format.block}{written}{format.call_end}{format.block_end}"
    else:
        written = f'{format.block}\n{{"name": "{name}", "arguments": {arguments}}}\n{format.block_end}'
    return (
        f"# Tools\n\nYou may call these functions, one JSON object a line:\n{functions}\n\n"
        f"To call one, end your answer with exactly this, with the function's name for {name} and a JSON object of its "
        f"arguments:\n{written}\nThen wait: the next message has the result."
    )


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], format: OutputMarks
) -> list[dict[str, Any]]:
    """Returns `messages` with the description of `tools` at the end of the first system message, or in one of its
    own."""
    text = described(tools, format)
    first = messages[0] if messages and messages[0]["role"] in ("system", "developer") else {}
    said = first.get("content") or ""
    system = {"role": "system", "content": f"{said}\n\n{text}" if said else text}
    return [system, *map(dict, messages[bool(first) :])]
