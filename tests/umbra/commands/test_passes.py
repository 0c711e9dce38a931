"""The passes of an evaluation: windows, losses, what each pass is asked for, and what is printed, without a model."""

import json
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.config.load import load_case
from umbra.commands import evaluate as module
from umbra.commands.divergence import Divergence, LogitsWriter
from umbra.commands.evaluate import (
    Evaluation,
    compare,
    evaluate,
    evaluate_case,
    read_windows,
    run_pass,
    start_pass,
    table,
)
from umbra.errors import UserError

ASKED = Evaluation("demo", ["threads=1"], Path("text.txt"))


def test_arguments_of_a_pass() -> None:
    assert ASKED.arguments() == ["--case=demo", "--set=threads=1", "--text=text.txt", "--window=256", "--batch=8"]
    more = replace(
        ASKED, against="other", against_overrides=["a=1", "b=2"], window=9, batch=2, json=Path("f.json"),
        results=Path("r"), logits=Path("l"),
    )  # fmt: skip
    assert more.arguments()[3:] == [
        "--window=9", "--batch=2", "--against-set=a=1", "--against-set=b=2", "--against=other", "--json=f.json",
        "--results=r", "--logits=l",
    ]  # fmt: skip


def test_windows_of_a_text(tmp_path: Path) -> None:
    case, path = load_case("demo"), tmp_path / "text"
    path.write_text("Emma was quite obliged to hear, and was obliged to add.")
    [ids] = read_windows(case, path, 1000)
    assert read_windows(case, path, 3) == [ids[i : i + 3] for i in range(0, len(ids) - 1, 3)]
    one_left = len(ids) - 1
    assert read_windows(case, path, one_left) == [ids[:one_left]]  # nothing can be counted of a single token
    path.write_text("a")
    with pytest.raises(UserError, match="fewer than two tokens"):
        read_windows(case, path, 3)
    path.write_text("a\n")
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not readable: "):
        read_windows(case, path, 3)


def test_loss_is_the_mean_over_tokens_with_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = [[0, 1, 2], [2, 1], [1, 0, 0, 3], [3, 1]]
    torch.manual_seed(0)
    made = [torch.randn(len(row), 4) for row in windows]
    batches: list[list[list[int]]] = []

    def logits(runner: Any, part: list[list[int]]) -> list[torch.Tensor]:
        batches.append(part)
        return [made[windows.index(row)] for row in part]

    monkeypatch.setattr(module, "prefill_logits", logits)
    seen: list[torch.Tensor] = []
    runner: Any = SimpleNamespace(case=SimpleNamespace(data_config=SimpleNamespace(batch_size=3)))
    figures = evaluate(runner, windows, seen.append)
    assert batches == [windows[:3], windows[3:]]
    assert all(a is b for a, b in zip(seen, made, strict=True))
    losses = [
        -float(logits.log_softmax(-1)[i, row[i + 1]])
        for row, logits in zip(windows, made, strict=True)
        for i in range(len(row) - 1)
    ]
    mean = sum(losses) / len(losses)
    assert figures == {"tokens": 7, "loss": pytest.approx(mean), "perplexity": pytest.approx(math.exp(mean))}
    assert evaluate(runner, windows) == figures


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"case": name, "quantization": "q4", "tokens": 123, "loss": 1.23456, "perplexity": 3.4321, **more}


def test_the_table_of_a_comparison() -> None:
    compared = row("the_case", against={}, kl_divergence=0.01234567, top1_agreement=98.765)
    assert table([row("one"), compared]).splitlines() == [
        "case      quantization  tokens    loss  perplexity  KL (nats)  top-1 (%)",
        "one       q4               123  1.2346       3.432          -          -",
        "the_case  q4               123  1.2346       3.432   0.012346      98.77",
    ]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"window": 1}, "--window 1 must be at least 2, --batch 8 at least 1"),
        ({"batch": 0}, "--window 256 must be at least 2, --batch 0 at least 1"),
        ({"against_overrides": ["a=1"]}, "--against-set: belongs to --against CASE, which is missing"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        evaluate_case(replace(ASKED, **changes), [])


def test_what_is_asked_decides_what_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    launched = False
    monkeypatch.setattr(module, "compare", lambda case, other, asked, program: found.append((case.name, other.name)))
    monkeypatch.setattr(module, "launch", lambda case, program: found.append(program))
    monkeypatch.setattr(module, "run_pass", lambda case, asked: found.append(case.world_size))
    monkeypatch.setattr(module, "rank_env", lambda: SimpleNamespace(launched=launched))
    smallest = replace(ASKED, window=2, batch=1)
    evaluate_case(smallest, ["p"])
    two = replace(smallest, overrides=["world_size=2"])
    evaluate_case(two, ["p"])
    launched = True
    evaluate_case(two, ["p"])
    against = replace(smallest, against="demo_minimax")
    evaluate_case(against, ["p"])
    evaluate_case(replace(against, logits=Path("l")), ["p"])
    assert found == [1, ["p", *two.arguments()], 2, ("demo", "demo_minimax"), 1]


@pytest.fixture
def term() -> Any:
    kept = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, kept)


def test_a_comparison_is_two_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], term: None
) -> None:
    (tmp_path / "text").write_text("Emma was quite obliged to hear, and was obliged to add.")
    started: list[list[str]] = []
    monkeypatch.setattr(module, "start_pass", started.append)
    free = 10**12
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    asked = replace(
        ASKED, text=tmp_path / "text", window=4, batch=3, against="demo", against_overrides=["method=q8"],
        json=tmp_path / "figures",
    )  # fmt: skip
    case, other = load_case("demo"), load_case("demo", ["method=q8"])
    tokens = sum(map(len, read_windows(case, asked.text, 4)))
    compare(case, other, asked, ["evaluate"])
    first, second = started
    folder = Path(second[-1].removeprefix("--logits="))
    assert not folder.exists()
    of_other = Evaluation(
        "demo", ["method=q8"], asked.text, window=4, batch=3, json=folder / "figures.json", logits=folder
    )
    assert first == ["evaluate", *of_other.arguments()]
    assert second == ["evaluate", *replace(asked, logits=folder).arguments()]
    size = tokens * module.load_model_config(case).vocab_size * 4
    said = f"first {other.name}: its logits take {size / 1e9:.2f} GB in {folder} until the end\n"
    assert capsys.readouterr().out == said
    with pytest.raises(SystemExit) as ended:
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)  # type: ignore[operator,misc]
    assert ended.value.code == 143
    free = size
    compare(case, other, asked, [])
    free = size - 1
    with pytest.raises(UserError, match=r"--against demo: its logits take .* shorten --text, or set TMPDIR"):
        compare(case, other, asked, [])
    monkeypatch.setattr(module, "read_windows", lambda one, path, size: [[1, 2 if one is case else 3]])
    with pytest.raises(UserError, match="its vocabulary is not that of demo"):
        compare(case, other, asked, [])


@pytest.mark.parametrize(("status", "code"), [(0, None), (3, 3), (-9, 137)])
def test_a_pass_that_fails_ends_this_process(monkeypatch: pytest.MonkeyPatch, status: int, code: int | None) -> None:
    commands: list[list[str]] = []

    def start(command: list[str]) -> Any:
        commands.append(command)
        return SimpleNamespace(wait=lambda: status)

    monkeypatch.setattr(module.subprocess, "Popen", start)
    if code is None:
        start_pass(["program"])
    else:
        with pytest.raises(SystemExit) as ended:
            start_pass(["program"])
        assert ended.value.code == code
    assert commands == [[sys.executable, "program"]]


def test_a_pass_ends_with_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def wait() -> int:
        done.append("wait")
        if len(done) == 1:
            raise KeyboardInterrupt
        return 0

    child = SimpleNamespace(wait=wait, terminate=lambda: done.append("terminate"))
    monkeypatch.setattr(module.subprocess, "Popen", lambda command: child)
    with pytest.raises(KeyboardInterrupt):
        start_pass([])
    assert done == ["wait", "terminate", "wait"]


def passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: Evaluation, rank: int = 0
) -> list[Callable[[torch.Tensor], None] | None]:
    """What each pass gives its logits to."""
    visits: list[Callable[[torch.Tensor], None] | None] = []
    set_up: list[bool] = []

    def figures(runner: Any, windows: Any, visit: Any) -> dict[str, Any]:
        assert windows == ["windows"]
        assert set_up == [True]
        visits.append(visit)
        if visit:
            visit(torch.arange(8.0).view(2, 4))
        return {"tokens": 7, "loss": 1.0, "perplexity": 2.71828}

    monkeypatch.setattr(module, "run_rank", lambda case, results, body: body(results, SimpleNamespace(rank=rank)))
    monkeypatch.setattr(module, "read_windows", lambda case, path, size: ["windows"])
    monkeypatch.setattr(module, "make_runner", lambda *given: SimpleNamespace(setup=lambda: set_up.append(True)))
    monkeypatch.setattr(module, "evaluate", figures)
    run_pass(load_case("demo"), asked)
    return visits


def test_a_pass_writes_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(ASKED, json=tmp_path / "alone.json", against="demo")
    assert passed(monkeypatch, tmp_path, alone) == [None]
    assert capsys.readouterr().out == "7 tokens: loss 1.0000 nats, perplexity 2.718\n"
    written = json.loads((tmp_path / "alone.json").read_text())
    assert written == {"case": "demo", "quantization": "q8", "tokens": 7, "loss": 1.0, "perplexity": 2.71828}
    [first] = passed(monkeypatch, tmp_path, replace(ASKED, logits=tmp_path, json=tmp_path / "figures.json"))
    assert isinstance(first, LogitsWriter)
    assert (tmp_path / "logits.f32").stat().st_size == 8 * 4
    capsys.readouterr()
    [second] = passed(monkeypatch, tmp_path, replace(alone, logits=tmp_path))
    assert isinstance(second, Divergence)
    both = json.loads((tmp_path / "alone.json").read_text())
    assert both["against"] == written
    assert (both["kl_divergence"], both["top1_agreement"]) == (0.0, 100.0)
    assert capsys.readouterr().out == table([both["against"], both]) + "\n"


def test_other_ranks_write_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = replace(ASKED, logits=tmp_path, json=tmp_path / "figures.json")
    assert passed(monkeypatch, tmp_path, asked, rank=1) == [None]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
