"""The environment variables that Umbra reads; every read is here, every value is checked here."""

import os
from dataclasses import dataclass
from pathlib import Path

from errors import UserError


@dataclass(frozen=True)
class RankEnv:
    """Where this process stands in the job; set by torchrun, all zeros and ones without it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    error_file: str  # where torchrun's engine, if it started us, looks for the reason of a failure

    @property
    def launched(self) -> bool:
        return bool(self.error_file)


@dataclass(frozen=True)
class NodeEnv:
    """Multi-node start, in torchrun's own variables."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int


def case_name() -> str | None:
    return os.environ.get("CASE_NAME")


def cann_home() -> Path | None:
    """Where CANN is installed; its set_env.sh says so."""
    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    return Path(home) if home else None


def custom_operators() -> str:
    """ASCEND_CUSTOM_OPP_PATH: folders of CANN's custom operators, with ":" between them."""
    return os.environ.get("ASCEND_CUSTOM_OPP_PATH", "")


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
