"""The native module's engine: loads it, starts pool and kernels, and checks types before pointers are taken."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from errors import UserError

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_engine: ModuleType | None = None


def native() -> ModuleType:
    """The engine; on first use by someone who did not `start` it: one thread, the best kernels."""
    return _engine or start(1, "auto")[0]


def start(threads: int, instruction_set: str) -> tuple[ModuleType, str]:
    """(engine, the instruction set it uses). A later call replaces pool and kernels."""
    global _engine
    try:
        module = importlib.import_module("ops.cpu._native")
    except ImportError as error:
        raise UserError(
            f"the native CPU module is not built ({error}): run bash infer.sh or bash test.sh once"
        ) from None
    try:
        chosen: str = module.start(threads, instruction_set, [])
    except ValueError as error:
        raise UserError(str(error)) from None
    _engine = module
    return module, chosen


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


class RefuseUnrecorded(TorchDispatchMode):
    """While a tape is captured, torch may only make views and room; anything computed would be missing from replays."""

    ALLOWED = ("aten::empty", "aten::detach", "aten::alias")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        name = function._schema.name
        if isinstance(out, Tensor) and name.startswith(self.ALLOWED):
            self.kept.append(out)
        elif not function.is_view:
            raise RuntimeError(f"{name} cannot be captured: it computes outside the native ops")
        return out


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
            with RefuseUnrecorded() as guard:
                yield
            self.kept = guard.kept
        finally:
            self.records.end()

    def replay(self) -> None:
        self.records.replay()
