"""Makes the fake NPU compute.

The host code of torch_npu and the fake CANN take each op as ever; then it is computed on the CPU, in the device's
memory, which is host memory. So numbers are right where the calls are, and a test can make them wrong. It shows nothing
of CANN's kernels.

Ops of a captured graph are computed again at each replay, after torch_npu has updated the lengths of attention. GE's
graphs are lowered by torchair, and then the same program is run op by op. Collectives exchange their tensors through
the store of the process group.
"""

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
import torchair
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.ascend import npu_on_cpu, umbra_on_cpu  # noqa: F401 (registers)
from tests.ascend.ge import ge_programs
from umbra.ops.ascend.shadow import ShadowNodes

FAKE = ctypes.CDLL("libfake_cann.so")
CPU = torch.device("cpu")
SYNC_MS = 3000  # most that an op waits for streams, which wait for ever if a callback never fires
UNDEFINED = (
    "empty",
    "empty_with_format",
    "new_empty",
    "empty_like",
    "empty_strided",
    "record_stream",
    "set_",
    "resize_",
    "_local_scalar_dense",
    "get_npu_format",
)
ATTENTION = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"

umbra_on_cpu.TWIN.add("fused_moe_w4a16")


def start() -> None:
    """From here on, this process's device computes."""
    mode = MODE
    graph = torch_npu.npu.NPUGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        mode.recording = self.jobs = []
        begin(self, *args, **kwargs)

    def capture_end(self: Any) -> None:
        mode.recording = None
        end(self)

    def replay_and_compute(self: Any) -> None:
        mode.flush()
        replay(self)
        mode.pending = list(self.jobs)

    graph.capture_begin, graph.capture_end, graph.replay = capture_begin, capture_end, replay_and_compute
    torch.npu.graph_task_update_begin = mode.around(torch.npu.graph_task_update_begin, True)
    torch.npu.graph_task_update_end = mode.around(torch.npu.graph_task_update_end, False)
    torchair.get_npu_backend = run_as_well(torchair.get_npu_backend)
    finish = ShadowNodes.finish

    def compute_and_finish(self: ShadowNodes) -> None:
        mode.flush()  # residents may change when the step has ended
        finish(self)

    ShadowNodes.finish = compute_and_finish  # type: ignore[method-assign]
    mode.lowering.__enter__()
    mode.__enter__()  # type: ignore[no-untyped-call]


def run_as_well(get_backend: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that also runs the program op by op in max-autotune mode, since the fake has no GE."""

    def get(compiler_config: Any) -> Any:
        real = get_backend(compiler_config=compiler_config)
        if compiler_config.mode.value != "max-autotune":
            return real

        def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            plain = fx.GraphModule(module, copy.deepcopy(module.graph))
            compiled = real(module, inputs)

            def run(*args: Any) -> Any:
                compiled(*args)
                return plain(*args)

            return run

        return backend

    return get


class Computing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lowering = ge_programs()
        self.recording: list[Any] | None = None  # jobs of the capture under way
        self.pending: list[Any] = []  # jobs of the last replay, until another op needs what they compute
        self.updating = self.replaying = False
        self.turns: dict[str, int] = {}  # collectives of a group so far
        self.sums: dict[int, Tensor] = {}  # address of a captured submit's result -> that of its replay

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def around(self, call: Callable[..., Any], updating: bool) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            self.updating = updating
            return call(*args)

        return called

    def flush(self) -> None:
        jobs, self.pending = self.pending, []
        if jobs:
            settled()  # or a copy of the replay itself would overwrite what is computed here
        self.replaying = True
        for job in jobs:
            job.run()
        self.replaying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):  # something is being traced
            return func(*args, **kwargs)
        if self.updating:
            return self.update(func, args, kwargs)
        self.flush()
        if name_of(func) in ATTENTION and func.namespace != "npu":
            return self.__torch_dispatch__(*on_host_lengths(func, args, kwargs))
        result = func(*args, **kwargs)
        outs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not any(t.device.type == "npu" for t in tensors + outs) or name_of(func) in UNDEFINED:
            return result
        job = Work(self, func, args, kwargs, outs)
        if self.recording is not None:  # a capture launches nothing
            self.recording.append(job)
        else:
            job.run()
        return result

    def update(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An attention of the graph that is being replayed gets other lengths."""
        out = kwargs["out"][0].data_ptr()
        for job in self.pending:
            if "out" in job.kwargs and job.kwargs["out"][0].data_ptr() == out:
                job.args, job.kwargs = args, kwargs
        return func(*args, **kwargs)

    def exchanged(self, group: dist.ProcessGroup, x: Tensor) -> list[Tensor]:
        """`x` of each rank of the group, in order."""
        store: Any = dist.distributed_c10d._get_default_store()
        name = group.group_name
        turn = self.turns[name] = self.turns.get(name, 0) + 1
        mine = on_cpu(x).contiguous()
        store.set(f"{name}/{turn}/{dist.get_rank()}", mine.view(-1).view(torch.uint8).numpy().tobytes())
        parts = [store.get(f"{name}/{turn}/{rank}") for rank in dist.get_process_group_ranks(group)]
        return [torch.frombuffer(bytearray(part), dtype=x.dtype).view(x.shape) for part in parts]


MODE = Computing()


class Work:
    """An op to compute, now or at each replay."""

    def __init__(self, mode: Computing, func: Any, args: Any, kwargs: Any, outs: list[Tensor]):
        self.mode, self.func, self.args, self.kwargs, self.outs = mode, func, args, kwargs, outs

    def run(self) -> None:
        drain()  # or a copy that torch_npu still has in its queue would overwrite what is computed here
        special = SPECIAL.get(name_of(self.func))
        if special:
            return special(self)
        values = [value for value in tree_leaves(self.compute()) if isinstance(value, Tensor)]
        for out, value in zip(self.outs, values, strict=False):
            put(out, value)
        return None

    def compute(self) -> Any:
        args, kwargs = tree_map(moved, self.args), tree_map(moved, self.kwargs)
        kwargs.pop("pin_memory", None)
        try:
            return self.func(*args, **kwargs)
        except NotImplementedError:  # no implementation for the CPU: nothing may depend on the result
            print(f"{self.func} is not computed")
            return [torch.full(out.shape, torch.nan) for out in self.outs]


def on_host_lengths(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """torchair's own form of attention, with lengths on the device, is for GE only: the call of torch_npu's instead."""
    named = {given.name: value for given, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv", "actual_seq_qlen", "actual_seq_kvlen"):
        if isinstance(lengths := named.get(name), Tensor):
            named[name] = on_cpu(lengths).tolist()
    return getattr(torch.ops.npu, name_of(func)).default, (), (), named


def name_of(func: Any) -> str:
    return str(func.overloadpacket.__name__)


def moved(x: Any) -> Any:
    if isinstance(x, Tensor):
        return on_cpu(x)
    return CPU if isinstance(x, torch.device) and x.type == "npu" else x


def on_cpu(t: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    if t.device.type != "npu":
        return t
    if not t.numel():
        return torch.empty(t.shape, dtype=t.dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    memory = (ctypes.c_char * (extent * t.dtype.itemsize)).from_address(t.data_ptr())
    return torch.frombuffer(memory, dtype=t.dtype).as_strided(t.shape, t.stride())


def put(out: Tensor, value: Any) -> None:
    """Outputs of other shapes are those that an op leaves undefined."""
    if isinstance(value, Tensor) and value.shape == out.shape:
        there = on_cpu(out)
        if there.data_ptr() != value.data_ptr():
            there.copy_(value)


def drain() -> None:
    torch_npu.npu.current_stream().npu_stream  # noqa: B018 (waits until torch_npu's task queue is empty)


def settled() -> None:
    """Waits for all streams, but not for ever."""
    drain()
    FAKE.aclrtSynchronizeDeviceWithTimeout(SYNC_MS)


def format_cast(work: Work) -> None:
    put(work.outs[0], on_cpu(work.args[0] if work.args else work.kwargs["self"]))


def attention(work: Work) -> None:
    """Also in the form that writes to given tensors, in which it is captured."""
    kwargs = {name: value for name, value in work.kwargs.items() if name not in ("out", "workspace")}
    op = getattr(torch.ops.npu, name_of(work.func)).default
    values = op(*tree_map(moved, work.args), **tree_map(moved, kwargs))
    for out, value in zip(work.kwargs.get("out", work.outs), values, strict=True):
        put(out, value)


def submit(work: Work) -> None:
    """The real one copies and calls the host; at a replay it must do so again, after what was computed for it."""
    if work.mode.replaying:
        work.mode.sums[work.outs[0].data_ptr()], here = work.func(*work.args)
        put(work.outs[1], on_cpu(here))


def join(work: Work) -> None:
    if work.mode.recording is not None:
        return
    settled()
    sums, own = work.args[0], work.args[1]
    put(work.outs[0], on_cpu(own) + on_cpu(work.mode.sums.pop(sums.data_ptr(), sums)))


def nothing(work: Work) -> None:
    pass


def all_reduce_(work: Work) -> None:
    (x,), group = work.args[0], dist.ProcessGroup.unbox(work.args[1])
    put(x, summed(work.mode.exchanged(group, x)))


def all_gather_base(work: Work) -> None:
    out, x, group = work.args[0], work.args[1], dist.ProcessGroup.unbox(work.args[2])
    put(out, torch.cat([part.flatten() for part in work.mode.exchanged(group, x)]).view(out.shape))


def reduce_scatter_base(work: Work) -> None:
    out, x, group = work.args[0], work.args[1], dist.ProcessGroup.unbox(work.args[2])
    put(out, summed(work.mode.exchanged(group, x)).chunk(group.size())[group.rank()])


def all_reduce(work: Work) -> None:
    x, group = work.args[0], dist.distributed_c10d._resolve_process_group(work.args[-1])
    put(work.outs[0], summed(work.mode.exchanged(group, x)))


def all_gather(work: Work) -> None:
    x, group = work.args[0], dist.distributed_c10d._resolve_process_group(work.args[-1])
    put(work.outs[0], torch.cat(work.mode.exchanged(group, x)))


def summed(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)


SPECIAL: dict[str, Callable[[Work], None]] = {
    "npu_format_cast": format_cast,
    **dict.fromkeys(ATTENTION, attention),
    **{f"_{name}_get_max_workspace": nothing for name in ATTENTION},
    "shadow_submit": submit,
    "shadow_join": join,
    "allreduce_": all_reduce_,
    "_allgather_base_": all_gather_base,
    "_reduce_scatter_base_": reduce_scatter_base,
    "all_reduce": all_reduce,
    "all_reduce_": all_reduce,
    "all_gather_into_tensor": all_gather,
    "wait_tensor": nothing,
}
