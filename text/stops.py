"""Finds stop strings in text that comes in pieces."""

from collections.abc import Iterable, Sequence

from umbra.text.formats import MESSAGE, Mark


class Stops:
    """Passes text on up to the stop string that is complete first; of several that end together, the longest counts.
    Held back is only a tail that is the beginning of a stop string. If `shown`, the stop string is passed on too."""

    def __init__(self, stops: Sequence[str], shown: bool = False):
        self.stops, self.shown = tuple(stops), shown
        self.stop = ""  # the one that is complete
        self._beginnings = {stop[:end] for stop in stops for end in range(1, len(stop))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""
        self._in_header = False  # after a mark that is a token: what is not shown is not searched

    @property
    def stopped(self) -> bool:
        return bool(self.stop)

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string. After a stop string, there is none."""
        if not self.stops or self.stopped:
            return "" if self.stopped else text
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            end, at, self.stop = min(ends)
            self._held = ""
            return text[: end if self.shown else at]
        tail = next((k for k in range(min(self._longest, len(text)), 0, -1) if text[-k:] in self._beginnings), 0)
        self._held = text[len(text) - tail :]
        return text[: len(text) - tail]

    def pieces(self, pieces: Iterable[str]) -> list[str]:
        """Does the same with pieces of which some are marks that are tokens: no stop string goes beyond one."""
        passed: list[str] = []
        for piece in pieces:
            if self.stopped:
                break
            if isinstance(piece, Mark):
                passed += [self.finish(), piece]
                self._in_header = piece != MESSAGE
            else:
                passed.append(piece if self._in_header else self.push(piece))
        return [piece for piece in passed if piece]

    def finish(self) -> str:
        """Returns what was held back, when the output has ended."""
        held, self._held = self._held, ""
        return held
