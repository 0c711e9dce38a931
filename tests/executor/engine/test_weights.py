"""Where a model's weights come from: random numbers, packed weights that were kept, or the checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor.engine import weights
from executor.engine.weights import fill_weights

FOLDER = Path("folder")


class Filling:
    """What is done, by name; `kept` says whether packed weights were kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kept: bool):
        self.done: list[Any] = []
        self.kept = kept
        clock = iter([10.0, 12.0])
        monkeypatch.setattr(weights, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        monkeypatch.setattr(weights, "packed_facts", lambda case: "facts")
        monkeypatch.setattr(weights, "read_scheme", lambda folder: SimpleNamespace(title=f"scheme of {folder}"))
        monkeypatch.setattr(
            weights, "random_weights", lambda model, seed: self.done.append(("random", model.name, seed))
        )
        monkeypatch.setattr(weights, "load_checkpoint", self.load)

    def load(self, model: Any, folder: Path, scheme: Any, ignores: Any, progress: bool) -> int:
        self.done.append(("load", model.name, folder, scheme.title, ignores, progress))
        return 5_000_000_000

    def packed_cache(self, facts: Any, folder: Path, rank: int, model: Any, mapped: bool) -> Any:
        self.done.append(("cache", facts, folder, rank, model.name, mapped))

        def load(progress: bool) -> bool:
            self.done.append(("kept", progress))
            return self.kept

        return SimpleNamespace(load=load, save=lambda: self.done.append("save"))

    def fill(
        self, rank: int = 0, method: str = "q4", keep: bool = True, platform: str = "cpu", slots: int = 0,
        with_ckpt: bool = True,
    ) -> list[Any]:  # fmt: skip
        case: Any = SimpleNamespace(
            quantization=SimpleNamespace(method=method, keep_packed=keep),
            model_config=SimpleNamespace(with_ckpt=with_ckpt),
            parallel_config=SimpleNamespace(expert_slots=slots), platform=platform,
        )  # fmt: skip
        model: Any = SimpleNamespace(name="model", ignores="ignored")
        assert fill_weights(case, FOLDER, model, rank, self.packed_cache) is None  # type: ignore[func-returns-value]
        return self.done


def test_without_a_checkpoint_each_rank_draws_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Filling(monkeypatch, True).fill(rank=3, with_ckpt=False) == [("random", "model", 3)]


@pytest.mark.parametrize(("rank", "slots", "mapped"), [(0, 0, True), (1, 0, True), (0, 2, False)])
def test_packed_weights_are_used_again(monkeypatch: pytest.MonkeyPatch, rank: int, slots: int, mapped: bool) -> None:
    done = Filling(monkeypatch, True).fill(rank=rank, slots=slots)
    assert done == [("cache", "facts", FOLDER, rank, "model", mapped), ("kept", rank == 0)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["q8", "q4"])
def test_weights_that_were_not_kept_are_loaded_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, rank: int
) -> None:
    done = Filling(monkeypatch, False).fill(rank=rank, method=method)
    assert done[2:] == [("load", "model", FOLDER, "scheme of folder", "ignored", rank == 0), "save"]
    assert capsys.readouterr().out == "checkpoint: scheme of folder; 5000.0 MB read at 2.50 GB/s\n"


@pytest.mark.parametrize("wanted", [{"method": "auto"}, {"method": "none"}, {"keep": False}, {"platform": "ascend"}])
def test_other_weights_are_never_kept(monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]) -> None:
    done = Filling(monkeypatch, True).fill(**wanted)
    assert done == [("load", "model", FOLDER, "scheme of folder", "ignored", True)]
