"""GPTQ: packed along the inputs, zero points along the outputs.

qweight int32 (K bits / 32, N), qzeros int32 (K / group, N bits / 32), scales (K / group, N), g_idx int32 (K): each
input's group, in order unless the checkpoint was made with desc_act; w = (level - zero) * scale

Matrices with desc_act are not kept: each expert has an order of its own, for which a product would gather its inputs
anew.
"""

from collections.abc import Iterator

from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.bitpack import covering, groups_of, order_in
from umbra.executor.checkpoint.formats.patterns import MOST_PATTERNS, Matches, pattern
from umbra.executor.checkpoint.formats.scheme import (
    Encoding,
    Fetch,
    Needed,
    Ruled,
    Stored,
    check_sizes,
    in_words,
    kept_as,
)
from umbra.models.hf_config import HfConfig
from umbra.ops.formats import GROUP_SIZES, INTEGERS
from umbra.ops.formats.quantised import Quantised
from umbra.ops.words import Words


class Gptq(Ruled):
    def __init__(self, config: HfConfig):
        config.refuse("checkpoint_format", "gptq", "gptq_v2")
        config.refuse("pack_dtype", "int32")
        # The first version of the format stores zero points less one.
        less = 0 if config.value("checkpoint_format") == "gptq_v2" else 1
        super().__init__(GptqMatrix(config, less), _dynamic(config, less), config.flag("lm_head", False))


class GptqMatrix(Encoding):
    signs = ("qweight",)

    def __init__(self, config: HfConfig, less: int):
        """`less`: what was taken from the zero points that are stored."""
        self.bits = config.one_of("bits", allowed=(4, 8))
        self.group = config.one_of("group_size", allowed=(-1, *GROUP_SIZES))
        self.zeros, self.less = not config.flag("sym", True), less
        meta = config.inner("meta") if config.value("meta") is not None else config
        static = any(holder.flag("static_groups", False) for holder in (config, meta))
        self.ordered = config.flag("desc_act", False) and not static and self.group > 0
        how = self.bits, self.group, self.zeros, self.ordered
        self.title, self.format = f"GPTQ, {in_words(*how)}", kept_as(*how)
        self.exact = not self.ordered or self.format is None

    def stored(self, module: str, rows: int, columns: int) -> Stored:
        count = 32 // self.bits  # levels in a word
        group = self.group if self.group > 0 else columns
        check_sizes(
            module,
            ("columns", columns, "group_size", group),
            ("columns", columns, "a word's", count),
            ("rows", rows, "a word's", count),
        )
        qweight, qzeros, scales, g_idx = (f"{module}.{kind}" for kind in ("qweight", "qzeros", "scales", "g_idx"))
        groups = columns // group

        def read(fetch: Fetch, outputs: slice, inputs: slice) -> Quantised:
            order = order_in(fetch, g_idx, group, self.ordered) if g_idx in fetch else None
            held, within = covering(inputs, count)
            levels = Words(fetch(qweight, held, outputs).T, self.bits)  # (outputs, inputs)
            in_groups, cut = groups_of(inputs, group, order)
            words, among = covering(outputs, count)
            zeros = Words(fetch(qzeros, in_groups, words), self.bits).unpacked()[:, among].T  # (outputs, groups)
            zeros = (zeros + self.less) & ((1 << self.bits) - 1)
            if not self.zeros and (zeros != 1 << (self.bits - 1)).any():
                raise UserError(f"{qzeros}: sym is true, but zero points are not all {1 << (self.bits - 1)}")
            return Quantised(
                INTEGERS[self.bits],
                levels=levels.columns(within),
                scales=cut(fetch(scales, in_groups, outputs).T),
                zeros=cut(zeros) if self.zeros else None,
            )

        tensors = {
            qweight: Needed((columns // count, rows), ("I32",)),
            qzeros: Needed((groups, rows // count), ("I32",)),
            scales: Needed((groups, rows)),
            g_idx: Needed((columns,), ("I32",), optional=not self.ordered),
            f"{module}.bias": Needed((rows,), optional=True, zeros=True),  # AutoGPTQ gave every module one
        }
        return Stored(tensors, read)


def _dynamic(config: HfConfig, less: int) -> Iterator[tuple[Matches, Encoding | None]]:
    """The rules of `dynamic`: patterns after "-:" exclude modules, others give them settings of their own."""
    if config.value("dynamic") is None:
        return
    rules = config.inner("dynamic")
    if len(rules.data) > MOST_PATTERNS:
        raise config.error("dynamic", f"must have {MOST_PATTERNS} patterns or fewer")
    for rule in rules.data:
        matches = pattern(rule.removeprefix("-:").removeprefix("+:"), rules.where)
        if rule.startswith("-:"):
            yield matches, None
        else:
            own = rules.inner(rule)
            yield matches, GptqMatrix(HfConfig({**config.data, **own.data}, own.where), less)
