"""What a rank does from start to report, with an engine and a loop that are made up, and how its launcher starts it."""

import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from executor import model_runner as module
from executor.checkpoint import progress
from executor.config.env import NodeEnv, RankEnv
from executor.config.load import load_case
from executor.engine.sequence import new_sequence
from executor.engine.timings import Timings
from executor.launch import launch as launching
from executor.launch.nodes import Cause
from executor.model_runner import ModelRunner, Qwen3MoeRunner, make_runner
from executor.run import shadow_report
from executor.run.report import Completion, make_report
from umbra.errors import EXIT_STATUS


def rank(number: int = 0) -> RankEnv:
    return RankEnv(number, 4, number, 2, "")


class Loop:
    """Gives each sequence a token a step."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.timings = Timings()
        self.watched = False

    def submit(self, request: Any, id: int) -> Any:
        self.added.append(new_sequence(id, request))
        return self.added[-1]

    @property
    def idle(self) -> bool:
        return all(sequence.finish_reason for sequence in self.added)

    def step(self) -> list[Any]:
        assert self.watched
        events = []
        for sequence in self.added:
            if not sequence.finish_reason:
                sequence.ids.append(5)
                sequence.finish_reason = "length" if len(sequence.ids) == sequence.longest else ""
                events.append(SimpleNamespace(tokens=(5,)))
        return events


class Bar:
    """A progress bar that notes what it is told."""

    made: ClassVar[list["Bar"]] = []

    def __init__(self, **options: Any):
        self.options, self.done = options, 0
        Bar.made.append(self)

    def update(self, count: int) -> None:
        self.done += count

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None: ...


def runner(monkeypatch: pytest.MonkeyPatch, number: int = 0, offload: object = None, **data: Any) -> Any:
    case = load_case("demo", ["max_new_tokens=12", "seed=40", "top_k=7"])
    case = dataclasses.replace(case, data_config=dataclasses.replace(case.data_config, **data))
    made: Any = ModelRunner(case, Path("results"), rank(number))
    made.loop = Loop()

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        made.loop.watched = True
        yield
        made.loop.watched = False

    platform = SimpleNamespace(watched=watched, peak_memory_bytes=lambda: 77, device=torch.device("cpu"))
    made.engine = SimpleNamespace(offload=offload, platform=platform, kernels={"k": "v"}, rebalancing=None)

    def gather_rows(rows: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        assert (rows.tolist(), sizes) == ([77], (1,))
        return torch.tensor([5, 77])

    made.engine.parallel = SimpleNamespace(world=SimpleNamespace(gather_rows=gather_rows))
    made.planned = None
    Bar.made = []
    monkeypatch.setattr(module, "tqdm", Bar)
    return made


PROMPTS = [(letter, [1, 2]) for letter in "abcdef"]


def test_all_prompts_run_to_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    of = runner(monkeypatch)
    before = of.loop.timings
    found = of.model_generate(PROMPTS)
    assert of.loop.added == found
    assert [(s.id, len(s.generated), s.request.sampling.seed) for s in found] == [(n, 12, 40 + n) for n in range(6)]
    sampling = found[1].request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.ignore_eos) == (0.7, 7, 0.9, False)
    assert found[1].request.ids == (1, 2)
    assert of.loop.timings is not before
    [bar] = Bar.made
    assert bar.done == bar.options.pop("total") == 72
    assert bar.options == {"desc": "generating", "unit": "token", "disable": None, "leave": False}


@pytest.mark.parametrize(("offload", "most"), [(None, 2), (object(), 9)])
def test_a_warm_up_runs_a_batch_for_a_few_tokens(monkeypatch: pytest.MonkeyPatch, offload: object, most: int) -> None:
    of = runner(monkeypatch, offload=offload)
    found = of.model_generate(PROMPTS, warm_up=True)
    assert [len(sequence.generated) for sequence in found] == [most] * 4  # as many as run together
    assert Bar.made[0].options["disable"] is True
    short = runner(monkeypatch, offload=offload, max_new_tokens=1)
    assert [len(s.generated) for s in short.model_generate(PROMPTS, warm_up=True)] == [1] * 4


def test_only_the_first_rank_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    other = runner(monkeypatch, number=1)
    other.model_generate(PROMPTS)
    assert Bar.made[0].options["disable"] is True


def test_a_bar_is_shown_on_terminals_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "tqdm", Bar)
    for shown, disabled in ((True, None), (False, True)):
        made: Any = progress.loading_bar(9, shown)
        assert made.options == {
            "total": 9, "desc": "loading", "unit": "B", "unit_scale": True, "disable": disabled, "leave": False,
        }  # fmt: skip


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return f"<{len(ids)}>"


def ready(monkeypatch: pytest.MonkeyPatch, of: Any, tokenizer: object) -> Any:
    """What the run does, in order."""
    done: Any = []
    profilers = iter("pq")
    generate = of.model_generate

    def model_generate(prompts: Any, warm_up: bool = False) -> Any:
        done.append(("warm-up" if warm_up else "run", len(prompts), getattr(of.engine, "profiler", None)))
        found = generate(prompts, warm_up)
        of.loop.timings = Timings([0.5], 4, 2.0, 3, 1.5, [0.5], [0.25 if warm_up else 0.75])
        return found

    monkeypatch.setattr(of, "setup", lambda: done.append("setup"))
    monkeypatch.setattr(of, "model_generate", model_generate)
    monkeypatch.setattr(of, "define_profiler", lambda: next(profilers))
    asked: Any = lambda *given: (done.append(given[1:]), tokenizer)[1]  # noqa: E731
    monkeypatch.setattr(module, "open_tokenizer", asked)
    monkeypatch.setattr(module, "encode_prompts", lambda case, tokenizer: [[1, 2]] * len(case.data_config.prompts))
    return done


def test_a_run_warms_up_generates_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    of = runner(monkeypatch, max_new_tokens=3)
    done = ready(monkeypatch, of, Tokenizer())
    report = of.run()
    assert done == [(True, of.config.vocab_size), "setup", ("warm-up", 4, None), ("run", 4, "p")]
    prompts = of.case.data_config.prompts
    completion = {"text": "<3>", "tokens": [5, 5, 5], "finish_reason": "length"}
    assert report["completions"] == [{"prompt": prompt, **completion} for prompt in prompts]
    assert (report["peak_memory_bytes"], report["kernels"], report["placements"]) == (77, {"k": "v"}, [])
    assert "offload" not in report
    cold = runner(monkeypatch, warm_up=False, max_new_tokens=1)
    cold.engine.rebalancing = SimpleNamespace(report=lambda: ["placed"])
    done = ready(monkeypatch, cold, Tokenizer())
    assert cold.run()["placements"] == ["placed"]
    assert done[1:] == ["setup", ("run", 4, None)]


@pytest.mark.parametrize(("tokenizer", "text"), [(None, ""), (Tokenizer(), "<2>")])
def test_a_run_without_prompts_has_random_ones(monkeypatch: pytest.MonkeyPatch, tokenizer: object, text: str) -> None:
    of = runner(monkeypatch, prompts=(), warm_up=False, batch_size=3, input_max_len=5, max_new_tokens=2)
    done = ready(monkeypatch, of, tokenizer)
    report = of.run()
    assert done[0] == (False, of.config.vocab_size)
    assert [(c["prompt"], c["text"]) for c in report["completions"]] == [("", text)] * 3
    rows = [list(sequence.request.ids) for sequence in of.loop.added]
    assert rows == [row for _, row in of._random_prompts()]
    again = torch.randint(of.config.vocab_size, (3, 5), generator=torch.Generator().manual_seed(40))
    assert rows == again.tolist()


def test_a_run_with_shadows_compares_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    offload = object()
    of = runner(monkeypatch, offload=offload, max_new_tokens=2)
    done = ready(monkeypatch, of, Tokenizer())
    of.planned = SimpleNamespace(
        begin=lambda *given: done.append(("begin", *given)),
        end=lambda *given: (done.append(("end", *given)), "found")[1],
    )
    monkeypatch.setattr(module, "write_offload", lambda *given: {"given": given})
    report = of.run()
    kinds = [one if isinstance(one, str) else one[0] for one in done[1:]]
    assert kinds == ["setup", "warm-up", "begin", "run", "end"]
    assert done[3] == ("begin", offload, [0.25])
    assert done[5] == ("end", offload, [0.75])
    world, device = of.engine.parallel.world, of.engine.platform.device
    assert report["offload"] == {"given": (offload, Path("results"), world, device), "plan": "found"}


@pytest.mark.parametrize(("mode", "exe_mode"), [("none", "eager"), ("elastic", "graph")])
def test_a_rank_is_set_up_part_by_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: str, exe_mode: str
) -> None:
    of: Any = ModelRunner(
        load_case("demo", [f"offload_config.mode={mode}", f"exe_mode={exe_mode}"]), Path("r"), rank(1)
    )
    done: Any = []
    place = SimpleNamespace(rank=1, size=4)
    parallel: Any = SimpleNamespace(attn_tp=place, attn_dp=place, moe_tp=place, moe_ep=place, world="world")
    platform: Any = SimpleNamespace(name="here")
    engine = SimpleNamespace(eager_step="eager", graph_step=lambda: "graph")
    planned = SimpleNamespace(choices="choices")
    monkeypatch.setattr(module, "load_platform", lambda name: lambda *given: (done.append((name, *given)), platform)[1])
    monkeypatch.setattr(module, "platform_settings", lambda case: "settings")
    monkeypatch.setattr(module, "init_parallel", lambda *given: (done.append(given), parallel)[1])
    monkeypatch.setattr(module, "check_host_memory", lambda *given: done.append(given))
    monkeypatch.setattr(module, "plan_run", lambda *given: (done.append(given), planned)[1])
    monkeypatch.setattr(module, "Engine", lambda *given: (done.append(given), engine)[1])
    monkeypatch.setattr(module, "stop_ids", lambda *given: given)
    monkeypatch.setattr(module, "Loop", lambda *given: given)
    of.setup()
    profiler = done[-1][4]
    assert (profiler.enabled, profiler.folder, profiler.rank) == (False, Path("r"), 1)
    shadows = mode != "none"
    assert done == [
        ("cpu", "settings", of.ranks),
        (of.case, of.ranks, platform),
        (of.case, 2),
        *[(of.case, of.ranks, "world", platform)] * shadows,
        (of.case, platform, parallel, of.config, profiler, "choices" if shadows else None, of.packed_cache),
    ]
    assert of.planned is (planned if shadows else None)
    assert of.engine.decode_step == exe_mode
    assert of.loop == (engine, (of.folder, of.config.eos_token_ids))
    said = "rank 1/4 on here: attn_tp 1/4, attn_dp 1/4, moe_tp 1/4, moe_ep 1/4\n"
    assert capsys.readouterr().out == said
    done.clear()
    of.setup(lambda *given: (done.append(given), platform)[1], parallel)
    assert done[:2] == [("settings", of.ranks), (of.case, 2)]


def test_the_report_of_a_run() -> None:
    timings = Timings([0.3, 0.1, 0.2], 50, 0.5, 30, 2.0, [0.02, 0.04, 0.01, 0.03], [], 9, 4)
    case = load_case("demo")
    report = make_report(case, [Completion("p", "t", [1, 2], "stop")], timings, 123, {"a": "b"}, [{"x": 1}])
    versions = report.pop("versions")
    assert set(versions) == {"python", "torch", "machine"}
    assert report.pop("settings") == dataclasses.asdict(case)
    assert report == {
        "case": "demo", "platform": "cpu", "exe_mode": "graph", "world_size": 1,
        "completions": [{"prompt": "p", "text": "t", "tokens": [1, 2], "finish_reason": "stop"}],
        "ttft_ms": 200.0, "tpot_ms_p50": 20.0, "tpot_ms_p99": 40.0, "prefill_tokens": 50,
        "prefill_tokens_per_s": 100.0, "decode_tokens": 30, "decode_tokens_per_s": 15.0, "drafted_tokens": 9,
        "accepted_tokens": 4, "peak_memory_bytes": 123, "kernels": {"a": "b"}, "placements": [{"x": 1}],
    }  # fmt: skip
    none = make_report(case, [], Timings([0.5], 1, 0.5), 0, {}, [])
    assert (none["tpot_ms_p50"], none["tpot_ms_p99"], none["decode_tokens_per_s"]) == (None, None, None)
    assert none["ttft_ms"] == 500


def test_families_may_have_runners_of_their_own() -> None:
    case = load_case("demo")
    found = make_runner(case, Path("results"), rank())
    assert type(found) is Qwen3MoeRunner
    assert (found.case, found.results, found.ranks) == (case, Path("results"), rank())


def test_shadows_of_all_ranks_are_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = shadow_report.TOTALS
    facts: dict[str, Any] = {name: float(number) for number, name in enumerate(names)} | {"exposed_ms": None}
    shapes: list[Any] = []

    def gather_rows(row: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        shapes.append((row.dtype, row.tolist(), sizes))
        return torch.cat([row, row + 1])

    history = SimpleNamespace(report=lambda: dict(facts), steps=[], trace=lambda: [{"a": 1}])
    offload: Any = SimpleNamespace(history=history)
    monkeypatch.setattr(shadow_report, "summary", lambda report: f"hits {report['hit_rate']}")
    drawn: list[Any] = []
    monkeypatch.setattr("executor.run.plots.plot", lambda history, path: drawn.append(path))
    for number, steps in ((1, [1]), (0, []), (0, [1])):
        history.steps = steps
        world: Any = SimpleNamespace(rank=number, size=2, gather_rows=gather_rows)
        report = shadow_report.write_offload(offload, tmp_path, world, torch.device("cpu"))
        own = [0.0, 0.0, 2.0, 3.0, 4.0, 5.0]
        assert shapes[-1] == (torch.float32, [own], (1, 1))
        assert report["ranks"] == [dict(zip(names, [v + more for v in own], strict=True)) for more in (0, 1)]
        told = f"hits 0.0; offload.png, offload_trace.json in {tmp_path}\n"
        assert capsys.readouterr().out == ("" if number else told)
        assert (tmp_path / "offload_trace.json").exists() == (not number and bool(steps))
    assert drawn == [tmp_path / "offload.png"]
    assert (tmp_path / "offload_trace.json").read_text() == '[{"a": 1}]'


class Launched:
    """What torchrun is asked for in place of starting ranks, and the environment at that time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcome: BaseException | None = None):
        self.arguments: Any = None
        self.environment: dict[str, str] = {}
        self.disabled: list[int] = []
        self.discarded: list[Path] = []

        def elastic_launch(config: Any, command: Any) -> Any:
            self.environment = dict(os.environ)

            def start(*arguments: Any) -> None:
                self.started = (config, command, arguments)
                if outcome:
                    raise outcome

            return start

        monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
        monkeypatch.setattr("torch.distributed.run.config_from_args", self.config)
        monkeypatch.setattr(
            "torch.distributed.run.get_args_parser", lambda: SimpleNamespace(parse_args=lambda ranks: ranks)
        )
        monkeypatch.setattr(logging, "disable", self.disabled.append)
        monkeypatch.setattr(launching, "create_results", lambda name: tmp_path / name)
        monkeypatch.setattr(launching, "discard_results", self.discarded.append)
        monkeypatch.setattr(launching, "interface_to", lambda address, port: "eth7" if port == 29500 else "")
        halts: Any = contextlib.nullcontext()
        halts.reasons = {5: "halted"}
        monkeypatch.setattr(launching, "Halts", lambda: halts)
        for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL", "GLOO_SOCKET_IFNAME"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.setitem(os.environ, name, "")  # so that it is as before afterwards
            del os.environ[name]

    def config(self, ranks: list[str]) -> Any:
        self.arguments = ranks
        return SimpleNamespace(rdzv_endpoint="there:1"), "command", ["a", "b"]


ALONE = NodeEnv(1, 0, "", 0)
PROGRAM = ["-m", "umbra"]


def test_ranks_of_one_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Launched(monkeypatch, tmp_path)
    launching._launch_ranks(load_case("demo", ["world_size=4"]), PROGRAM, ALONE, "words")
    assert made.arguments == [
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--nproc-per-node=4", "--max-restarts=0",
        "--log-dir=words", "--shutdown-timeout=5", "-m", "umbra", "--results", f"{tmp_path}/demo",
    ]  # fmt: skip
    assert made.started[1:] == ("command", ("a", "b"))
    found = [made.environment.get(n) for n in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL", "GLOO_SOCKET_IFNAME")]
    assert found == ["1", "FATAL", "lo"]
    assert made.disabled == [logging.ERROR]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "own")
    launching._launch_ranks(load_case("demo", ["world_size=4"]), PROGRAM, ALONE, "words")
    assert made.environment["GLOO_SOCKET_IFNAME"] == "own"


def test_warnings_of_ranks_on_a_device_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Launched(monkeypatch, tmp_path)
    case = load_case("demo", ["world_size=4", "platform=ascend", "exe_mode=eager", "method=none"])
    launching._launch_ranks(case, PROGRAM, ALONE, "words")
    assert "TORCH_CPP_LOG_LEVEL" not in made.environment
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    launching._launch_ranks(case, PROGRAM, ALONE, "words")
    assert made.environment["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_ranks_of_several_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Launched(monkeypatch, tmp_path)
    left: list[str] = []
    nodes = SimpleNamespace(leave=lambda: left.append("left"))
    monkeypatch.setattr(launching, "_meet", lambda case, here, words: (tmp_path / f"met {words}", nodes))
    case = load_case("demo", ["world_size=4"])
    launching._launch_ranks(case, PROGRAM, NodeEnv(2, 1, "10.0.0.1", 29500), "words")
    assert made.arguments[:5] == [
        "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500", "--nproc-per-node=2",
    ]  # fmt: skip
    assert made.arguments[-1] == f"{tmp_path}/met words"
    assert made.environment["GLOO_SOCKET_IFNAME"] == "eth7"
    assert left == ["left"]
    del os.environ["GLOO_SOCKET_IFNAME"]
    launching._launch_ranks(case, PROGRAM, NodeEnv(2, 1, "10.0.0.1", 1), "words")
    assert "GLOO_SOCKET_IFNAME" not in made.environment


@pytest.mark.parametrize(
    ("status", "said", "discarded"),
    [(1, "error: why\n", False), (EXIT_STATUS, "error: why\n", True), (127, "error: why\n", False), (128, "", False)],
)
def test_a_failed_job_ends_with_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int, said: str,
    discarded: bool,
) -> None:  # fmt: skip
    failure = ChildFailedError.__new__(ChildFailedError)
    made = Launched(monkeypatch, tmp_path, failure)
    asked: Any = []
    monkeypatch.setattr(launching, "_cause", lambda *given: (asked.append(given), Cause("why", status))[1])
    with pytest.raises(SystemExit) as ended:
        launching._launch_ranks(load_case("demo", ["world_size=2"]), PROGRAM, ALONE, "words")
    assert ended.value.code == status
    assert capsys.readouterr().err == said
    assert made.discarded == [tmp_path / "demo"] * discarded
    assert asked == [(failure, tmp_path / "demo", None, {5: "halted"})]


def test_a_job_that_was_told_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case, told = load_case("demo", ["world_size=2"]), SignalException("told", signal.SIGTERM)
    made = Launched(monkeypatch, tmp_path, told)
    with pytest.raises(SystemExit) as ended:
        launching._launch_ranks(case, PROGRAM, ALONE, "words")
    assert (ended.value.code, made.discarded) == (128 + 15, [])

    class Failed(Exception):
        pass

    def fail(cause: Cause) -> None:
        raise Failed(cause)

    nodes = SimpleNamespace(fail=fail, name=lambda rank: f"node {rank}")
    monkeypatch.setattr(launching, "_meet", lambda *given: (tmp_path, nodes))
    with pytest.raises(Failed) as failed:
        launching._launch_ranks(case, PROGRAM, NodeEnv(2, 1, "a", 29500), "words")
    assert failed.value.args == (Cause("node 1 was told to end by SIGTERM", 143),)


def test_a_job_that_does_not_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.distributed import DistError

    Launched(monkeypatch, tmp_path, DistError("lost"))
    causes: list[Cause] = []

    def fail(cause: Cause) -> None:
        causes.append(cause)
        raise SystemExit

    monkeypatch.setattr(launching, "_meet", lambda *given: (tmp_path, SimpleNamespace(fail=fail)))
    with pytest.raises(SystemExit):
        launching._launch_ranks(load_case("demo", ["world_size=2"]), PROGRAM, NodeEnv(2, 0, "a", 1), "words")
    assert causes == [Cause("there:1: lost", follows=True)]
