"""modelopt: NVFP4 (nvfp4.py), FP8 with one scale a matrix, or some modules in each.

config.json has `quantization_config` with `quant_algo` and `ignore`, or else hf_quant_config.json has `quantization`
with `quant_algo` and `exclude_modules`. With MIXED_PRECISION, `quantized_layers` has the `quant_algo` of each module.
Names may have "*" in them, and those of modules mean all that is inside.
"""

from fnmatch import fnmatchcase

from umbra.executor.checkpoint.formats.fp8 import Fp8Matrix
from umbra.executor.checkpoint.formats.nvfp4 import Nvfp4Matrix
from umbra.executor.checkpoint.formats.patterns import LONGEST, MOST_PATTERNS
from umbra.executor.checkpoint.formats.scheme import Encoding, Scheme
from umbra.models.hf_config import HfConfig

FILE = "hf_quant_config.json"
NAMES = {"NVFP4": "NVFP4", "W4A16_NVFP4": "NVFP4", "FP8": "FP8"}
MIXED = "MIXED_PRECISION"
MOST_STARS = 4  # of a name


class ModelOpt(Scheme):
    """Scales of activations and of the KV cache do not change weights, so they are not read."""

    def __init__(self, config: HfConfig):
        algorithm = config.one_of("quant_algo", allowed=(*NAMES, MIXED))
        ways: dict[str, Encoding] = {"NVFP4": Nvfp4Matrix(divided=False), "FP8": Fp8Matrix("weight_scale", "tensor")}
        self.layers: dict[str, Encoding] = {}
        if algorithm == MIXED:
            layers = config.inner("quantized_layers")
            for name in layers.data:
                kind = layers.inner(name).one_of("quant_algo", allowed=tuple(NAMES))
                self.layers[name] = ways[NAMES[kind]]
        self.main = None if algorithm == MIXED else ways[NAMES[algorithm]]
        used = {*self.layers.values(), self.main}
        self.encodings = tuple(way for way in ways.values() if way in used)
        if not self.encodings:
            raise config.error("quantized_layers", "must name the quantised modules")
        self.excluded = (*config.names("ignore"), *config.names("exclude_modules"))
        if len(self.excluded) > MOST_PATTERNS or any(
            len(n) > LONGEST or n.count("*") > MOST_STARS for n in self.excluded
        ):
            raise config.error("ignore", f"must be at most {MOST_PATTERNS} names with at most {MOST_STARS} '*' in each")
        self.title = f"modelopt {', '.join(way.title for way in self.encodings)}"

    def said(self, *spellings: str) -> Encoding | None:
        around = [path for module in spellings for path in _around(module)]
        if "lm_head" in spellings and "lm_head" not in self.layers:
            return None
        if any(fnmatchcase(path, name) for name in self.excluded for path in around):
            return None
        return next((self.layers[path] for path in around if path in self.layers), self.main)


def _around(module: str) -> list[str]:
    """The paths of the module and of those that it is in."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
