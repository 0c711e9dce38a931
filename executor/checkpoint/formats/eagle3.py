"""The checkpoint of an EAGLE3 head: floats, and integers that say which tokens it can guess."""

from umbra.executor.checkpoint.formats.scheme import Needed, Stored, Unquantised
from umbra.models.eagle3_config import ALIASES
from umbra.models.layers.eagle3 import TOKENS


class Eagle3(Unquantised):
    title, aliases = "an EAGLE3 head", ALIASES

    def weight(self, name: str, shape: tuple[int, ...], linear: bool) -> Stored | None:
        if name != TOKENS:
            return None
        return Stored({name: Needed(shape, ("I64", "I32"))}, lambda fetch, *part: fetch(name, *part))
