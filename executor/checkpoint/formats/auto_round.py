"""AutoRound: the tensors of GPTQ, with zero points less one or as they are, or those of AWQ.

`extra_config` has what differs for some modules, by path, or by a pattern that may match anywhere in the path; 16 bits
are floats.
"""

import re
from collections.abc import Callable

from umbra.executor.checkpoint.formats.awq import AwqMatrix
from umbra.executor.checkpoint.formats.gptq import GptqMatrix
from umbra.executor.checkpoint.formats.patterns import MOST_PATTERNS, Matches, pattern
from umbra.executor.checkpoint.formats.scheme import Encoding, Ruled
from umbra.models.hf_config import HfConfig

PACKINGS: dict[str, Callable[[HfConfig], Encoding]] = {
    "auto_round:auto_gptq": lambda config: GptqMatrix(config, less=1),
    "auto_round:gptq": lambda config: GptqMatrix(config, less=1),
    "auto_round": lambda config: GptqMatrix(config, less=0),
    "auto_round:gptqmodel": lambda config: GptqMatrix(config, less=0),
    "auto_round:auto_awq": AwqMatrix,
    "auto_round:awq": AwqMatrix,
}
PATH = re.compile(r"[\w.\-]+")
FLOATS = 16  # bits


class AutoRound(Ruled):
    def __init__(self, config: HfConfig):
        packed = PACKINGS[config.one_of("packing_format", allowed=tuple(PACKINGS))]
        _check(config)
        paths: dict[str, tuple[set[str], Encoding | None]] = {}  # those that are stored alike, by their title
        rules: list[tuple[Matches, Encoding | None]] = []  # of patterns
        own = config.inner("extra_config") if config.value("extra_config") is not None else HfConfig({}, "")
        for name in own.data:
            given = own.inner(name)
            settings = HfConfig({**config.data, **given.data}, given.where)
            encoding = None
            if settings.size("bits") < FLOATS:
                _check(settings)
                encoding = packed(settings)
            if PATH.fullmatch(name):
                paths.setdefault(encoding.title if encoding else "", (set(), encoding))[0].add(name)
            else:
                rules.append((pattern(name, own.where, anywhere=True), encoding))
        if len(rules) > MOST_PATTERNS:
            raise config.error("extra_config", f"must have {MOST_PATTERNS} patterns or fewer")
        exactly = [(names.__contains__, encoding) for names, encoding in paths.values()]
        super().__init__(packed(config), exactly + rules, with_head="lm_head" in own.data)
        self.title = f"AutoRound: {self.title}"


def _check(config: HfConfig) -> None:
    """Refuse what changes more than the storage of weights."""
    config.refuse("data_type", "int")
    config.refuse("act_bits", 16, 32)
    config.refuse("super_bits")
    config.refuse("rotation_config", {})
