"""Guards the graphs that torchair keeps for the next start: they are used only if nothing they depend on has changed.

torchair itself compares little more than the printed form of a module, and the files that it loads can run code. So
next to each of its folders there is a manifest with everything that the graph was made from and the hash of every file:

    compile_cache/<case>/rank<r>of<w>/<step>_<n>.lock      held from open to close
    compile_cache/<case>/rank<r>of<w>/<step>_<n>/manifest.json   facts; files: null until the compile has succeeded
    compile_cache/<case>/rank<r>of<w>/<step>_<n>/graph/    written by torchair

If a fact differs, the graph is compiled again. Any state that this file does not produce (a missing manifest, a
changed or unknown file, a file that others could write) is refused and left as it is, because it may belong to another
user. This file does not import torch.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from umbra.base.errors import UserError
from umbra.base.files import sync
from umbra.executor.platform.ascend.trusted_files import (
    Untrusted,
    check_own,
    close_to_others,
    fingerprint,
    own_files,
    read_own,
)
from umbra.executor.platform.ascend.versions import Versions
from umbra.executor.platform.settings import GRAPHS
from umbra.models.config import ModelConfig

MANIFEST, GRAPH = "manifest.json", "graph"
LAYOUT = 1  # raised whenever the manifest or the folder changes its meaning
LIMIT = 4 << 20  # bytes of a manifest

JsonValue: TypeAlias = Any
Facts: TypeAlias = dict[str, JsonValue]


def compile_facts(
    case: Facts,
    config: ModelConfig,
    versions: Versions,
    torchair: str,
    sources: str,
    kernels_built: int,
    communicator: str,
) -> Facts:
    """Everything that a compiled graph depends on except its rank and its shapes.

    `case` has every setting that can change a graph, `config` is the model's, `sources` a digest of the code that was
    traced, `kernels_built` the time at which the kernels of ops/ascend/vector_core were built (0: never),
    `communicator` the name of the one that rows of experts are exchanged over, which torchair keeps as it is.
    """
    python = platform.python_version()  # torchair keeps Python byte code too
    made_by = dict(torch=versions.torch, torch_npu=versions.torch_npu, torchair=torchair, cann=versions.cann)
    made_by |= dict(python=python, sources=sources, communicator=communicator)
    return made_by | dict(kernels_built=kernels_built, model=dataclasses.asdict(config), case=case)


class CompileCache:
    """The compiled graphs of one rank of one case."""

    def __init__(self, case_name: str, rank: int, world_size: int, facts: Facts, root: Path, patience_s: float = 900):
        self.root, self.subfolder = root.resolve(), Path(case_name, f"rank{rank}of{world_size}")
        self.facts = dict(layout=LAYOUT) | facts | dict(rank=rank, world_size=world_size)
        self.patience_s = patience_s  # bounded, since ranks of two jobs could wait for each other for ever

    def open(self, step: str, shapes: JsonValue) -> "CacheEntry":
        """The entry for a step, whose name has its size, and inputs of these shapes and types. The caller seals it once
        the graph is compiled, and closes it in any case. Waits while another process has the entry open."""
        parent = self.root
        _make_own(parent)
        for part in self.subfolder.parts:
            _make_own(parent := parent / part)
        lock = _lock(parent / f"{step}.lock", self.patience_s)
        try:
            return CacheEntry(parent / step, self.facts | dict(shapes=shapes), lock)
        except BaseException:
            os.close(lock)
            raise


class CacheEntry:
    """One compiled graph. If `hit`, torchair loads it from `folder`; otherwise torchair compiles it into `folder`, and
    `reason` says why."""

    def __init__(self, home: Path, facts: Facts, lock: int):
        self.home, self.lock = home, lock
        self.folder = home / GRAPH
        self.facts: Facts = json.loads(json.dumps(facts))  # as they are read back: tuples become lists
        try:
            self.reason = _reason_to_compile(home, self.facts)
        except (Untrusted, OSError) as error:
            raise _refusal(home, error) from None
        self.hit = not self.reason
        if self.hit:
            print(f"compile cache: hit {home}")
            return
        print(f"compile cache: miss ({self.reason}), compiling into {home}")
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            _write_manifest(home, self.facts, None)  # before old files are removed and new ones written
            _remove(self.folder)
            self.folder.mkdir(mode=0o700)
        except OSError as error:
            raise UserError(f"{home}: cannot be written: {error.strerror}") from None

    def seal(self) -> None:
        """Record the files that torchair has written, so that the next start uses them."""
        if self.hit:
            return
        try:
            close_to_others(self.folder)
            paths = own_files(self.folder)
            if not paths:
                raise Untrusted("torchair wrote nothing")
            files = {str(path.relative_to(self.folder)): fingerprint(path) for path in paths}
            for path in {self.folder, *paths, *(path.parent for path in paths)}:
                sync(path)  # before the manifest: files that a loss of power has changed would be refused
            _write_manifest(self.home, self.facts, files)
        except (Untrusted, OSError) as error:  # the next start compiles again
            print(f"compile cache: not kept in {self.home}: {error}")

    def close(self) -> None:
        if self.lock >= 0:
            fcntl.flock(self.lock, fcntl.LOCK_UN)  # also where a forked child still has the descriptor
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> "CacheEntry":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def clear_cache(case_name: str, root: Path = GRAPHS) -> int:
    """Remove the compiled graphs of all ranks of a case; returns their number. Folders without our manifest stay."""
    removed = 0
    for home in sorted((root / case_name).glob("rank*of*/*")):
        if home.is_symlink() or not home.is_dir():
            continue
        lock = _lock(home.with_name(f"{home.name}.lock"), 0)
        try:
            _write_manifest(
                home, _read_manifest(home)[0], None
            )  # if this is interrupted, it looks like an interrupted compile
            for path in home.iterdir():
                if path.name != MANIFEST:
                    _remove(path)
            _remove(home / MANIFEST)
            home.rmdir()
            removed += 1
        except (Untrusted, OSError) as error:
            print(f"compile cache: {home}: left alone: {error}")
        finally:
            os.close(lock)
    return removed


def _reason_to_compile(home: Path, facts: Facts) -> str:
    """Returns why the graph in `home` cannot be used, empty if it can be; raises Untrusted if others could have changed
    it."""
    if not os.path.lexists(home):
        return "no cache yet"
    check_own(home, home.lstat())
    there = {path.name for path in home.iterdir()}
    if not there:
        return "no cache yet"
    if MANIFEST not in there:
        raise Untrusted(f"it holds {sorted(there)[0]}, but no {MANIFEST}")
    kept, hashes = _read_manifest(home)
    if unknown := sorted(there - {MANIFEST, GRAPH}):
        raise Untrusted(f"it holds {unknown[0]}, which is not ours")
    if hashes is None:
        return "the last compile was interrupted"
    check_own(home / GRAPH, (home / GRAPH).lstat())
    files = {str(path.relative_to(home / GRAPH)): path for path in own_files(home / GRAPH)}
    if unlike := sorted(files.keys() ^ hashes.keys()):
        raise Untrusted(f"{unlike[0]} is {'unknown' if unlike[0] in files else 'missing'}")
    if difference := first_difference(kept, facts):
        return difference
    for name, path in files.items():
        if fingerprint(path) != hashes[name]:
            raise Untrusted(f"{name} has changed since it was written")
    return ""


def first_difference(old: JsonValue, new: JsonValue, name: str = "") -> str:
    """`torch_npu was "2.8.0", is "2.13.0"`: the first fact that differs, in the order of `new`; empty: none."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*new, *old]):
            path = f"{name}.{key}" if name else key
            if key not in old or key not in new:
                return f"{path} is {'new' if key in new else 'gone'}"
            if difference := first_difference(old[key], new[key], path):
                return difference
        return ""
    return "" if old == new else f"{name} was {_short(old)}, is {_short(new)}"


def _short(value: JsonValue) -> str:
    text = json.dumps(value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _read_manifest(home: Path) -> tuple[Facts, dict[str, list[int | str]] | None]:
    """(facts, [bytes, SHA-256] of each file, or None after an interrupted compile)"""
    try:
        kept = json.loads(read_own(home / MANIFEST, LIMIT))
    except (OSError, ValueError, RecursionError) as error:
        raise Untrusted(f"{MANIFEST} is unreadable: {error}") from None
    facts, files = (kept.get("facts"), kept.get("files")) if isinstance(kept, dict) else (None, None)
    if not isinstance(facts, dict) or "layout" not in facts or not (files is None or isinstance(files, dict)):
        raise Untrusted(f"{MANIFEST} is not one of ours")
    return facts, files


def _write_manifest(home: Path, facts: Facts, files: dict[str, list[int | str]] | None) -> None:
    """Writes the whole manifest or nothing. The caller holds the lock, so the temporary name is free."""
    temporary = home.with_name(f"{home.name}.manifest.tmp")
    _remove(temporary)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(dict(facts=facts, files=files), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(home / MANIFEST)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_own(folder: Path) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check_own(folder, folder.lstat())
        os.listdir(folder)
    except (Untrusted, OSError) as error:
        raise _refusal(folder, error) from None


def _lock(path: Path, patience_s: float) -> int:
    """A descriptor that holds the lock. The file is never removed, because other processes may be waiting for it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        check_own(path, os.fstat(lock))
    except (Untrusted, OSError) as error:
        raise _refusal(path, error) from None
    until, printed = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(lock)
                raise UserError(
                    f"compile cache: {path} is held by another run of this case: wait for its end"
                ) from None
            if not printed:
                print(f"compile cache: waiting for another process that holds {path}")
            printed = True
            time.sleep(0.05)


def _refusal(path: Path, error: Exception) -> UserError:
    return UserError(
        f"compile cache: {path}: not used, since {error}: look who put it there, then remove it by hand or, if this "
        "project did, with --clear-cache"
    )
