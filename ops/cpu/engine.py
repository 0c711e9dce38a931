"""The engine of this process: loading the native module, starting its threads and kernels, checking tensors before
their addresses are passed on, and capturing steps.

`native` is the native module with an engine running; where nobody called `start`, its first use starts one thread with
the best kernels. `module` is the same without an engine, for what needs none.
"""

import functools
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from umbra.base.errors import REFUSED_STATUS, UserError, refusal

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
SYSFS = "/sys/devices/system"
PROBE_BYTES = 16 << 20  # for each core: more than its share of most machines' last-level cache
PARTS = (Fraction(1, 4), Fraction(1, 2), Fraction(2, 3), Fraction(1))  # of the cores: thread counts that are tried


@functools.cache
def _load() -> ModuleType:
    try:
        module = importlib.import_module("umbra.ops.cpu._native")
    except ImportError as error:
        raise UserError(
            f"the native CPU module is not built ({error}): run bash infer.sh or bash test.sh once"
        ) from None
    module.end_without_memory(f"error: {refusal(MemoryError())}\n", REFUSED_STATUS)
    return module


def _running() -> ModuleType:
    if not _started:
        start(1, "auto")
    return _load()


if TYPE_CHECKING:
    import umbra.ops.cpu._native as _native

    module = _native
    native = _native
else:

    class _Lazy:
        """The names of the module that `ready()` returns, each looked up once, when it is first used."""

        def __init__(self, ready: Callable[[], ModuleType]):
            self._ready = ready

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._ready(), name)
            setattr(self, name, value)
            return value

    module, native = _Lazy(_load), _Lazy(_running)

_started = False
_share: "list[module.Node]" = []  # the NUMA nodes with this rank's cores, as of the last `start`


def start(threads: int, instruction_set: str, rank: int = 0, ranks: int = 1, shadow: int = 0) -> str:
    """Starts the engine of rank `rank` of `ranks` on this machine, replacing a running one, and returns the instruction
    set it uses. With `threads` 0 a single rank gets as many threads as are worth having; each of several ranks gets its
    share of the cores. `shadow` threads of a second pool (`shadow_teams`) get their own cores if there are enough."""
    _share[:] = nodes = module.share(nodes=own_nodes(), rank=rank, ranks=ranks)
    cores = sum(len(node.cores) for node in nodes)
    cores = cores - shadow if cores - shadow > 1 else cores

    def teams(threads: int) -> tuple[list[module.Team], list[module.Team]]:
        return module.divide(nodes=nodes, device=threads, shadow=shadow)

    def seconds(threads: int) -> float:
        start_teams(teams(threads)[0], instruction_set)
        probe = module.ReadProbe(bytes=min(cores, 32) * PROBE_BYTES)
        return min(_seconds_of(probe) for _ in range(3))

    count = threads or (cores if ranks > 1 else worth_having(cores, seconds))
    own, others = teams(count)
    return start_teams(own, instruction_set, together(own, others, sum(len(node.cores) for node in nodes)))


def together(own: "list[module.Team]", others: "list[module.Team]", cores: int) -> "list[module.Team]":
    """Teams with the threads of two pools, or fewer if they share their part of `cores`; none if that is no more than
    `own` has, or if the pools are on different nodes."""
    if [team.memory for team in own] != [team.memory for team in others]:
        return []
    teams = []
    for a, b in zip(own, others, strict=True):
        cpus = sorted({*a.cpus, *b.cpus})  # none: not pinned
        threads = min(a.threads + b.threads, len(cpus) or cores // len(own))
        teams.append(module.Team(a.memory, max(a.threads, threads), cpus))
    return teams if any(a.threads < b.threads for a, b in zip(own, teams, strict=True)) else []


def worth_having(cores: int, seconds: Callable[[int], float]) -> int:
    """The smallest of a few thread counts that reads memory within 5 % of the fastest speed. `seconds(threads)` is the
    time for a fixed amount. Large machines reach full speed with fewer threads than cores, which leaves cores free."""
    if cores <= 2:
        return cores
    times = {count: seconds(count) for count in sorted({max(1, round(cores * part)) for part in PARTS})}
    return min(count for count, time in times.items() if time <= min(times.values()) / 0.95)


def start_teams(teams: "list[module.Team]", instruction_set: str, wide: "Sequence[module.Team]" = ()) -> str:
    """`start` with given teams of threads, one for each NUMA node in use, and those of `native.widen`: the same results
    with other threads."""
    global _started
    try:
        chosen = module.start(teams=teams, instruction_set=instruction_set, wide=wide)
    except ValueError as error:
        raise UserError(str(error)) from None
    _started = True
    return chosen


def shadow_teams(threads: int) -> "list[module.Team]":
    """Teams for a second pool of so many threads, on the cores that `start` left for it."""
    device = sum(team.threads for team in native.teams())
    return module.divide(nodes=_share or own_nodes(), device=device, shadow=threads)[1]


def own_cpus() -> list[int]:
    """Every CPU that this rank may use; the calling thread may be pinned to only some of them."""
    return [cpu for node in _share or own_nodes() for core in node.cores for cpu in core]


def cores_of(rank: int = 0, ranks: int = 1) -> int:
    """Number of cores in rank `rank`'s share of this machine."""
    return sum(len(node.cores) for node in module.share(nodes=own_nodes(), rank=rank, ranks=ranks))


def placement() -> str:
    """Returns where the engine's threads run, in words for the start line of a run."""
    teams = native.teams()
    text = _counted(sum(team.threads for team in teams), "thread")
    if teams[0].memory < 0:
        return text
    text += f" on {_counted(len(teams), 'NUMA node')}"
    bound = all(native.Buffer(bytes=0, team=i).bound for i in range(len(teams)))
    return text if bound else f"{text} (mbind refused: weights lie where they are first touched)"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


@functools.cache
def own_nodes() -> "list[module.Node]":
    """The NUMA nodes of this machine. Read once, before a pool pins this thread to some of its CPUs."""
    return module.read_nodes(root=SYSFS, allowed=module.allowed_cpus())


def _seconds_of(probe: "module.ReadProbe") -> float:
    start = time.perf_counter()
    probe.run()
    return time.perf_counter() - start


def pointer(x: Tensor | None, dtype: torch.dtype = torch.float32, contiguous: bool = True) -> int:
    """The address of a CPU tensor of type `dtype`; 0 for None. Any other tensor is a TypeError."""
    if x is None:
        return 0
    if x.dtype != dtype or x.device.type != "cpu" or (contiguous and not x.is_contiguous()):
        raise TypeError(f"{x.dtype} {x.device} {tuple(x.shape)} {x.stride()} where {dtype} on the cpu is needed")
    return x.data_ptr()


def strided(x: Tensor) -> int:
    """The address of (T, heads, width) whose heads are contiguous and whose tokens may be any distance apart."""
    if x.stride()[1:] != (x.shape[2], 1) and x.shape[1] > 1:
        raise TypeError(f"heads are not contiguous: {tuple(x.shape)} {x.stride()}")
    return pointer(x, contiguous=False)


def host(function: Callable[[], object]) -> None:
    """Calls `function` now and, while a tape is being captured, records the call for every replay. `function` may use
    torch and native ops; it must read and write tensors at the addresses that they had at capture."""
    with _disable_current_modes():
        native.host(function=function)


class Recorder(TorchDispatchMode):
    """Limits torch to views and allocations while a tape is captured. Collectives and copies become host nodes, which
    each replay calls. Any other computation would be missing from replays and is refused."""

    ROOM = ("aten::empty", "aten::new_empty", "aten::detach", "aten::alias")
    COPIES = "aten::new_zeros", "aten::copy_", "aten::cat", "aten::clone", "aten::flatten", "aten::index_select"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise PyTorch imports its compiler at the first op, which takes seconds

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
            if not name.startswith(self.COPIES):
                raise RuntimeError(f"{name} cannot be captured: it computes outside the native ops")
            out = self._as_host_node(function, args, kwargs or {})
        return out

    def _as_host_node(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Each replay calls `function` again and writes its result into the tensor that the first call returned."""
        first: list[Any] = []

        def call() -> None:
            out = function(*args, **kwargs)
            if not first:
                first.append(out)
            elif isinstance(out, Tensor):
                first[0].copy_(out)  # of an in-place function, this copies a tensor onto itself
            else:
                out[-1].wait()  # the collective's work object; at capture the caller waits for it

        native.host(function=call)
        return first[0]


def _is_view(out: Any, args: Any) -> bool:
    """Returns whether all tensors of `out` share memory with tensors of `args`. Names would not tell: a reshape may
    copy."""
    theirs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
    outs = out if isinstance(out, (list, tuple)) else [out]
    return all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in theirs for x in outs)


class Tape:
    """A captured step. It keeps the tensors that were allocated during capture alive, at their addresses."""

    def __init__(self) -> None:
        self.records = native.Tape()
        self.kept: list[Tensor] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A context in which ops run as usual and are recorded."""
        self.records.begin()
        try:
            with Recorder() as recorder:
                yield
            self.kept = recorder.kept
        finally:
            self.records.end()

    def replay(self) -> None:
        self.records.replay()
