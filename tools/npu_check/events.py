"""The file through which the process of a stage tells what it does: a line of JSON at each begin and end of a case."""

import json
from pathlib import Path

from umbra.tools.npu_check.outcome import Outcome


class Events:
    def __init__(self, path: Path):
        self.path = path

    def begin(self, case: str) -> None:
        self._add({"begin": case})

    def end(self, outcome: Outcome) -> None:
        self._add({"end": outcome.to_json()})

    def read(self) -> tuple[list[Outcome], str | None]:
        """(outcomes so far, the case that has begun and not ended)"""
        done: list[Outcome] = []
        begun = None
        for line in self.path.read_text().splitlines() if self.path.is_file() else []:
            try:
                event = json.loads(line)
            except ValueError:  # the last line of a process that was killed
                continue
            begun = event.get("begin")
            if end := event.get("end"):
                done.append(Outcome.from_json(end))
        return done, begun

    def _add(self, event: dict[str, object]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(event) + "\n")
