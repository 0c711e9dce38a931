"""The names by which other engines call the keys of a case: flags of the command line and arguments of `LLM`.

A key's names are declared with it (`elsewhere` in executor/config/case.py). They are accepted where the meaning is the
same; for other names of vLLM, SGLang and llama.cpp there is a line that says what to do here.
"""

import argparse
import difflib
from collections.abc import Mapping
from typing import Any

from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.config.load import parse_value
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.schema import Leaf, leaves

KEYS: dict[str, Leaf] = {name: leaf for leaf in leaves(Case) for name in leaf.elsewhere}
SERVER = "serve_config."  # keys that only a server reads
# Names without a value, with the key and the value that they stand for.
SWITCHES: dict[str, tuple[str, object]] = {
    "enable_prefix_caching": ("serve_config.prefix_cache", True),
    "no_enable_prefix_caching": ("serve_config.prefix_cache", False),
    "disable_radix_cache": ("serve_config.prefix_cache", False),
    "no_request_log": ("serve_config.request_log", False),
    "disable_log_requests": ("serve_config.request_log", False),
    "verbose": ("verbose", True),
    "enforce_eager": ("exe_mode", "eager"),
    "disable_cuda_graph": ("exe_mode", "eager"),
}
SHORT = {"ctx_size": "-c", "threads": "-t", "parallel": "-np"}  # llama.cpp's
WORDS = ("served_model_name", "alias")  # flags whose several words are one string
VALUES = {  # other engines' words for values of a key
    ("model_config.dtype", "half"): "float16",
    ("model_config.dtype", "float"): "float32",
    ("model_config.dtype", "auto"): "bfloat16",
    ("draft_config.method", "NGRAM"): "lookup",
    ("draft_config.method", "NEXTN"): "mtp",
    ("draft_config.method", "EAGLE3"): "eagle3",
}
COUNTED = "memory is counted, not a share of it taken: give --max-model-len and --max-num-seqs" + "".join(
    f", and on {name.capitalize()} {facts.memory_key}" for name, facts in PLATFORMS.items() if facts.memory_key
)
OTHERS = {
    "gpu_memory_utilization": COUNTED,
    "mem_fraction_static": COUNTED,
    "max_total_tokens": "give --max-model-len and --max-num-seqs, whose product it is",
    "max_num_batched_tokens": "--chunked-prefill-size bounds the prompt tokens of a step",
    "data_parallel_size": "--set world_size=N attn_tp_size=M makes N / M data-parallel groups",
    "dp_size": "--set world_size=N attn_tp_size=M makes N / M data-parallel groups",
    "pipeline_parallel_size": "layers are not split over ranks: give --tensor-parallel-size",
    "enable_expert_parallel": "--set moe_tp_size=1 gives each rank whole experts",
    "expert_parallel_size": "--set moe_tp_size=M makes world_size / M groups of whole experts",
    "ep_size": "--set moe_tp_size=M makes world_size / M groups of whole experts",
    "cpu_offload_gb": "experts on the CPU are set by --set offload_config.mode=elastic (docs/shadow_experts.md)",
    "n_gpu_layers": "experts on the CPU are set by --set offload_config.mode=elastic (docs/shadow_experts.md)",
    "api_key": "a key on the command line is seen by all users: write it into a file, and give --api-key-file FILE",
    "trust_remote_code": "code of a checkpoint is never run, and the families that run need none: leave it out",
    "tokenizer": "the tokenizer's files are read from the checkpoint's folder: copy them there",
    "download_dir": "set HF_HOME to the folder",
    "revision": "write MODEL@REVISION",
    "load_format": "checkpoints are read from safetensors; --set with_ckpt=false takes random weights",
    "speculative_config": "--speculative-algorithm lookup, mtp or eagle3 (docs/serving.md)",
    "tool_call_parser": "it is read from the chat template; --set output_format=NAME forces one (docs/text.md)",
    "reasoning_parser": "it is read from the chat template; --set output_format=NAME forces one (docs/text.md)",
    "enable_auto_tool_choice": "tool calls are always read: leave it out",
    "enable_chunked_prefill": "prompts are always prefilled in chunks: leave it out",
    "enable_lora": "LoRA adapters are not supported: merge them into the checkpoint",
    "lora_modules": "LoRA adapters are not supported: merge them into the checkpoint",
    "swap_space": "sequences are preempted by computing them again, nothing is swapped: leave it out",
}


def add_flags(parser: argparse.ArgumentParser, server: bool) -> None:
    """Adds the flags of the keys; those that only a server reads if it is one. The help lists them below, in one
    paragraph."""
    kept = {name: leaf for name, leaf in KEYS.items() if server or not leaf.path.startswith(SERVER)}
    for name, leaf in kept.items():
        flags = [_flag(name), *([SHORT[name]] if name in SHORT else [])]
        several = "+" if leaf.type == tuple[str, ...] or name in WORDS else None
        parser.add_argument(
            *flags, dest=f"key {name}", nargs=several, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    for name, (path, value) in SWITCHES.items():
        if server or not path.startswith(SERVER):
            parser.add_argument(
                _flag(name),
                dest=f"key {name}",
                action="store_const",
                const=value,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
    first = {leaf.path: name for name, leaf in reversed(kept.items())}
    parser.epilog = f"Flags: {' '.join(map(_flag, reversed(first.values())))}"


def given(args: argparse.Namespace) -> dict[str, object]:
    """The settings that flags of `add_flags` have given, by the paths of their keys."""
    values: dict[str, object] = {}
    for dest, value in vars(args).items():
        name = dest.removeprefix("key ")
        if name == dest:
            continue
        if name in WORDS:
            value = " ".join(value)
        elif isinstance(value, list):  # words, or one list as JSON has it
            value = parse_value(value[0], _flag(name)) if value[0].startswith("[") and len(value) == 1 else value
        elif isinstance(value, str) and name in KEYS and KEYS[name].type is not str:
            value = parse_value(value, _flag(name))
        values[name] = value
    return settings_of(values)


def settings_of(values: Mapping[str, Any]) -> dict[str, object]:
    """`values` with the names of other engines replaced by the paths of the keys. Raises UserError for their names that
    have no counterpart; other names stay as they are."""
    settings: dict[str, object] = {}
    for name, value in values.items():
        if name in OTHERS:
            raise UserError(f"{name}: {OTHERS[name]}")
        if name in SWITCHES:
            path, switched = SWITCHES[name]
            if value not in (True, switched):
                continue
            settings[path] = switched
        elif name in KEYS:
            path = KEYS[name].path
            settings[path] = VALUES.get((path, value), value) if isinstance(value, str) else value
        else:
            settings[name] = value
    return settings


def unknown_flag(flag: str, parser: argparse.ArgumentParser) -> UserError:
    """The error for an argument that a command does not have."""
    name = flag.partition("=")[0].lstrip("-").replace("-", "_")
    if name in OTHERS:
        return UserError(f"{flag}: {OTHERS[name]}")
    keys = [leaf.path for leaf in leaves(Case) if leaf.name == name]
    if keys:
        return UserError(f"{flag}: no flag of this command: --set {keys[0]}=VALUE sets this key (docs/config.md)")
    flags = [text for action in parser._actions for text in action.option_strings if action.help != argparse.SUPPRESS]
    close = difflib.get_close_matches(flag, [*flags, *map(_flag, KEYS)], n=1)
    near = f"did you mean {close[0]}? " if close else ""
    return UserError(f"{flag}: no argument of this command: {near}--help shows all, --set KEY=VALUE sets any key")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
