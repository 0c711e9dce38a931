"""Opens a case, or chooses settings for a checkpoint that is run without a case file, by what it is run for and by what
fits into this machine's memory."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from umbra.base.errors import UserError
from umbra.base.files import located, read_json, write_whole
from umbra.executor.checkpoint.hub.fetch import fetched, fetched_head, hub_name
from umbra.executor.checkpoint.hub.repository import HubName
from umbra.executor.config.case import Case, SamplingSettings
from umbra.executor.config.load import find_case, make_case, model_folder, no_case, read_yaml, set_all
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.rules import check
from umbra.executor.config.schema import read
from umbra.executor.config.units import GB, MB
from umbra.executor.plan.batch_limits import Limits, limits_of
from umbra.executor.plan.host_memory import free_memory
from umbra.models.config import ModelConfig
from umbra.models.gguf.folder import SUFFIX, checkpoint_folder, name_of, whole_path
from umbra.models.registry import family_in, read_config
from umbra.text.tokenizer_file import has_chat_template

LONGEST, SHORTEST = 32768, 256  # tokens of a prompt and its answer that are tried
LEAST = 4096  # tokens for one sequence that should fit before weights are quantised for them
SHARE = 0.85  # of the free memory that weights and KV cache may take
PROGRAM = 0.7 * GB  # what a rank and the server take besides
FOLLOWED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
CHUNK = 2048  # prompt tokens of a prefill step, which bounds its activations


@dataclass(frozen=True)
class Purpose:
    """The purpose for which a checkpoint without a case is run."""

    what: str  # as the user reads it
    sequences: int  # at once, if there is memory
    new_tokens: int = 1024
    samples: bool = True  # whether sampling settings matter
    chat: bool = True  # whether prompts go through the chat template, if there is one


SERVING = Purpose("serving", 8)
CHATTING = Purpose("a chat with", 1)
PLANNING = Purpose("planning to serve", 8, samples=False)
RUNNING = Purpose("running", 4, 256)
MEASURING = Purpose("measuring", 4, 256, samples=False)  # `evaluate` and `logits`, which choose no tokens by chance
CALLING = Purpose("running", 4, chat=False)  # `LLM`, whose `generate` takes texts as they are


def open_case(
    model: str, purpose: Purpose, overrides: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> Case:
    """The case for `model`: the name of a case, the path of a case file, or a checkpoint: its folder, its GGUF file or
    its name on a hub. A case's name goes before a folder's, which ./NAME names as well, and a path before a name on a
    hub."""
    if file := find_case(model):
        data = read_yaml(file, "a case")
        overrides = _with_head(data, overrides, settings)
        case = make_case(data, file.stem, file.name, overrides, settings)
    else:
        overrides = _with_head({}, overrides, settings)  # refuses unknown keys before anything is fetched
        path = Path(model).expanduser()
        if name := _on_hub(model):
            path = fetched(name)
            settings = {"serve_config.served_model_name": name.name, **(settings or {})}
        if not (path.is_dir() or (path.suffix == SUFFIX and path.is_file())):
            raise _neither(model, path)
        case, data = case_of_checkpoint(path, purpose, overrides, settings)
    return _followed(case, data) if purpose.samples else case


def checkpoint_path(model: str) -> Path:
    """The path `model`, or where the checkpoint that has this name on a hub lies, now fetched."""
    name = _on_hub(model)
    return fetched(name) if name else Path(model).expanduser()


def _on_hub(model: str) -> HubName | None:
    """Parses `model` as a name on a hub; None: it is none, or a path of that name exists."""
    return None if Path(model).expanduser().exists() else hub_name(model)


def _with_head(
    data: Mapping[str, Any], overrides: Sequence[str], settings: Mapping[str, object] | None
) -> Sequence[str]:
    """`overrides` of a case's `data`, with the folder of a head for drafts that is named as on a hub, now fetched."""
    asked = copy.deepcopy(dict(data))
    set_all(asked, overrides, settings)
    drafts = asked.get("draft_config")
    head = drafts.get("model_path") if isinstance(drafts, dict) else None
    if isinstance(head, str) and not located(head).exists() and (name := hub_name(head)):
        return [*overrides, f"draft_config.model_path={json.dumps(str(fetched_head(name)))}"]
    return overrides


def _neither(model: str, path: Path) -> UserError:
    """The error for `model`, at `path`, which is neither a case nor a checkpoint."""
    if path.suffix == SUFFIX:
        return UserError(f"{model}: there is no such file")
    if path.suffix == ".safetensors":
        return UserError(f"{model}: give the folder that it lies in, {path.parent}, which also has its config.json")
    if path.is_file():
        return UserError(
            f"{model}: is a file, but neither *{SUFFIX} nor a case, *.yaml: rename it if it is one of these"
        )
    return no_case(model)


def _followed(case: Case, data: Mapping[str, Any]) -> Case:
    """The case with the sampling of the checkpoint's generation_config.json where `data`, its keys, does not say it.
    Prints what is taken."""
    path = model_folder(case) / "generation_config.json"
    if case.sampling_config.generation_config == "none" or not case.model_config.with_ckpt or not path.is_file():
        return case
    config = read_json(path)
    followed = {name: config[name] for name in FOLLOWED if config.get(name) is not None}
    if config.get("do_sample") is False:
        followed = {name: followed[name] for name in followed if name == "repetition_penalty"} | {"temperature": 0.0}
    elif config.get("do_sample") and "temperature" not in followed:
        followed["temperature"] = 1.0  # transformers' own default
    if followed.get("top_k") == -1:
        followed["top_k"] = 0
    given = data.get("sampling_config") or {}
    followed = {name: value for name, value in followed.items() if name not in given}
    where = case.model_path if case.model_path.endswith(SUFFIX) else str(path)
    settings = read(SamplingSettings, followed, where)
    taken = {name: getattr(settings, name) for name in followed}
    case = dataclasses.replace(case, sampling_config=dataclasses.replace(case.sampling_config, **taken))
    check(case, where)
    if taken and (case.sampling_config.temperature or taken.get("repetition_penalty", 1.0) != 1):
        values = ", ".join(f"{name} {0 if value is None else value}" for name, value in taken.items())
        print(f"sampling as {Path(where).name} says: {values} (--generation-config none: greedy)", flush=True)
    return case


def case_of_checkpoint(
    checkpoint: Path, purpose: Purpose, overrides: Sequence[str] = (), settings: Mapping[str, object] | None = None
) -> tuple[Case, dict[str, Any]]:
    """Chooses a case that runs `checkpoint`, a folder or a GGUF file, and prints what was chosen in few lines. The
    user's settings override it. -> the case, and the keys of a case file that says the same"""
    folder = checkpoint_folder(checkpoint)
    asked: dict[str, Any] = {}
    set_all(asked, overrides, settings)
    platform = str(asked.get("platform", "cpu"))
    if platform not in PLATFORMS:
        platform = "cpu"  # the case says what is wrong
    name = family_in(folder)
    positions = read_config(folder, name).max_positions
    own_template = bool((asked.get("model_config") or {}).get("chat_template"))
    chat = purpose.chat and (own_template or has_chat_template(folder))

    def case_with(quantization: dict[str, str], context: int, sequences: int) -> tuple[Case, dict[str, Any]]:
        data: dict[str, Any] = {
            "model_name": name,
            "model_path": str(whole_path(checkpoint)),
            "platform": platform,
            "exe_mode": PLATFORMS[platform].default_mode,
            "model_config": {"tokenizer_mode": "chat" if chat else "default"},
            "quantization": quantization,
            "data_config": {
                "prompts": ["Write a short story." if chat else "Once upon a time"],
                "max_new_tokens": min(purpose.new_tokens, positions // 2 or 1),
                "batch_size": sequences,
                "chunked_prefill_size": CHUNK,
                "warm_up": False,
            },
        }
        if "input_max_len" not in (asked.get("data_config") or {}):
            data["data_config"]["max_model_len"] = context
        return make_case(data, name_of(checkpoint), str(checkpoint), overrides, settings), data

    case, data, counted, note = _fitting(folder, case_with, positions, purpose.sequences)
    print(f"{purpose.what} {checkpoint}: {case.model_name}, {_size(counted.weights)} of weights{note}")
    several = f"{case.data_config.batch_size} sequences" if case.data_config.batch_size > 1 else "one sequence"
    print(
        f"chosen for this machine: {several} of up to {case.max_sequence_length:,} tokens "
        f"({_size(counted.cache(case))} of KV cache), {case.exe_mode} mode; `umbra init {checkpoint}` writes all as a "
        "case to edit",
        flush=True,
    )
    if counted.holds_mtp and purpose.samples and case.draft_config.method == "none":
        print("it has a layer for speculative decoding, which may be faster: --set draft_config.method=mtp", flush=True)
    return case, data


@dataclass(frozen=True)
class RankBytes:
    """The bytes that a case takes on one rank."""

    weights: int
    page: float  # of the KV cache
    set_pages: int  # that a set of recurrent states takes
    config: ModelConfig
    holds_mtp: bool

    def cache(self, case: Case) -> float:
        return self._limits(case).pages * self.page

    def least(self, case: Case) -> float:
        """For one sequence of LEAST tokens."""
        return self._limits(case).pages_of(min(LEAST, self.config.max_positions)) * self.page

    def _limits(self, case: Case) -> Limits:
        return limits_of(case, self.config, True, self.set_pages)


def _fitting(
    folder: Path,
    case_with: Callable[[dict[str, str], int, int], tuple[Case, dict[str, Any]]],
    positions: int,
    sequences: int,
) -> tuple[Case, dict[str, Any], RankBytes, str]:
    """The first of the quantisations, contexts and numbers of sequences that fits, or the smallest of them, with a note
    on the quantisation."""
    from umbra.executor.checkpoint.formats.detect import read_scheme
    from umbra.executor.plan.sketch import cache_of, sketch_of, weights_of

    formats = [encoding.format for encoding in read_scheme(folder).encodings]
    ways = [{"method": method} for method in (("auto",) if any(formats) else ("auto", "q8", "q4"))]
    for way in ways:
        case, data = case_with(way, min(SHORTEST, positions), sequences)
        sketch = sketch_of(case)
        cache = cache_of(sketch).nbytes
        weights = sum(part.nbytes for part in weights_of(sketch.model))
        counted = RankBytes(
            weights, cache / (sketch.pages + 1), sketch.limits.set_pages, sketch.config, sketch.holds_mtp
        )
        room = _room(case)
        if room >= counted.weights + counted.least(case):
            break
    used = case.quantization
    note = f" in {used.method}" if used.method in ("q8", "q4") else ""
    note += f", what is not kept in {used.rest}" if used.rest != "none" else ""
    if way != ways[0] and way.items() <= vars(used).items():
        note += ", as more does not fit into the free memory"
    for context, count in _ladder(positions, sequences, case.attn_dp_size):
        case, data = case_with(way, context, count)
        if counted.weights + counted.cache(case) <= room:
            break
    return case, data, counted, note


def _ladder(positions: int, sequences: int, least: int) -> Iterator[tuple[int, int]]:
    """Yields contexts with numbers of sequences, of which there are `least` or more, the best first."""
    context, count = min(positions, LONGEST), max(sequences, least)
    yield context, count
    while context > SHORTEST or count > least:
        if count > least and context <= 2 * LEAST:
            count = max(count // 2 // least * least, least)
        else:
            context = max(context // 2, min(SHORTEST, positions))
        yield context, count


def _size(nbytes: float) -> str:
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB else f"{nbytes / MB:.0f} MB"


def _room(case: Case) -> float:
    """The bytes that weights and KV cache of one rank may take."""
    if PLATFORMS[case.platform].own_memory:
        from umbra.executor.plan.memory import device_gb  # which imports torch, and this file serves the command line

        return SHARE * device_gb(case) * GB
    return SHARE * (free_memory() / case.world_size - PROGRAM)


def write_case(checkpoint: Path, out: Path, overrides: Sequence[str], settings: Mapping[str, object]) -> None:
    """Writes a case file for `checkpoint`, a folder or a GGUF file, to `out`, which must not exist yet."""
    if out.exists():
        raise UserError(f"{out}: is there already: give another name with --out")
    case, data = case_of_checkpoint(checkpoint, SERVING, overrides, settings)
    text = yaml.safe_dump({"description": f"{case.name}, as `umbra init` chose", **data}, sort_keys=False)
    text = "# Every key and its meaning: docs/config.md\n" + text
    write_whole(out, lambda file: file.write(text.encode()))
