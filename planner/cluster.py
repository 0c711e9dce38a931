"""The input of `umbra plan --cluster FILE`: a model, machines, traffic, and the times that users accept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from umbra.base.errors import UserError
from umbra.cpu_offload.planner.hits import CURVES, curve_of
from umbra.executor.config.load import read_yaml, set_keys
from umbra.executor.config.schema import key, read, section

METHODS = ("auto", "none", "q8", "q4")
DOCS = "docs/cluster_keys.md"


@dataclass(frozen=True)
class Load:
    rate: float = key(1.0, "requests a second, on all devices together", minimum=1e-6)
    prompt_tokens: int = key(1024, "tokens of a prompt, on average", minimum=1)
    output_tokens: int = key(256, "tokens of an answer, on average", minimum=2)


@dataclass(frozen=True)
class Targets:
    ttft_ms: float = key(5000.0, "longest time to the first token", minimum=1e-3)
    tpot_ms: float = key(100.0, "longest time between two tokens", minimum=1e-3)


@dataclass(frozen=True)
class Search:
    """The values that are tried; every layout of these is counted."""

    methods: tuple[str, ...] = key(("none",), "quantization.method of the weights: auto, none, q8, q4")
    resident: tuple[float, ...] = key((1.0,), "shares of the experts that the devices hold; hosts compute the rest")
    worlds: tuple[int, ...] = key((), "ranks of a replica; empty: every number that divides the devices")
    most_sequences: int = key(256, "most sequences of a data-parallel group at once", minimum=1)
    chunk: int = key(4096, "most tokens of a prefill step of a data-parallel group", minimum=1)


@dataclass(frozen=True)
class Guesses:
    accepted: tuple[float, ...] = key(
        (),
        "speculative decoding: for each position, how often a draft by an MTP layer or the case's EAGLE3 head is right "
        "if those before it are; empty: none",
    )


@dataclass(frozen=True)
class Card:
    """The questions of a file about one device that holds a part of a model's experts."""

    models: tuple[str, ...] = key(
        (),
        "cases, or names in planner/models/: how fast one device and its host serve each; empty: the file asks for "
        "layouts",
    )
    curves: tuple[str, ...] = key(
        ("even",), f"hit rates of residents, as SHARE:RATE,... or by name: {', '.join(CURVES)}"
    )
    sequences: tuple[int, ...] = key((1, 4, 8), "sequences that are decoded at once")
    accepted: tuple[float, ...] = key(
        (), "speculative decoding: how often a draft of an MTP layer is right: each is tried"
    )
    prompts: tuple[int, ...] = key((128, 1024, 8192, 32768), "tokens of prompts")
    links: tuple[float, ...] = key((), "values of host.copy_gbps; empty: the hardware's")


@dataclass(frozen=True)
class Day:
    """The loads of the hours of a day, from midnight on: 24 numbers each, or none if all hours are alike."""

    rates: tuple[float, ...] = key((), "requests a second in each hour of the day, 24 numbers; empty: always load.rate")
    prompt_tokens: tuple[int, ...] = key((), "the same for load.prompt_tokens")
    output_tokens: tuple[int, ...] = key((), "the same for load.output_tokens")
    repeats: tuple[float, ...] = key((), "share of prompts with a shared beginning; empty: all, if there are any")
    minutes: float = key(
        60.0, "how long each hour lasts: fewer minutes stand for it in less time", minimum=1, maximum=60
    )

    @property
    def hour_s(self) -> float:
        return 60 * self.minutes


@dataclass(frozen=True)
class SimulationSettings:
    """The traffic of `--simulate` and what it runs on."""

    requests: int = key(10_000, "most requests", minimum=1, maximum=100_000_000)
    hours: float = key(0.0, "hours of the day in which they come; 0: until there were as many as `requests`", minimum=0)
    day: Day = section(Day)
    seed: int = key(0, "equal seeds give equal results", minimum=0)
    trace: str = key("", "a file of requests, a JSON object a line: at (seconds), prompt, output (tokens)")
    spread: float = key(0.0, "standard deviation of the lengths, in means", minimum=0, maximum=10)
    longest: int = key(8192, "most tokens of a sequence; longer prompts and answers are cut to half of it", minimum=4)
    prefixes: int = key(0, "number of different beginnings that prompts share", minimum=0, maximum=1_000_000)
    prefix_tokens: int = key(0, "tokens of such a beginning", minimum=0)
    prefix_cache: bool = key(True, "whether pages of ended sequences are kept for later prompts")
    router: str = key("least_loaded", "which replica gets a request", choices=("least_loaded", "prefix_aware"))
    reserve: int = key(256, "tokens beyond its prompt that a sequence is promised memory for", minimum=1)
    mixed_tokens: int = key(
        512,
        "most prompt tokens of a step in which others decode; 0: as many as a server takes, which learns how long "
        "they take (serve_config.prefill_pause_ms of the case)",
        minimum=0,
    )
    front_ms: float = key(0.0, "time that a server takes for a request outside its steps", minimum=0)
    front_token_us: float = key(0.0, "the same for each token: these wait for each other", minimum=0)
    memory: str = key(
        "fixed",
        "how the devices' memory is divided between experts and other things: fixed, elastic as "
        "offload_config.mode says, or all: the same traffic with every share of search.resident, and elastic",
        choices=("fixed", "elastic", "all"),
    )
    skew: float = key(1.0, "standard deviation of the logarithm of how often experts are used", minimum=0, maximum=5)
    rank_failure_hours: float = key(0.0, "mean time between failures of a rank; 0: none fails", minimum=0)
    restart_s: float = key(60.0, "seconds to restart a replica after a rank failure", minimum=0)
    node_failure_hours: float = key(0.0, "mean time between failures of a node; 0: none fails", minimum=0)
    node_restart_s: float = key(600.0, "seconds to restart replicas after a node failure", minimum=0)


@dataclass(frozen=True)
class Cluster:
    description: str = key("", "one line")
    case: str = key("", "the model and its settings: a name in yaml_configs/, or a path ending in .yaml")
    hardware: str = key("", "a name in planner/hardware/, or a path ending in .yaml")
    devices: int = key(1, "number of devices", minimum=1, maximum=1 << 20)
    load: Load = section(Load)
    targets: Targets = section(Targets)
    search: Search = section(Search)
    guesses: Guesses = section(Guesses)
    card: Card = section(Card)
    simulation: SimulationSettings = section(SimulationSettings)


def read_cluster(path: Path, overrides: Sequence[str] = ()) -> Cluster:
    """The cluster in the file at `path`, with keys changed by `overrides` ("section.key=value")."""
    if not path.is_file():
        raise UserError(f"--cluster {path}: no such file; planner/clusters/ has examples")
    data = read_yaml(path, "a cluster")
    set_keys(Cluster, data, overrides, DOCS)
    cluster = read(Cluster, data, path.name, DOCS)
    for name in ("hardware",) if cluster.card.models else ("case", "hardware"):
        if not getattr(cluster, name):
            raise UserError(f"{path.name}: {name} is missing: {DOCS} has every key")
    if cluster.card.models and cluster.devices != 1:
        raise UserError(f"{path.name}: devices: {cluster.devices}: card.models are served by 1 device")
    if wrong := [rate for rate in cluster.guesses.accepted if not 0 <= rate <= 1]:
        raise UserError(f"{path.name}: guesses.accepted: {wrong[0]} must be from 0 to 1")
    for method in cluster.search.methods:
        if method not in METHODS:
            raise UserError(f"{path.name}: search.methods: {method!r} is not one of {', '.join(METHODS)}")
    for share in cluster.search.resident:
        if not 0 <= share <= 1:
            raise UserError(f"{path.name}: search.resident: {share} must be from 0 to 1")
    for world in cluster.search.worlds:
        if world < 1 or cluster.devices % world:
            raise UserError(f"{path.name}: search.worlds: {world} does not divide devices: {cluster.devices}")
    check_card(cluster.card, path.name)
    check_day(cluster.simulation.day, path.name)
    return cluster


def check_card(card: Card, where: str) -> None:
    for curve in card.curves:
        curve_of(curve, f"{where}: card.curves")
    if wrong := [rate for rate in card.accepted if not 0 <= rate <= 1]:
        raise UserError(f"{where}: card.accepted: {wrong[0]} must be from 0 to 1")
    for name in ("sequences", "prompts", "links"):
        if wrong := [value for value in getattr(card, name) if not 0 < value < math.inf]:
            raise UserError(f"{where}: card.{name}: {wrong[0]} must be more than 0")


def check_day(day: Day, where: str) -> None:
    least = {"rates": 0, "prompt_tokens": 1, "output_tokens": 1, "repeats": 0}
    for name, minimum in least.items():
        values = getattr(day, name)
        if values and len(values) != 24:
            raise UserError(f"{where}: simulation.day.{name}: {len(values)} numbers, must be 24: one for each hour")
        if wrong := [value for value in values if not minimum <= value < math.inf]:
            raise UserError(f"{where}: simulation.day.{name}: {wrong[0]} must be at least {minimum}")
    if day.rates and not max(day.rates):
        raise UserError(f"{where}: simulation.day.rates: all are 0: no request would ever come")
    if wrong := [value for value in day.repeats if value > 1]:
        raise UserError(f"{where}: simulation.day.repeats: {wrong[0]} must be at most 1")
