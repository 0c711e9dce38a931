"""Opens a case, or chooses settings for a checkpoint that is run without a case file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from executor.checkpoint.formats.detect import read_scheme
from executor.config.case import Case
from executor.config.load import load_case, make_case
from executor.run.host_memory import memory_limit
from models.registry import family_in, read_config

SEQUENCES, PROMPT, NEW = 4, 4096, 1024  # sequences at once; tokens of each, if the model has enough positions
SHARE = 0.7  # share of the machine's free memory that weights may take; the rest is for the KV cache and activations


def open_case(model: str, settings: Mapping[str, object], overrides: Sequence[str] = ()) -> Case:
    """The case for `model`: the name or path of a case, or the folder of a checkpoint."""
    if not model.endswith(".yaml") and Path(model).expanduser().is_dir():
        return case_of_checkpoint(Path(model).expanduser(), settings, overrides)
    return load_case(model, overrides, settings)


def case_of_checkpoint(folder: Path, settings: Mapping[str, object], overrides: Sequence[str] = ()) -> Case:
    """Returns a case that runs the checkpoint in `folder` on this machine's CPU. The user's settings override what is
    chosen here. Prints what was chosen."""
    name = family_in(folder)
    positions = read_config(folder, name).max_positions
    new = min(NEW, max(positions // 2, 1))
    data: dict[str, Any] = {
        "model_name": name,
        "model_path": str(folder.resolve()),
        "platform": "cpu",
        "exe_mode": "graph",
        "quantization": {"method": _method(folder)},
        "data_config": {
            "prompts": ["Hello"],
            "batch_size": SEQUENCES,
            "input_max_len": min(PROMPT, positions - new),
            "max_new_tokens": new,
            "warm_up": False,
        },
    }
    case = make_case(data, folder.resolve().name, str(folder), overrides, settings)
    chosen = yaml.safe_dump({key: value for key, value in data.items() if key != "model_path"}, default_flow_style=True)
    print(f"no case for {folder}: settings are {' '.join(chosen.split())}")
    return case


def _method(folder: Path) -> str:
    """The `quantization.method` to use: auto if the checkpoint is quantised or its weights fit into memory as they are,
    else q8 or q4."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if any(encoding.format for encoding in read_scheme(folder).encodings):
        return "auto"
    room = SHARE * _free_bytes()
    return "auto" if size <= room else "q8" if size / 2 <= room else "q4"


def _free_bytes() -> int:
    text = Path("/proc/meminfo").read_text()
    free = int(next(line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:"))) * 1024
    return min(free, memory_limit()[0])
