"""GPTQ: packed along the inputs, zero points along the outputs.

qweight int32 (K bits / 32, N), qzeros int32 (K / group, N bits / 32), scales (K / group, N), g_idx int32 (K): each
input's group, in order unless the checkpoint was made with desc_act; w = (level - zero) * scale
"""

import torch

from executor.checkpoint.formats.bitpack import covering, groups_of
from executor.checkpoint.formats.patterns import Matches, pattern
from executor.checkpoint.formats.scheme import (
    Encoding,
    Fetch,
    Needed,
    Scheme,
    Stored,
    check_sizes,
    in_words,
    kept_as,
)  # fmt: skip
from models.hf_config import HfConfig
from ops.format import GROUP_SIZES, Quantised
from ops.words import Words
from umbra.errors import UserError


class Gptq(Scheme, Encoding):
    signs = ("qweight",)

    def __init__(self, config: HfConfig):
        if config.value("desc_act", default=False) is not False:
            raise config.error(
                "desc_act", "is not supported: it scatters each group's inputs over the matrix; take a version of the "
                "checkpoint made with desc_act: false"
            )  # fmt: skip
        self.bits = config.one_of("bits", allowed=(4, 8))
        self.group = config.one_of("group_size", allowed=(-1, *GROUP_SIZES))
        self.zeros = not config.flag("sym", True)
        # The first version of the format stores zero points less one.
        self.less = 0 if config.value("checkpoint_format", default="gptq") == "gptq_v2" else 1
        config.refuse("checkpoint_format", "gptq", "gptq_v2")
        config.refuse("pack_dtype", "int32")
        self.with_head = config.flag("lm_head", False)
        self.excluded = _excluded(config)
        self.title = f"GPTQ, {in_words(self.bits, self.group, self.zeros)}"
        self.format, self.encodings = kept_as(self.bits, self.group, self.zeros), (self,)

    def said(self, module: str) -> Encoding | None:
        """Every module of the decoder is quantised, except those that `dynamic` excludes; the head if the config says
        so."""
        if any(matches(module) for matches in self.excluded):
            return None
        return self if ".layers." in module or (self.with_head and module == "lm_head") else None

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        count = 32 // self.bits  # levels in a word
        group = self.group if self.group > 0 else columns
        check_sizes(
            module, ("columns", columns, "group_size", group), ("columns", columns, "a word's", count),
            ("rows", rows, "a word's", count),
        )  # fmt: skip
        qweight, qzeros, scales, g_idx = (f"{module}.{kind}" for kind in ("qweight", "qzeros", "scales", "g_idx"))
        groups = columns // group

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            in_order = torch.arange(inputs.start, inputs.stop, dtype=torch.int32) // group
            if g_idx in fetch and not torch.equal(fetch(g_idx, inputs), in_order):
                raise UserError(f"{g_idx}: inputs are not in the order of their groups: desc_act is not supported")
            held, within = covering(inputs, count)
            levels = Words(fetch(qweight, held, outputs).T, self.bits)  # (outputs, inputs)
            in_groups, cut = groups_of(inputs, group)
            in_words, among = covering(outputs, count)
            zeros = Words(fetch(qzeros, in_groups, in_words), self.bits).unpacked()[:, among].T  # (outputs, groups)
            zeros = (zeros + self.less) & ((1 << self.bits) - 1)
            if not self.zeros and (zeros != 1 << (self.bits - 1)).any():
                raise UserError(f"{qzeros}: sym is true, but zero points are not all {1 << (self.bits - 1)}")
            return Quantised(
                bits=self.bits,
                levels=levels.columns(within),
                scales=cut(fetch(scales, in_groups, outputs).T),
                zeros=cut(zeros) if self.zeros else None,
            )

        tensors = {
            qweight: Needed((columns // count, rows), ("I32",)),
            qzeros: Needed((groups, rows // count), ("I32",)),
            scales: Needed((groups, rows)),
            g_idx: Needed((columns,), ("I32",), optional=True),
            f"{module}.bias": Needed((rows,), optional=True, zeros=True),  # AutoGPTQ gave every module one
        }
        return Stored(tensors, read)


def _excluded(config: HfConfig) -> list[Matches]:
    """The patterns of `dynamic`: "-:" excludes modules; "+:" gives them settings of their own, which is refused."""
    if config.value("dynamic") is None:
        return []
    rules = config.inner("dynamic")
    for rule in rules.data:
        if not rule.startswith("-:"):
            raise rules.error(rule, "gives modules settings of their own, which is not implemented")
    return [pattern(rule[2:], rules.where) for rule in rules.data]
