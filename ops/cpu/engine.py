"""The native module's engine: loads it, starts pool and kernels, and checks types before pointers are taken."""

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from errors import UserError
from ops.cpu.threads import worth_having

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
SYSFS = "/sys/devices/system"
PROBE_BYTES = 16 << 20  # for each core: more than its share of most machines' last cache
_engine: ModuleType | None = None
_share: list[Any] = []  # nodes with this rank's cores, as it was last started


def native() -> ModuleType:
    """The engine; on first use by someone who did not `start` it: one thread, the best kernels."""
    return _engine or start(1, "auto")[0]


def start(threads: int, instruction_set: str, rank: int = 0, ranks: int = 1, shadow: int = 0) -> tuple[ModuleType, str]:
    """(engine, the instruction set it uses) for rank `rank` of `ranks` on this machine. `threads` 0: as many as are
    worth having; with several ranks, the rank's share of the cores. `shadow` threads of another pool (`shadow_teams`)
    get cores of their own if there are enough. A later call replaces pool and kernels."""
    module = _load()
    _share[:] = nodes = module.share(_nodes(), rank, ranks)
    cores = sum(len(node.cores) for node in nodes)
    cores = cores - shadow if cores - shadow > 1 else cores

    def teams(threads: int) -> list[Any]:
        device: list[Any] = module.divide(nodes, threads, shadow)[0]
        return device

    def seconds(threads: int) -> float:
        start_teams(teams(threads), instruction_set)
        probe = module.ReadProbe(min(cores, 32) * PROBE_BYTES)
        return min(_seconds_of(probe) for _ in range(3))

    count = threads or (cores if ranks > 1 else worth_having(cores, seconds))
    return start_teams(teams(count), instruction_set)


def shadow_teams(threads: int) -> list[Any]:
    """Of a pool beside the engine's, on the cores that `start` left for as many."""
    device = sum(team.threads for team in native().teams())
    teams: list[Any] = _load().divide(_share or _nodes(), device, threads)[1]
    return teams


def own_cpus() -> list[int]:
    """All that this rank may use; the calling thread may be kept on a part of them."""
    return [cpu for node in _share or _nodes() for core in node.cores for cpu in core]


def cores_of(rank: int = 0, ranks: int = 1) -> int:
    """Of rank `rank`'s share of this machine."""
    return sum(len(node.cores) for node in _load().share(_nodes(), rank, ranks))


def start_teams(teams: list[Any], instruction_set: str) -> tuple[ModuleType, str]:
    """`start` with given teams of threads, one for each NUMA node in use."""
    global _engine
    module = _load()
    try:
        chosen: str = module.start(teams, instruction_set)
    except ValueError as error:
        raise UserError(str(error)) from None
    _engine = module
    return module, chosen


def placement() -> str:
    """Where the engine's threads are, for people."""
    teams = native().teams()
    text = _counted(sum(team.threads for team in teams), "thread")
    if teams[0].memory < 0:
        return text
    text += f" on {_counted(len(teams), 'NUMA node')}"
    bound = all(native().Buffer(0, i).bound for i in range(len(teams)))
    return text if bound else f"{text} (mbind refused: weights lie where they are first touched)"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _load() -> ModuleType:
    try:
        return importlib.import_module("ops.cpu._native")
    except ImportError as error:
        raise UserError(
            f"the native CPU module is not built ({error}): run bash infer.sh or bash test.sh once"
        ) from None


@functools.cache
def _nodes() -> list[Any]:
    """The machine's. Read once, before a pool pins this thread to some of its CPUs."""
    module = _load()
    return module.read_nodes(SYSFS, module.allowed_cpus())


def _seconds_of(probe: Any) -> float:
    start = time.perf_counter()
    probe.run()
    return time.perf_counter() - start


def pointer(x: Tensor | None, dtype: torch.dtype = torch.float32, contiguous: bool = True) -> int:
    """The address of a CPU tensor of the right type; 0 for None. Anything else is a bug of the caller."""
    if x is None:
        return 0
    if x.dtype != dtype or x.device.type != "cpu" or (contiguous and not x.is_contiguous()):
        raise TypeError(f"{x.dtype} {x.device} {tuple(x.shape)} {x.stride()} where {dtype} on the cpu is needed")
    return x.data_ptr()


def host(function: Callable[[], object]) -> None:
    """Call `function` now and, when a tape is being captured, at this place of each of its replays. It may use torch;
    it finds and leaves tensors where they were at capture."""
    with _disable_current_modes():
        native().host(function)


class Recorder(TorchDispatchMode):
    """While a tape is captured, torch may make views and room. Collectives, and on several ranks the copies around
    them, become host nodes; anything else it computed would be missing from replays and is refused."""

    ROOM = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias")
    COPIES = ("aten::new_zeros", "aten::copy_", "aten::cat", "aten::clone", "aten::flatten")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = function._schema.name
        if name.startswith("c10d::"):
            return self._as_host_node(function, args, kwargs or {})
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and name.startswith(self.ROOM):
            self.kept.append(out)
        elif function._schema.is_mutable or not _is_view(out, args):
            if not (name.startswith(self.COPIES) and distributed.is_initialized()):
                raise RuntimeError(f"{name} cannot be captured: it computes outside the native ops")
            out = self._as_host_node(function, args, kwargs or {})
        return out

    def _as_host_node(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Each replay calls it again and leaves its result where the first one lies."""
        first: list[Any] = []

        def call() -> None:
            out = function(*args, **kwargs)
            if not first:
                first.append(out)
            elif isinstance(out, Tensor):
                first[0].copy_(out)  # in place, this is a copy onto itself
            else:
                out[-1].wait()  # a collective's work; the first one's caller waits itself

        native().host(call)
        return first[0]


def _is_view(out: Any, args: Any) -> bool:
    """Whether all of `out` lies in memory of `args`. By name, a reshape that had to copy would pass as a view."""
    theirs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    outs = out if isinstance(out, (list, tuple)) else [out]
    return all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in theirs for x in outs)


class Tape:
    """A captured step. The tensors that were made while it was captured stay where they are as long as it lives."""

    def __init__(self) -> None:
        self.records = native().Tape()
        self.kept: list[Tensor] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Ops called inside run as ever and are recorded."""
        self.records.begin()
        try:
            with Recorder() as recorder:
                yield
            self.kept = recorder.kept
        finally:
            self.records.end()

    def replay(self) -> None:
        self.records.replay()
