"""The environment variables that Umbra reads: every one is read and checked in this file, but for those of a device,
which its folder reads (executor/platform/DEVICE/environment.py)."""

import os
from dataclasses import dataclass
from pathlib import Path

from umbra.base.errors import UserError


@dataclass(frozen=True)
class RankEnv:
    """This process's position in the job, as torchrun sets it; without torchrun, the only rank of a job of one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    error_file: str  # where torchrun, if it started this process, reads the reason of a failure; else empty

    @property
    def launched(self) -> bool:
        """Says whether torchrun started this process."""
        return bool(self.error_file)


@dataclass(frozen=True)
class NodeEnv:
    """A start on several nodes, by torchrun's own variables."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int


def case_name() -> str | None:
    """The case that run.py runs."""
    return os.environ.get("CASE_NAME")


def serve_socket() -> Path | None:
    """The Unix socket of the front that started these ranks; None: no front did."""
    path = os.environ.get("UMBRA_SERVE_SOCKET")
    return Path(path) if path else None


def use_modelscope() -> bool:
    """Returns whether names of models are those of ModelScope, not of the Hugging Face hub."""
    text = os.environ.get("UMBRA_USE_MODELSCOPE", "").lower()
    if text not in ("", "0", "1", "false", "true"):
        raise UserError(f"environment variable UMBRA_USE_MODELSCOPE={text!r} must be 1 or 0")
    return text in ("1", "true")


def ik_llama() -> Path | None:
    """The folder of a build of ik_llama.cpp, for benchmarks; None: there is none."""
    folder = os.environ.get("IK_LLAMA")
    return Path(folder) if folder else None


def rank_env() -> RankEnv:
    return RankEnv(
        rank=_integer("RANK", 0, minimum=0),
        world_size=_integer("WORLD_SIZE", 1, minimum=1),
        local_rank=_integer("LOCAL_RANK", 0, minimum=0),
        local_world_size=_integer("LOCAL_WORLD_SIZE", 1, minimum=1),
        error_file=os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
    )


def node_env() -> NodeEnv:
    nodes = NodeEnv(
        nnodes=_integer("NNODES", 1, minimum=1),
        node_rank=_integer("NODE_RANK", 0, minimum=0),
        master_addr=os.environ.get("MASTER_ADDR", ""),
        master_port=_integer("MASTER_PORT", 0, minimum=0),
    )
    if nodes.node_rank >= nodes.nnodes:
        raise UserError(f"NODE_RANK={nodes.node_rank} must be below NNODES={nodes.nnodes}")
    if nodes.nnodes > 1 and not (nodes.master_addr and nodes.master_port):
        raise UserError(f"NNODES={nodes.nnodes} also needs MASTER_ADDR and MASTER_PORT, the same on every node")
    return nodes


def _integer(name: str, default: int, minimum: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"environment variable {name}={text!r} is not an integer") from None
    if value < minimum:
        raise UserError(f"environment variable {name}={value} must be at least {minimum}")
    return value
