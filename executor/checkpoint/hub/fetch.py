"""Fetches a model that is named by its name on a hub: no more files than it takes, and none of the large ones before it
is known that they can be read and that there is room for them."""

import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from umbra.base.errors import UserError, listed, short
from umbra.executor.checkpoint.hub.huggingface import HuggingFace
from umbra.executor.checkpoint.hub.modelscope import ModelScope
from umbra.executor.checkpoint.hub.repository import HubName, Repository
from umbra.executor.checkpoint.index import INDEX, SINGLE, read_index, weights_among
from umbra.executor.config.env import use_modelscope
from umbra.executor.config.units import GB, MB
from umbra.models.gguf.container import SPLIT
from umbra.models.gguf.folder import SUFFIX
from umbra.models.registry import FAMILIES, architectures, family_in, read_config

PART = r"\w[\w.-]{0,95}"
NAME = re.compile(rf"(?!.*(?:--|\.\.))({PART}/{PART})(?:@(\w[\w./-]*))?(?::(\w[\w./-]*))?", re.ASCII)
FILES = (".yaml", ".yml", ".json", ".gguf", ".safetensors")  # a name that ends so is a path
CONFIG = "config.json"
COMPANIONS = (".json", ".jinja", ".model", "merges.txt")  # ends of the files that weights need beside them
NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files of another kind
USUAL = "Q4_K_M"  # which llama.cpp takes as well if none is named


def hub_name(model: str) -> HubName | None:
    """Parses `model` as a name on a hub; None: it cannot be one."""
    match = NAME.fullmatch(model)
    return HubName(match[1], match[2], match[3]) if match and not match[1].endswith(FILES) else None


def fetched(model: HubName) -> Path:
    """The folder of the model, or its GGUF file, the first one if it is split; fetched if it is not here already."""
    repository = _repository(model)
    sizes = repository.sizes
    weights = weights_among(sizes, model.name)
    in_gguf = bool(model.file) or weights is None
    if in_gguf and (said := repository.architecture):
        if said not in architectures():
            raise model.error(f"architecture {short(said)} is not supported, only {', '.join(architectures())}")
    elif CONFIG in sizes:
        repository.fetch([CONFIG])
        family = family_in(repository.folder)
    if in_gguf or weights is None:
        files = _gguf_files(repository)
        _fetch(repository, files)
        return repository.folder / files[0]
    if CONFIG not in sizes:
        raise model.error(f"has no {CONFIG}: name a model of {', '.join(FAMILIES)}")
    from umbra.executor.checkpoint.formats.detect import read_scheme

    companions = [file for file in sizes if "/" not in file and file.endswith(COMPANIONS)]
    _check_room(repository, companions)
    repository.fetch(companions)
    read_config(repository.folder, family)
    read_scheme(repository.folder)
    _fetch_tensors(repository, weights)
    return repository.folder


def fetched_head(model: HubName) -> Path:
    """The folder of a head for drafts, fetched if it is not here already."""
    repository = _repository(model)
    weights = weights_among(repository.sizes, model.name)
    if weights is None or CONFIG not in repository.sizes:
        raise _lacking(repository, f"has no {CONFIG} beside {SINGLE} or {INDEX}", ": name an EAGLE3 head that has")
    repository.fetch([file for file in repository.sizes if "/" not in file and file.endswith(".json")])
    _fetch_tensors(repository, weights)
    return repository.folder


def _repository(model: HubName) -> Repository:
    return ModelScope(model) if use_modelscope() else HuggingFace(model)


def _fetch_tensors(repository: Repository, weights: str) -> None:
    """Fetches the file `weights`, or those of this index, which is here."""
    indexed = read_index(repository.folder / weights).values() if weights.endswith(".json") else [weights]
    _fetch(repository, sorted(set(indexed)))


def _fetch(repository: Repository, files: Sequence[str]) -> None:
    """Fetches weights, and says how much."""
    model = repository.model
    if missing := [file for file in files if file not in repository.sizes]:
        raise _lacking(repository, "the repository is not whole", f": it lacks {listed(missing)}")
    if nbytes := _check_room(repository, files):
        count = f"{len(files)} files" if len(files) > 1 else files[0]
        print(f"fetching {model.name}: {count}, {_size(nbytes)} to go, into {repository.folder}", flush=True)
    repository.fetch(files)


def _lacking(repository: Repository, why: str, more: str = "") -> UserError:
    """The error for files that are not there because of `why` or, of what was fetched before, because they were not."""
    offline = "not all of it was fetched before, and the hub is not asked: go online"
    return repository.model.error((offline if repository.cached else why) + more)


def _check_room(repository: Repository, files: Iterable[str]) -> int:
    """Raises UserError if the disk has no room for the rest of the files. -> its bytes"""
    nbytes = sum(max(0, repository.sizes[file] - repository.here(file)) for file in files)
    disk = next(folder for folder in (repository.folder, *repository.folder.parents) if folder.is_dir())
    if nbytes > (free := shutil.disk_usage(disk).free):
        raise repository.model.error(
            f"{_size(nbytes)} to fetch, but {disk} has {_size(free)} left: make room, or set {repository.space} to a "
            "folder on a larger disk"
        )
    return nbytes


def _gguf_files(repository: Repository) -> list[str]:
    """The GGUF file that the user means, or all files that it is split into."""
    model, models = repository.model, dict[str, list[str]]()  # files by their name without the numbers of parts
    for file in sorted(repository.sizes):
        if file.endswith(SUFFIX) and not NO_MODEL.search(file):
            split = SPLIT.fullmatch(file)
            models.setdefault(f"{split[1]}{SUFFIX}" if split else file, []).append(file)
    if not models:
        raise _lacking(repository, f"has neither {SINGLE} nor {INDEX} nor GGUF files: name a model that has")
    tag = model.file or USUAL
    quant = re.compile(rf"(?:^|[-._/]){re.escape(tag)}(?=[-./])", re.IGNORECASE)
    fitting = [name for name, files in models.items() if tag in (name, *files)]
    fitting = fitting or [name for name in models if quant.search(name)]
    if not fitting and not model.file and len(models) == 1:
        fitting = list(models)
    if len(fitting) != 1:
        how = f"{len(fitting)} files are of {tag}" if fitting else f"no file is of {tag}"
        one_of = f"write {model.name}:FILE with one of {listed(fitting or list(models), 30)}"
        raise model.error(f"{how}: {one_of}") if fitting else _lacking(repository, how, f": {one_of}")
    files = models[fitting[0]]
    split = SPLIT.fullmatch(files[0])
    return [f"{split[1]}-{i + 1:05}-of-{split[3]}{SUFFIX}" for i in range(int(split[3]))] if split else files


def _size(nbytes: int) -> str:
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB else f"{nbytes / MB:.1f} MB"
