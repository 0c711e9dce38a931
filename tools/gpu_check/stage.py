"""The stages, in their order."""

from dataclasses import dataclass

from umbra.base.errors import UserError
from umbra.models.registry import load
from umbra.tools.npu_check.outcome import Check


@dataclass(frozen=True)
class GpuStage:
    name: str
    about: str
    limit_s: float  # most seconds of the whole stage
    default: bool = True

    def checks(self) -> list[Check]:
        """The cases, from the module of this stage."""
        cases: list[Check] = load(f"tools.gpu_check.stages.{self.name}:checks")()
        return cases


STAGES = (
    GpuStage("machine", "processor, memory, versions, attributes of the GPU", 30),
    GpuStage("build", "the native module, the bridge", 150),
    GpuStage("link", "rates of the link, of registering memory, and of the GPU's own memory", 60),
    GpuStage("bridge", "jobs of the host in eager and captured steps; late, refusing and failing workers", 45),
    GpuStage("latency", "time of a job of the host in a captured step: host functions against the doorbell", 80),
    GpuStage("moves", "experts that become resident within replays", 55),
    GpuStage("watchdog", "a context that dies under a waiting step; the next process works", 55),
    GpuStage("demos", "demo models, all experts resident: the tokens of the same ops on the CPU", 150, default=False),
    GpuStage("kernels", "Triton's kernels: the reference, and the share of the GPU's read rate", 150, default=False),
    GpuStage("graphs", "a captured decode step: 2,000 replays with changed inputs", 60, default=False),
    GpuStage("offload", "the demo and exact experts with experts on the host, moved at random", 150, default=False),
    GpuStage("shares", "8 layers of a 30B model's shapes at shares of residents; what is hidden", 240, default=False),
    GpuStage("steps", "decode of 8 layers of Qwen3-30B-A3B, random weights: tokens/s, launches", 150, default=False),
    GpuStage("cpu_tests", "tests/ops/cpu: kernels of the instruction sets that this processor has", 300, default=False),
)


def chosen(names: str | None) -> list[GpuStage]:
    """The stages of these names, divided by commas; None: those that run by default."""
    if names is None:
        return [stage for stage in STAGES if stage.default]
    known = {stage.name: stage for stage in STAGES}
    for name in names.split(","):
        if name not in known:
            raise UserError(f"no stage {name!r}: choose of {', '.join(known)}")
    return [known[name] for name in names.split(",")]
