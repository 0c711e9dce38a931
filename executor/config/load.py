"""Finds and reads cases: `yaml_configs/NAME.yaml`, or any path that ends in .yaml."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from umbra.base.errors import UserError, short
from umbra.base.files import ROOT, located
from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.rules import check
from umbra.executor.config.schema import override, read
from umbra.executor.config.units import MB
from umbra.models.config import ModelConfig
from umbra.models.eagle3_config import Eagle3Config
from umbra.models.gguf.folder import checkpoint_folder
from umbra.models.registry import read_config

CASES = ROOT / "yaml_configs"


# PyYAML reads a megabyte of comments in half a second, and 20,000 values in as much.
LARGEST_FILE = 2 * MB  # most bytes of a case
MOST_VALUES = 20_000  # most values of a case, with every alias written out


class StrictLoader(yaml.SafeLoader):
    """YAML of bounded size. PyYAML keeps the last of two equal keys in silence; here that is an error."""

    values = 0  # that were composed

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.values += 1
        if self.values > MOST_VALUES:
            raise _too_many_values(self.get_mark())
        return super().compose_node(parent, index)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # as of `!!int x` or 2000-99-99
            kind = node.tag.rpartition(":")[2]
            problem = f"{short(node.value)} cannot be read as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "expected a mapping", node.start_mark)
        names: set[object] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "found unhashable key", key.start_mark)
            name = self.construct_object(key, deep=True)
            if name in names:
                raise yaml.constructor.ConstructorError(None, None, f"key {short(name)} stands twice", key.start_mark)
            names.add(name)
        return super().construct_mapping(node, deep)


def load_case(name: str, overrides: Sequence[str] = (), settings: Mapping[str, object] | None = None) -> Case:
    """The case `name` with its keys overridden, checked, sizes filled in."""
    if (path := find_case(name)) is None:
        raise no_case(name)
    return make_case(read_yaml(path, "a case"), path.stem, path.name, overrides, settings)


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """The mapping that the YAML file at `path` holds; `what` says what the file is to be, in errors."""
    if (size := path.stat().st_size) > LARGEST_FILE:
        raise UserError(f"{path.name}: {size / MB:.1f} MB; {what} file may have at most {LARGEST_FILE / MB:.0f} MB")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    data = parse_value(text, str(path.name))
    if not isinstance(data, dict):
        raise UserError(f"{path.name}: {what} is a mapping of keys to values, not {short(data):.60}")
    return data


def make_case(
    data: dict[str, Any],
    name: str,
    where: str,
    overrides: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
) -> Case:
    """Makes a case from `data`, which was read from YAML and is changed by `overrides` ("section.key=value") and by
    `settings` (a value for each key or section.key). `where` names the source in error messages."""
    set_all(data, overrides, settings)
    case = _fill_sizes(dataclasses.replace(read(Case, data, where), name=name))
    check(case, where)
    return case


def set_all(data: dict[str, Any], overrides: Sequence[str], settings: Mapping[str, object] | None) -> None:
    """Sets keys of a case's `data` as `make_case` does."""
    for key, value in (settings or {}).items():
        override(Case, data, key, list(value) if isinstance(value, tuple) else value)
    set_keys(Case, data, overrides)


def set_keys(kind: type, data: dict[str, Any], overrides: Sequence[str], docs: str = "docs/config.md") -> None:
    """Sets keys of `data`, to be read as a `kind`, by `overrides` ("section.key=value")."""
    for pair in overrides:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--set {pair}: write key=value or section.key=value")
        override(kind, data, key, parse_value(value, f"--set {pair}"), docs, flag="--set ")


def list_cases() -> list[tuple[str, str]]:
    """(name, description) of every case; the description of a broken case says what is wrong with it."""
    cases = []
    for path in sorted(CASES.glob("*.yaml")):
        try:
            cases.append((path.stem, load_case(path.stem).description))
        except UserError as error:
            cases.append((path.stem, f"(broken: {error})"))
    return cases


def model_folder(case: Case) -> Path:
    """The folder of the case's checkpoint, which `model_path` names by itself or by its GGUF file."""
    return checkpoint_folder(located(case.model_path))


def load_model_config(case: Case) -> ModelConfig:
    """The configuration of the case's checkpoint; raises where the case asks for more than the model can do."""
    config = read_config(model_folder(case), case.model_name)
    sizes = case.parallel_sizes
    if not config.expert_count:
        _check_without_experts(case)
    parts = 1 if sizes.expert_slots else sizes.moe_ep  # copies of experts need no even parts
    config.check_parallel(sizes.attn_tp, sizes.moe_tp, parts, sizes.embed_tp, sizes.lmhead_tp)
    if own := sizes.expert_slots:
        least, most = -(-config.expert_count // sizes.moe_ep), config.expert_count
        if not least <= own <= most:
            raise UserError(
                f"case {case.name}: parallel_config.expert_slots: {own} must be from {least} to {most}: "
                f"{sizes.moe_ep} ranks hold the model's {most} experts, none of them twice on one rank"
            )
    if head := load_draft_config(case, config):
        head.check_parallel(sizes.attn_tp, sizes.lmhead_tp)
    if case.max_sequence_length > config.max_positions:
        raise UserError(
            f"case {case.name}: input_max_len + max_new_tokens: {case.max_sequence_length} exceed the model's "
            f"{config.max_positions} positions: lower max_model_len"
        )
    return config


def _check_without_experts(case: Case) -> None:
    """Raises UserError for settings that place experts, of a case whose model has none."""
    offload, slots = case.offload_config.mode, case.parallel_config.expert_slots
    for key, value, unset in (("offload_config.mode", offload, "none"), ("parallel_config.expert_slots", slots, 0)):
        if value != unset:
            raise UserError(
                f"case {case.name}: {key}: {value} places experts, which a dense model does not have: leave it out"
            )


def draft_folder(case: Case) -> Path:
    """The folder of the case's head for drafts."""
    folder = located(case.draft_config.model_path)
    if not folder.is_dir():
        raise UserError(
            f"draft_config.model_path: {folder} is not a folder: give a head for the model, or its name on a hub"
        )
    return folder


def load_draft_config(case: Case, model: ModelConfig) -> Eagle3Config | None:
    """The configuration of the case's head for drafts of `model`; None: it has none."""
    return Eagle3Config.from_folder(draft_folder(case), model) if case.draft_config.method == "eagle3" else None


def find_case(name: str) -> Path | None:
    """The file of the case `name`, which is a name in yaml_configs/ or ends in .yaml; None: there is none."""
    path = Path(name).expanduser() if name.endswith(".yaml") else CASES / f"{name}.yaml"
    return path if path.is_file() else None


def no_case(name: str) -> UserError:
    """The error for a `name` that is no case and no checkpoint either."""
    if name.endswith(".yaml"):
        return UserError(f"no case {name!r}: there is no such file; `umbra list` shows the cases that come along")
    close = difflib.get_close_matches(name, [p.stem for p in CASES.glob("*.yaml")], n=3, cutoff=0.5)
    near = f" nearest cases: {', '.join(close)};" if close else ""
    return UserError(
        f"no case {name!r}, and no folder of that name:{near} give a case (`umbra list` shows all), the path of a case "
        "file, or a checkpoint: its folder, its GGUF file or its name on a hub"
    )


def _count_values(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """Number of values in and below `node`, with aliases written out; more than MOST_VALUES are an error."""
    if node not in counted:
        counted[node] = 1  # of a node inside itself
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        if not isinstance(node, yaml.ScalarNode):
            counted[node] += sum(_count_values(part, counted) for part in parts)
        if counted[node] > MOST_VALUES:
            raise _too_many_values(node.start_mark)
    return counted[node]


def _too_many_values(where: yaml.Mark) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, f"more than {MOST_VALUES:,} values", where)


def parse_value(text: str, where: str) -> Any:
    """Returns the value that a YAML text means; `where` names its source in errors."""
    try:
        return yaml.load(text, StrictLoader)
    except RecursionError:
        raise UserError(f"{where}: not valid YAML: values are nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{where}:{line} not valid YAML: {getattr(error, 'problem', None) or error}") from None


def _fill_sizes(case: Case) -> Case:
    sizes, data = case.parallel_config, case.data_config
    if data.max_model_len:
        new = max(1, min(data.max_new_tokens, data.max_model_len // 2))
        data = dataclasses.replace(data, input_max_len=max(1, data.max_model_len - new), max_new_tokens=new)
    attn_tp_size = sizes.attn_tp_size or case.world_size
    page_size = case.cache_config.page_size or PLATFORMS[case.platform].page_size
    return dataclasses.replace(
        case,
        data_config=data,
        parallel_config=dataclasses.replace(
            sizes,
            attn_tp_size=attn_tp_size,
            moe_tp_size=sizes.moe_tp_size or case.world_size,
            embed_tp_size=sizes.embed_tp_size or attn_tp_size,
            lmhead_tp_size=sizes.lmhead_tp_size or attn_tp_size,
        ),
        cache_config=dataclasses.replace(case.cache_config, page_size=page_size),
    )
