"""The layouts of a model over the devices of a cluster. Which are possible is what the rules of a case say: each layout
is a case, made from the cluster's case with other sizes.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from umbra.base.errors import UserError
from umbra.executor.config.case import MOST_DRAFTING, Case, OffloadSettings
from umbra.executor.config.load import load_case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.units import GB
from umbra.planner.cluster import Cluster
from umbra.planner.machine import Hardware
from umbra.planner.times import Placing, Times, step_times
from umbra.planner.work import CountedRank


@dataclass(frozen=True)
class Sizes:
    """A way to divide a cluster's devices: `replicas` copies of the model, each on `world` ranks."""

    replicas: int
    world: int
    attn_tp: int
    moe_tp: int
    method: str
    resident: float

    @property
    def attn_dp(self) -> int:
        return self.world // self.attn_tp

    @property
    def moe_ep(self) -> int:
        return self.world // self.moe_tp

    def __str__(self) -> str:
        text = f"{self.replicas} x {self.world}: attention tp {self.attn_tp} dp {self.attn_dp}, "
        text += f"experts tp {self.moe_tp} ep {self.moe_ep}"
        text += f", {self.method}" * (self.method not in ("auto", "none"))
        return text + f", {self.resident:.0%} resident" * (self.resident < 1)


def tokens_by_guesses(accepted: Sequence[float]) -> list[float]:
    """The tokens that a step with 0, 1, 2 ... guesses gives a sequence."""
    return list(itertools.accumulate((1.0, *itertools.accumulate(accepted, operator.mul))))


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def sizes_of(cluster: Cluster) -> Iterator[Sizes]:
    """Every way to divide the cluster's devices, possible or not."""
    for method in cluster.search.methods:
        for world in cluster.search.worlds or divisors(cluster.devices):
            for attn_tp in divisors(world):
                for moe_tp in divisors(world):
                    for share in cluster.search.resident:
                        yield Sizes(cluster.devices // world, world, attn_tp, moe_tp, method, share)


def case_of(cluster: Cluster, sizes: Sizes) -> Case:
    """The case of a replica; raises UserError with the rule that the sizes break."""
    length = cluster.load.prompt_tokens + cluster.load.output_tokens
    settings: dict[str, object] = {
        "world_size": sizes.world,
        "attn_tp_size": sizes.attn_tp,
        "moe_tp_size": sizes.moe_tp,
        "embed_tp_size": 0,
        "lmhead_tp_size": 0,
        "quantization.method": sizes.method,
        "batch_size": sizes.attn_dp * cluster.search.most_sequences,
        "input_max_len": length - 1,
        "max_new_tokens": 1,
        "chunked_prefill_size": cluster.search.chunk,
        **{f"offload_config.{field.name}": field.default or 0 for field in fields(OffloadSettings)},
    }
    case = load_case(cluster.case)
    settings |= PLATFORMS[case.platform].layout_settings
    if guesses := len(cluster.guesses.accepted):
        settings["draft_config.tokens"] = guesses
        if case.draft_config.method != "eagle3":
            settings["draft_config.method"] = "mtp"
    return load_case(cluster.case, settings=settings)


def spans_of(world: int, attn_tp: int) -> dict[str, int]:
    """Returns how many neighbouring ranks have all ranks of a rank group, by the group's name."""
    return {"world": world, "attn_dp": world, "attn_tp": attn_tp, "embed_tp": attn_tp, "lmhead_tp": attn_tp}


class Layout:
    """A possible division of a cluster, with the memory and the step times of its ranks."""

    def __init__(self, cluster: Cluster, sizes: Sizes, hardware: Hardware, counted: CountedRank):
        self.cluster, self.sizes, self.hardware, self.counted = cluster, sizes, hardware, counted
        sharing = 1 if sizes.resident == 1 else int(min(hardware.need("host.devices"), cluster.devices))
        spans = spans_of(sizes.world, sizes.attn_tp)
        self.placing = Placing(spans, sizes.resident, sharing)
        self._decoded: dict[int, Times] = {}

    @property
    def all_free_bytes(self) -> float:
        """Memory of a device for keys, values and experts."""
        memory = self.hardware.need("device.memory_gb") - self.hardware.device.reserved_gb
        return memory * GB - self.counted.memory.rest

    @property
    def free_bytes(self) -> float:
        """Memory of a device for KV pages; negative: the weights do not fit."""
        return self.all_free_bytes - self.sizes.resident * self.counted.memory.experts

    @cached_property
    def host_bytes(self) -> float:
        """Bytes of experts that a host holds for the ranks on its devices."""
        return float(self.placing.sharing * self.counted.memory.experts) if self.sizes.resident < 1 else 0.0

    @cached_property
    def sequence_bytes(self) -> int:
        """Memory of the KV pages of a sequence."""
        load = self.cluster.load
        return self.counted.memory.page * self.counted.limits.pages_of(load.prompt_tokens + load.output_tokens)

    @cached_property
    def most_sequences(self) -> int:
        """The most sequences of a group whose KV pages fit."""
        return min(int(self.free_bytes / self.sequence_bytes), self.cluster.search.most_sequences)

    def decode(self, sequences: int) -> Times:
        """A decode step of `sequences` sequences of each group, half of whose answers are there on average."""
        if sequences not in self._decoded:
            load = self.cluster.load
            cached = load.prompt_tokens + load.output_tokens // 2
            self._decoded[sequences] = self.token_times(sequences, cached, self.placing)
        return self._decoded[sequences]

    def token_times(self, sequences: int, cached: int, placing: Placing) -> Times:
        """A decode step or, with guesses, the part of one that a token of each sequence takes: of the number of guesses
        with which that is least."""
        tokens = tokens_by_guesses(self.cluster.guesses.accepted if sequences <= MOST_DRAFTING else ())
        steps = (
            step_times(self.counted.decode(sequences, cached, number), placing, self.hardware).over(gained)
            for number, gained in enumerate(tokens)
        )
        return min(steps, key=lambda times: times.total)

    @cached_property
    def prefill(self) -> Times:
        """The prefill of a prompt in each group at once, in chunks."""
        total, cached, prompt = dict[str, float](), 0, self.cluster.load.prompt_tokens
        while cached < prompt:
            tokens = min(self.cluster.search.chunk, prompt - cached)
            times = step_times(self.counted.prefill(tokens, cached), self.placing, self.hardware)
            total = {part: total.get(part, 0.0) + seconds for part, seconds in times.parts.items()}
            cached += tokens
        return Times(total)


def make_layout(cluster: Cluster, sizes: Sizes, hardware: Hardware) -> Layout:
    """Raises UserError with the rule that the sizes break, or with what does not fit."""
    case = case_of(cluster, sizes)
    if case.platform != hardware.platform:
        raise UserError(f"case {case.name} runs on {case.platform}, hardware {hardware.name} is {hardware.platform}")
    layout = Layout(cluster, sizes, hardware, CountedRank(case))
    if sizes.resident < 1 and not layout.counted.expert_layers:
        raise UserError("a dense model has no experts that a host could hold")
    if layout.most_sequences < 1:
        missing = layout.sequence_bytes - layout.free_bytes
        raise UserError(f"does not fit: {missing / GB:.1f} GB of a device's memory are missing")
    if layout.host_bytes > (room := hardware.host.memory_gb or 0.0) * GB:
        raise UserError(f"does not fit: a host holds {layout.host_bytes / GB:.0f} GB of experts in {room:.0f} GB")
    return layout
