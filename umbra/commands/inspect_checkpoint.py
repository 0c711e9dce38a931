"""Reports what a checkpoint contains, from its config and the headers of its files. No weight is read, and no code in
the checkpoint is run.

With a case, the report also says what each rank of the case would keep of this checkpoint. Missing and unknown tensors
are listed in the report; they are not errors.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError, listed
from umbra.base.files import write_json
from umbra.executor.checkpoint.files import TensorFiles
from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.checkpoint.formats.scheme import Scheme
from umbra.executor.checkpoint.gguf_files import open_files
from umbra.executor.checkpoint.load import (
    CONTRADICTION,
    contradictions,
    ignorable,
    linear_modules,
    problems_of,
    stored_as,
    wanted_by,
)
from umbra.executor.config.case import (
    CacheSettings,
    Case,
    DataSettings,
    DraftSettings,
    ParallelSettings,
    QuantizationSettings,
)
from umbra.executor.config.load import load_case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.units import GB
from umbra.executor.plan.sketch import MTP, cache_of, kind_of, sketch_of, weights_of
from umbra.models.gguf.folder import checkpoint_folder, whole_path
from umbra.models.layers.base import Piece, layers_of
from umbra.models.registry import family_in
from umbra.ops.formats import Format

NONE = {
    "encoding": "none",
    "bits": 0,
    "group_size": 0,
    "zero_points": False,
    "modules": 0,
    "kept_by": [],
    "exact": True,
}
IGNORED, UNKNOWN = "ignored", "unknown"
COMPONENTS = ("embedding", "attention", "router", "experts", "dense MLP", "norms", "head", *MTP, IGNORED, UNKNOWN)


@dataclasses.dataclass
class Component:
    name: str
    tensors: int = 0
    nbytes: int = 0  # on disk
    types: dict[str, int] = dataclasses.field(
        default_factory=dict
    )  # number of tensors of each type, by safetensors' names


@dataclasses.dataclass
class Excluded:
    """Linear modules that a quantised checkpoint leaves in floats; `*` in the pattern stands for any number."""

    pattern: str
    of: int  # number of modules that match the pattern
    modules: list[str]


def inspect(checkpoint: Path) -> dict[str, Any]:
    """Returns what a checkpoint, a folder or a GGUF file, contains, as a dictionary that can be printed or written as
    JSON."""
    folder = checkpoint_folder(checkpoint)
    case = plain_case(folder)
    sketch, scheme = sketch_of(case), read_scheme(folder)
    lacking = sketch.model.mtp_layers[0].rstrip(".") if sketch.model.mtp_layers and not sketch.holds_mtp else ""
    if sketch.holds_mtp:
        sketch = sketch_of(dataclasses.replace(case, draft_config=DraftSettings(method="mtp")))
    wanted, files = wanted_by(sketch.model), open_files(folder, scheme)
    stored = {name: stored_as(pieces, scheme) for name, pieces in wanted.items()}
    kinds = dict.fromkeys(ignorable(files.file_of, sketch.model.ignores), IGNORED)
    for path, layer in reversed(layers_of(sketch.model)):  # tied weights are listed under the embedding's name
        for piece in layer.pieces(path):
            kinds |= dict.fromkeys(stored[piece.name].tensors, kind_of(sketch.model, path, layer))
    problems = problems_of(files, stored, scheme, sketch.model.ignores)
    components = components_of(files, kinds)
    encodings = encodings_of(scheme, wanted)
    paths = set(files.file_of.values())
    parameters = sum(prod(pieces[0].shape) for pieces in wanted.values())
    return {
        "checkpoint": str(checkpoint),
        "architecture": {"model_type": model_type(folder), "parameters": parameters}
        | dataclasses.asdict(sketch.config),
        "quantization": {
            "title": scheme.title,
            **(encodings[0] if encodings else NONE),
            "mixed_with": encodings[1:],
            "excluded": [dataclasses.asdict(e) for e in excluded_from(scheme, wanted)],
            "contradictions": contradictions(wanted, scheme),
        },
        "components": [dataclasses.asdict(component) for component in components],
        "total": {
            "tensors": len(files.file_of),
            "tensor_nbytes": sum(c.nbytes for c in components),
            "files": len(paths),
            "file_nbytes": sum(path.stat().st_size for path in paths),
        },
        "mtp": {"held": sketch.model.mtp_at, "lacking": lacking},
        "problems": [{"problem": problem, "names": names} for problem, names in problems],
    }


def inspect_rank(case: Case) -> dict[str, Any]:
    """Returns what a rank of `case` keeps of its checkpoint. All splits are even, so rank 0 is counted for all
    ranks."""
    sketch = sketch_of(case)
    weights, cache = weights_of(sketch.model), cache_of(sketch)
    formats, modules = sketch.build.formats, linear_modules(wanted_by(sketch.model))
    own = {formats.own(module) or formats.rest for module in modules} if formats.own else {formats.linear}
    return {
        "case": case.name,
        "platform": case.platform,
        "ranks": case.world_size,
        "linear_format": ", ".join(sorted(in_words(format) for format in own if format)),
        "head_format": in_words(formats.head),
        "weights": {part.name: part.nbytes for part in weights},
        "weights_nbytes": sum(part.nbytes for part in weights),
        "kv_cache_nbytes": cache.nbytes,
        "kv_cache": cache.how,
    }


def model_type(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is no checkpoint: it holds no config.json: name the folder that does")
    return family_in(folder)


def plain_case(folder: Path) -> Case:
    """A case of one rank with every weight, from which the model's list of tensors is made; its sizes do not matter."""
    return Case(
        name="inspect",
        model_name=model_type(folder),
        model_path=str(folder.resolve()),
        data_config=DataSettings(input_max_len=1, max_new_tokens=1),
        parallel_config=ParallelSettings(attn_tp_size=1, moe_tp_size=1, embed_tp_size=1, lmhead_tp_size=1),
        quantization=QuantizationSettings(method="none"),
        cache_config=CacheSettings(page_size=1),
    )


def components_of(files: TensorFiles, kinds: dict[str, str]) -> list[Component]:
    """Tensors and bytes by component; `kinds` maps each tensor that the model has to its component."""
    components = {name: Component(name) for name in COMPONENTS}
    for name in files.file_of:
        _, stored_type = files.header(name)
        component = components[kinds.get(name, UNKNOWN)]
        component.tensors += 1
        component.nbytes += files.nbytes(name)
        component.types[stored_type] = component.types.get(stored_type, 0) + 1
    return [component for component in components.values() if component.tensors]


def encodings_of(scheme: Scheme, wanted: dict[str, list[Piece]]) -> list[dict[str, Any]]:
    """The ways in which modules are stored: the config's main one, then all others that any module is stored in."""
    counts = Counter(scheme.encoding(module) for module in linear_modules(wanted))
    used = [e for i, e in enumerate(scheme.encodings) if i == 0 or counts[e]]
    return [
        {
            "encoding": e.title,
            "bits": e.bits,
            "group_size": e.group,
            "zero_points": e.zeros,
            "modules": counts[e],
            "kept_by": [name for name, p in PLATFORMS.items() if e.format and e.format.kind in p.quantised],
            "exact": e.exact,
        }
        for e in used
    ]


def excluded_from(scheme: Scheme, wanted: dict[str, list[Piece]]) -> list[Excluded]:
    groups: dict[str, Excluded] = {}
    if not scheme.encodings:
        return []
    for module in linear_modules(wanted):
        pattern = re.sub(r"\.\d+(?=\.)", ".*", module)
        group = groups.setdefault(pattern, Excluded(pattern, 0, []))
        group.of += 1
        if scheme.encoding(module) is None:
            group.modules.append(module)
    return [group for group in groups.values() if group.modules]


def in_words(format: Format) -> str:
    zeros = " with zero points" if format.zeros else ""
    return format.kind + (f" in groups of {format.group}{zeros}" if format.quantised else "")


def print_facts(facts: dict[str, Any]) -> None:
    architecture, total = facts["architecture"], facts["total"]
    print(f"{facts['checkpoint']}: {architecture['model_type']}, {architecture['parameters']:,} parameters")
    for key, value in flat(architecture):
        if key not in ("model_type", "parameters"):
            print(f"  {key:<34} {value}")
    print_quantization(facts["quantization"])
    print(f"\n{'component':<12} {'tensors':>8} {'bytes on disk':>18} {'':>11}  types")
    for c in facts["components"]:
        types = ", ".join(f"{count:,} {name}" for name, count in sorted(c["types"].items()))
        print_row(c["name"], c["tensors"], c["nbytes"], types)
    print_row("total", total["tensors"], total["tensor_nbytes"])
    print(f"{total['files']:,} file(s) of {total['file_nbytes']:,} bytes with headers. 1 GB = 2^30 bytes.\n")
    if odd := facts["quantization"]["contradictions"]:
        print(f"warning: {len(odd)} {CONTRADICTION}: {shown(odd)}")
    for problem in facts["problems"]:
        print(f"problem: {len(problem['names'])} {problem['problem']}: {shown(problem['names'])}")
    if path := facts["mtp"]["lacking"]:
        print(f"{path}, which the config names, is not there: draft_config.method: mtp is refused")
    if not facts["problems"]:
        print("complete: every tensor is known, every weight of the model is there")
    if "rank" in facts:
        print_rank(facts["rank"])


def print_quantization(quantization: dict[str, Any]) -> None:
    print(f"\nquantisation: {quantization['title']}")
    if not quantization["bits"]:
        return
    for e in (quantization, *quantization["mixed_with"]):
        how = "kept as they are" if e["exact"] else "rounded to 8 bits"
        kept = f"{how} on {', '.join(e['kept_by'])}" if e["kept_by"] else "read as floats on every platform"
        print(f"  {e['modules']:,} modules in {e['encoding']}: {kept}")
    for group in quantization["excluded"]:
        count, some = len(group["modules"]), len(group["modules"]) < group["of"]
        which = f": {shown(group['modules'])}" if some else ""
        print(f"  not quantised: {group['pattern']} ({count:,} of {group['of']:,}{which})")


def print_rank(rank: dict[str, Any]) -> None:
    print(f"\ncase {rank['case']}: {rank['platform']}, {rank['ranks']} rank(s)")
    print(f"  linear layers in {rank['linear_format']}, head in {rank['head_format']}")
    print("Each rank keeps, counted, not measured:")
    for name, nbytes in rank["weights"].items():
        print(f"  {name:<26} {nbytes:>18,} {nbytes / GB:>8.3f} GB")
    print(f"{'weights':<28} {rank['weights_nbytes']:>18,} {rank['weights_nbytes'] / GB:>8.3f} GB")
    print(
        f"{'KV cache':<28} {rank['kv_cache_nbytes']:>18,} {rank['kv_cache_nbytes'] / GB:>8.3f} GB  {rank['kv_cache']}"
    )


def print_row(name: str, tensors: int, nbytes: int, more: str = "") -> None:
    print(f"{name:<12} {tensors:>8,} {nbytes:>18,} {nbytes / GB:>8.3f} GB  {more}".rstrip())


def shown(names: list[str]) -> str:
    """Some of the names for one line. They are untrusted, so characters that control a terminal are escaped."""
    return listed([name[:400] if name.isprintable() else ascii(name[:400]) for name in names])


def flat(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values as text; a tuple of booleans, one for each layer, becomes "N of M"."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, tuple) and value and all(isinstance(v, bool) for v in value):
            yield prefix + key, f"{sum(value)} of {len(value)}"
        else:
            yield prefix + key, ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def inspect_checkpoint(checkpoint: Path, case_name: str | None, overrides: list[str], json: Path | None) -> None:
    """Print the facts about `checkpoint` and, with a case, what each of its ranks keeps. `json` is a file
    to write the facts to."""
    if overrides and not case_name:
        raise UserError(f"--set {overrides[0]}: there is no case to set it in: give --case as well")
    facts = inspect(checkpoint)
    if case_name:
        case = load_case(case_name, overrides)
        facts["rank"] = inspect_rank(dataclasses.replace(case, model_path=str(whole_path(checkpoint))))
    print_facts(facts)
    if json:
        write_json(json, facts)
