"""The stages, in their order, and what each of them needs of the others."""

from dataclasses import dataclass
from pathlib import Path

from umbra.base.errors import UserError
from umbra.models.registry import load
from umbra.tools.npu_check.outcome import Check

DEVICE, CPU, BRIDGE, OPERATORS = (
    "device",
    "native CPU module",
    "bridge",
    "vector-core operators",
)  # cases of stages 1, 2
TWO_AIV, CAPTURES = "2 ranks, AIV", "npugraph_ex"  # cases of the stages collectives and graphs


@dataclass(frozen=True)
class Stage:
    number: int
    name: str
    about: str
    needs: tuple[str, ...]  # "stage/case", or the name of a whole stage
    limit_s: float  # most seconds of one case

    def checks(self, logs: Path) -> list[Check]:
        """The cases, from the module of this stage. Ranks that they start leave their logs in `logs`."""
        cases: list[Check] = load(f"tools.npu_check.stages.{self.name}:checks")(logs)
        return cases


ON_DEVICE = (f"versions/{DEVICE}",)
STAGES = (
    Stage(1, "versions", "driver, CANN, torch, torch_npu; is this set supported, is there a device", (), 120),
    Stage(2, "builds", "native CPU module, bridge, operators of the vector cores", (), 1800),
    Stage(3, "operators", "each operator that Umbra calls, against its reference", ON_DEVICE, 180),
    Stage(
        4,
        "kernels",
        "Umbra's own operators of the vector cores, against their reference; their times",
        (*ON_DEVICE, f"builds/{OPERATORS}"),
        300,
    ),
    Stage(
        5,
        "graphs",
        "captured graph, GE, acl_graph, npugraph_ex: logits as in eager mode",
        (*ON_DEVICE, f"builds/{CPU}"),
        600,
    ),
    Stage(6, "collectives", "2 ranks, then one on each die; eager and captured; on vector cores", ON_DEVICE, 400),
    Stage(
        7, "bridge", "calls of the host inside a capture; a host that is late", (*ON_DEVICE, f"builds/{BRIDGE}"), 120
    ),
    Stage(
        8,
        "overlap",
        "collectives on the vector cores beside kernels on them",
        (f"builds/{OPERATORS}", f"collectives/{TWO_AIV}"),
        300,
    ),
    Stage(
        9,
        "shadows",
        "the demo model with experts on the CPU inside the captured step",
        (f"builds/{CPU}", "bridge", f"graphs/{CAPTURES}"),
        600,
    ),
    Stage(10, "model", "the demo model on 1 rank and on 8, against the CPU", (*ON_DEVICE, f"builds/{CPU}"), 900),
)


def find(name: str) -> Stage:
    """The stage of this name or number."""
    for stage in STAGES:
        if name in (stage.name, str(stage.number)):
            return stage
    raise UserError(f"no stage {name!r}: choose a number or a name of {', '.join(s.name for s in STAGES)}")
