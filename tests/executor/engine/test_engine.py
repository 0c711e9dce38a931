"""The engine's parts between scheduler and model, with both made up: what is packed, chosen, told and called when."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errors import UserError
from executor.engine import engine as module
from executor.engine import forced
from executor.engine.engine import Engine
from executor.engine.forced import ForcedRun
from executor.engine.pages import PagePool
from executor.engine.scheduler import Limits, Scheduler, limits_of


class Ranks:
    """Group 1 of two; all groups have the rows of this one."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self.gathered: list[Any] = []

    def gather_rows(self, rows: torch.Tensor, counts: Any) -> torch.Tensor:
        self.gathered.append((rows.tolist(), counts))
        return torch.cat([rows, rows])

    def padded(self, count: int) -> int:
        return -(-count // 4) * 4


def sequence(group: int, new_tokens: int = 1, logit_rows: int = 1, drafted: int = 0) -> Any:
    return SimpleNamespace(group=group, new_tokens=new_tokens, logit_rows=logit_rows, drafted=drafted)


def engine_of(padded: int = 0, shared: bool = False, offload: Any = None) -> Any:
    made: Any = Engine.__new__(Engine)
    made.done, made.offload, made.rebalancing = [], offload, None
    ranks = Ranks()
    made.parallel = SimpleNamespace(attn_dp=ranks, attn_tp=ranks)
    made.platform = SimpleNamespace(
        ops="ops", padded_rows=lambda rows: made.done.append(rows) or padded, device=torch.device("cpu")
    )
    made.case = SimpleNamespace(
        parallel_config=SimpleNamespace(sequence_parallel=lambda tokens: made.done.append(tokens) or shared)
    )
    return made


def packed(
    monkeypatch: pytest.MonkeyPatch, engine: Any, decode: bool, all_logits: bool = False
) -> tuple[dict[str, Any], list[Any], Any]:
    """(what is packed, the sequences of group 1, those for which pages were reserved), of steps with 3 and 5 tokens."""
    groups = [[sequence(0, 3, 2)], [sequence(1, 4, 1), sequence(1, 1, 3)]]
    reserved: list[Any] = []
    scheduler: Any = SimpleNamespace(
        pools=["pool 0", "pool 1"], table_width=9, by_group=lambda sequences: groups, reserve=reserved.extend
    )
    names = ("ops", "mine", "pool", "tokens", "width", "whole", "rows", "shared", "decode", "wanted")
    monkeypatch.setattr(module, "pack", lambda *given: dict(zip(names, given, strict=True)))
    found: Any = engine.pack(scheduler, ["all"], decode, all_logits)
    assert reserved == ["all"]
    assert found.pop("mine") is groups[1]
    assert (found.pop("ops"), found.pop("pool"), found.pop("width")) == ("ops", "pool 1", 9)
    return found, groups[1], engine.done


def test_a_decode_step_is_padded_as_the_platform_says(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _, done = packed(monkeypatch, engine_of(padded=8), True)
    assert found == {"tokens": (8, 8), "whole": True, "rows": 8, "shared": False, "decode": True, "wanted": None}
    assert done == [5]  # the most tokens of a group
    found, _, _ = packed(monkeypatch, engine_of(), True)
    assert (found["tokens"], found["rows"]) == ((3, 5), 0)


@pytest.mark.parametrize("all_logits", [False, True])
def test_a_prefill_step_has_the_rows_that_are_wanted(monkeypatch: pytest.MonkeyPatch, all_logits: bool) -> None:
    found, _, done = packed(monkeypatch, engine_of(padded=8), False, all_logits)
    wanted = None if all_logits else (2, 4)
    assert found == {
        "tokens": (3, 5), "whole": all_logits, "rows": 0, "shared": False, "decode": False, "wanted": wanted,
    }  # fmt: skip
    assert done == [3]  # the fewest tokens of a group decide whether rows are shared


def test_shares_of_rows_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    found, mine, _ = packed(monkeypatch, engine_of(shared=True), False)
    assert found == {
        "tokens": (4, 8), "whole": False, "rows": len(mine) + 3, "shared": True, "decode": False, "wanted": None,
    }  # fmt: skip


@pytest.mark.parametrize(("decode", "tokens"), [(True, (8, 8)), (False, (3, 5))])
def test_shadow_experts_are_told_how_many_tokens_are_live(
    monkeypatch: pytest.MonkeyPatch, decode: bool, tokens: tuple[int, int]
) -> None:
    told: list[Any] = []
    offload = SimpleNamespace(started=lambda *given: told.append(given))
    found, _, _ = packed(monkeypatch, engine_of(padded=8, offload=offload), decode)
    assert found["wanted"] is None
    assert told == [(tokens, (3, 5))]


def test_tokens_are_chosen_behind_each_token_of_the_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, groups = engine_of(), [[sequence(0, drafted=1)], [sequence(1), sequence(1, drafted=2)]]
    given: list[Any] = []

    def choose(ops: Any, logits: torch.Tensor, sequences: Any) -> torch.Tensor:
        given.append((ops, logits.tolist(), sequences))
        return torch.tensor([7, 8, 9, 6])

    monkeypatch.setattr(module, "choose", choose)
    logits = torch.arange(6.0)[:, None]  # two rows are padding
    assert engine.choose(logits, groups) == [7, 8, 9, 6] * 2
    assert given == [("ops", [[0.0], [1.0], [2.0], [3.0]], groups[1])]
    assert engine.parallel.attn_dp.gathered == [([7, 8, 9, 6], (2, 4))]


def test_log_probabilities_of_all_groups_are_gathered() -> None:
    engine, logits = engine_of(), torch.tensor([[0.0, 1.0, 3.0]])
    found = engine.logprobs(logits, [1], (1, 1), 2)
    expected = logits.log_softmax(-1)[0].tolist()
    assert found == [pytest.approx([expected[1], 2.0, 1.0, expected[2], expected[1]])] * 2
    [(rows, counts)] = engine.parallel.attn_dp.gathered
    assert (rows, counts) == ([found[0]], (1, 1))


def test_steps_are_run_and_traced_by_their_phase() -> None:
    engine, done = engine_of(), list[Any]()

    @contextlib.contextmanager
    def traced(phase: str) -> Iterator[None]:
        done.append(phase)
        yield

    engine.profiler = SimpleNamespace(step=traced)
    engine.decode_step = lambda batch: ("graph", batch)
    engine.model = SimpleNamespace(forward="forward")
    assert engine.forward("batch", True) == ("graph", "batch")
    engine.model = lambda batch: ("model", batch)
    moved: Any = SimpleNamespace(to=lambda device: ("moved", device))
    assert engine.forward(moved, False) == ("model", ("moved", torch.device("cpu")))
    assert done == ["decode", "prefill"]
    engine.model, engine.config = SimpleNamespace(forward="forward"), "config"
    engine.platform.compile = lambda step, config: (step, config)
    assert engine.graph_step() == ("forward", "config")


def test_experts_change_places_between_steps() -> None:
    engine, done = engine_of(), list[Any]()
    with engine.step(True):
        done.append("step")
    assert done == ["step"]
    engine.offload = SimpleNamespace(
        begin=lambda: done.append("begin"), end=lambda decode: done.append(("end", decode))
    )
    engine.rebalancing = SimpleNamespace(end=lambda: done.append("rebalanced"))
    del done[:]
    with engine.step(False):
        done.append("step")
    assert done == ["begin", "step", ("end", False), "rebalanced"]


class Made:
    """An engine whose model, weights and experts are only names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: dict[str, Any] = {}
        for name in ("fill_weights", "bind_caches", "open_arena", "make_offload", "Rebalancing", "build_of"):
            monkeypatch.setattr(module, name, self.noting(name))
        monkeypatch.setattr(module, "model_folder", lambda case: Path("folder"))
        monkeypatch.setattr(module, "model_class", lambda name: lambda config, build: SimpleNamespace(name=name))
        monkeypatch.setattr(module, "layers_of", lambda model: [("a", SimpleNamespace(nbytes=1_500_000)),
                                                                ("b", SimpleNamespace(nbytes=2_000_000))])  # fmt: skip
        monkeypatch.setattr(module, "limits_of", lambda case: Limits(6, 17, 4, 2))
        clock = iter([10.0, 12.5])
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    def noting(self, name: str) -> Any:
        def call(*given: Any) -> str:
            self.calls[name] = given
            return f"result of {name}"

        return call

    def engine(self, rank: int, choices: Any = None, slots: int = 0) -> Any:
        self.case = SimpleNamespace(
            model_name="tiny", cache_config=SimpleNamespace(page_size=4),
            parallel_config=SimpleNamespace(expert_slots=slots, rebalance_steps=50),
        )  # fmt: skip
        self.platform = SimpleNamespace(
            device="device", quantised_head="head", ops="ops", exchange=lambda config: f"exchange of {config}",
            kernels=lambda model: {f"{model.name} head": "fast", "experts": "slow"},
        )  # fmt: skip
        self.parallel = SimpleNamespace(world=SimpleNamespace(rank=rank))
        given: Any = self.case, self.platform, self.parallel, "config", "profiler", choices, "packed cache"
        return Engine(*given)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_without_shadows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    made = Made(monkeypatch)
    engine = made.engine(rank)
    build = made.calls["build_of"]
    assert build == (made.case, "ops", made.parallel, "device", "head", None, "exchange of config")
    assert made.calls["fill_weights"] == (made.case, Path("folder"), engine.model, rank, "packed cache")
    # Each of two groups has three sequences of five pages.
    assert made.calls["bind_caches"] == (engine.model, made.case, "result of build_of", 15)
    assert isinstance(engine.pages, PagePool)
    assert (engine.pages.pages, engine.pages.page_size) == (15, 4)
    assert (engine.offload, engine.rebalancing, engine.profiler, engine.config) == (None, None, "profiler", "config")
    assert engine.kernels == {"tiny head": "fast", "experts": "slow"}
    assert engine.decode_step == engine.eager_step
    said = "tiny head: fast\nexperts: slow\n" if rank == 0 else ""
    assert capsys.readouterr().out == said + "model ready: 3.5 MB of weights on this rank, 2.50 s\n"


def test_an_engine_with_shadows_and_one_whose_experts_move(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    engine = made.engine(0, choices="choices")
    assert made.calls["make_offload"] == (made.case, "choices", made.platform, "config")
    assert made.calls["build_of"][-2:] == ("result of make_offload", None)
    assert made.calls["open_arena"] == (
        made.case, "result of build_of", engine.model, "result of make_offload", 15,
    )  # fmt: skip
    assert (engine.pages, engine.offload) == ("result of open_arena", "result of make_offload")
    assert "bind_caches" not in made.calls
    made = Made(monkeypatch)
    engine = made.engine(1, slots=3)
    assert made.calls["Rebalancing"] == (engine.model, made.parallel.world, 50)
    assert engine.rebalancing == "result of Rebalancing"


class Forced:
    """An engine of one group whose logits have in each row the token that is computed there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefill_tokens: int | None = None, pages: int = 40):
        monkeypatch.setattr(forced, "limits_of", lambda case: Limits(3, 20, 2, prefill_tokens=prefill_tokens))
        self.case, self.pages, self.steps = None, PagePool(pages, 2), list[Any]()
        self.parallel = SimpleNamespace(attn_dp=SimpleNamespace(rank=0, size=1, gather_rows=lambda rows, counts: rows))

    @contextlib.contextmanager
    def step(self, decode: bool) -> Iterator[None]:
        self.steps.append(decode)
        yield

    def pack(self, scheduler: Scheduler, sequences: Any, decode: bool, all_logits: bool) -> Any:
        scheduler.reserve(sequences)
        self.steps.append([(s.id, list(s.ids[s.cached : s.end])) for s in sequences])
        rows = [s.ids[s.cached : s.end] if all_logits else [s.ids[s.end - 1]] for s in sequences]
        return [token for one in rows for token in one] + [99]  # behind them is padding

    def forward(self, batch: list[int], decode: bool) -> torch.Tensor:
        return torch.tensor(batch, dtype=torch.float64)[:, None]


def forced_run(engine: Forced) -> ForcedRun:
    made: Any = engine
    return ForcedRun(made)


def test_forced_prompts_come_in_chunks_and_give_their_last_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Forced(monkeypatch, prefill_tokens=4)
    run = forced_run(engine)
    found = run.add([[1, 2, 3], [4, 5, 6]], room=2)
    assert [logits.tolist() for logits in found] == [[[3.0]], [[6.0]]]
    assert found[0].dtype == torch.float32
    assert engine.steps == [False, [(0, [1, 2, 3]), (1, [4])], False, [(1, [5, 6])]]
    assert [(s.id, s.cached, s.limit, s.longest) for s in run.sequences] == [(0, 3, None, 5), (1, 3, None, 5)]
    [third] = run.add([[7, 8]], room=1, all_logits=True)
    assert third.tolist() == [[7.0], [8.0]]
    assert [s.id for s in run.sequences] == [0, 1, 2]
    run.extend([11, 12, 13])
    assert [logits.tolist() for logits in run.decode()] == [[[11.0]], [[12.0]], [[13.0]]]
    assert engine.steps[-2:] == [True, [(0, [11]), (1, [12]), (2, [13])]]
    run.replace([21, 22, 23])
    assert [s.cached for s in run.sequences] == [3, 3, 2]
    assert run.decode_in_place().tolist() == [[21.0], [22.0], [23.0], [99.0]]
    assert [list(s.ids) for s in run.sequences] == [[1, 2, 3, 21], [4, 5, 6, 22], [7, 8, 23]]
    run.close()
    assert run.sequences == []
    assert len(engine.pages.free) == 40


def test_all_logits_come_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Forced(monkeypatch, prefill_tokens=2)
    found = forced_run(engine).add([[1, 2, 3], [4]], room=1, all_logits=True)
    assert [logits.tolist() for logits in found] == [[[1.0], [2.0], [3.0]], [[4.0]]]
    assert engine.steps == [False, [(0, [1, 2, 3]), (1, [4])]]


def test_prompts_can_be_taken_for_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Forced(monkeypatch)
    run = forced_run(engine)
    run.assume([[1, 2, 3], [4]], room=2)
    assert ([s.cached for s in run.sequences], engine.steps) == ([3, 1], [])


def test_prompts_that_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs two of three pages."""
    run = forced_run(Forced(monkeypatch, pages=3))
    with pytest.raises(UserError, match=r"arena_mb: there is no room for 1 of 2 sequences that are to run together"):
        run.add([[1, 2, 3], [4, 5, 6]], room=1)


def test_the_limits_of_a_run_and_of_a_server() -> None:
    data = SimpleNamespace(batch_size=6, chunked_prefill_size=None, mixed_prefill_size=None, draft_tokens=3)
    case: Any = SimpleNamespace(
        data_config=data, max_sequence_length=99, cache_config=SimpleNamespace(page_size=16), attn_dp_size=2,
        serve_config=SimpleNamespace(reserve=512, prefix_cache=True, prefix_floor=100),
    )  # fmt: skip
    assert limits_of(case) == Limits(6, 99, 16, 2, draft_tokens=3)
    assert limits_of(case, serving=True) == Limits(
        6, 99, 16, 2, reserve=512, prefixes=True, prefix_floor=6, draft_tokens=3
    )
    for chunked, mixed, wanted in ((8, None, 8), (None, 4, 4), (8, 4, 4), (8, 12, 8), (0, 4, 4), (0, 0, None)):
        data.chunked_prefill_size, data.mixed_prefill_size = chunked, mixed
        found = limits_of(case)
        assert (found.prefill_tokens, found.mixed_tokens) == (chunked, wanted)
    case.serve_config.prefix_cache = False
    assert limits_of(case, serving=True).prefixes is False
