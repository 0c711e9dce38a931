"""The settings that are chosen for a checkpoint without a case, and what must be there before a rank is started."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor.config.load import load_case
from executor.launch import preflight
from executor.run import defaults
from executor.run.defaults import case_of_checkpoint
from umbra.errors import UserError
from umbra.files import ROOT

DEMO = ROOT / "checkpoints/austen_moe"


def folder(path: Path, positions: int) -> Path:
    path.mkdir(exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": positions}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("positions", "prompt", "new"),
    [(2, 1, 1), (3, 2, 1), (600, 300, 300), (2047, 1024, 1023), (5000, 3976, 1024), (9000, 4096, 1024)],
)
def test_half_of_the_positions_are_for_answers(tmp_path: Path, positions: int, prompt: int, new: int) -> None:
    data = case_of_checkpoint(folder(tmp_path / "model", positions), {}).data_config
    assert (data.input_max_len, data.max_new_tokens) == (prompt, new)


def test_what_was_chosen_is_said_and_may_be_overridden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "model", 9000)
    case = case_of_checkpoint(model, {"batch_size": 2, "prompts": ("a", "b")}, ["max_new_tokens=7"])
    assert (case.name, case.model_name, case.model_path) == ("model", "qwen3_moe", str(model.resolve()))
    assert (case.platform, case.exe_mode, case.quantization.method) == ("cpu", "graph", "auto")
    data = case.data_config
    assert (data.batch_size, data.prompts, data.max_new_tokens, data.warm_up) == (2, ("a", "b"), 7, False)
    assert capsys.readouterr().out == (
        f"no case for {model}: settings are {{data_config: {{batch_size: 2, input_max_len: 4096, max_new_tokens: 7, "
        "prompts: [a, b], warm_up: false}, exe_mode: graph, model_name: qwen3_moe, platform: cpu, quantization: "
        "{method: auto}}\n"
    )
    assert case_of_checkpoint(model, {}).data_config.batch_size == 4


@pytest.mark.parametrize(
    ("size", "method"), [(0, "auto"), (700, "auto"), (701, "q8"), (1400, "q8"), (1401, "q4"), (9999, "q4")]
)
def test_weights_take_up_to_seven_tenths_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, method: str
) -> None:
    monkeypatch.setattr(defaults, "_free_bytes", lambda: 1000)
    model = folder(tmp_path / "model", 600)
    for name, share in (("a", size // 3), ("b", size - size // 3)):
        (model / f"{name}.safetensors").write_bytes(bytes(share))
    (model / "other.bin").write_bytes(bytes(5000))
    assert defaults._method(model) == method


def test_what_is_quantised_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "_free_bytes", lambda: 0)
    (tmp_path / "a.safetensors").write_bytes(bytes(9))
    for formats, method in (([None, "q4"], "auto"), (["q4"], "auto"), ([None], "q4"), ([], "q4")):
        scheme = SimpleNamespace(encodings=[SimpleNamespace(format=format) for format in formats])
        monkeypatch.setattr(defaults, "read_scheme", lambda folder, scheme=scheme: scheme)
        assert defaults._method(tmp_path) == method


@pytest.mark.parametrize(("limit", "free"), [(10**9, 3000 * 1024), (5, 5)])
def test_free_memory_is_what_machine_and_cgroup_leave(monkeypatch: pytest.MonkeyPatch, limit: int, free: int) -> None:
    text = "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:    3000 kB\nBuffers: 5 kB\n"
    monkeypatch.setattr(defaults, "Path", lambda path: SimpleNamespace(read_text=lambda: {"/proc/meminfo": text}[path]))
    monkeypatch.setattr(defaults, "memory_limit", lambda: (limit, "of the machine"))
    assert defaults._free_bytes() == free


def test_a_checkpoint_has_one_file_or_an_index(tmp_path: Path) -> None:
    case: Any = dataclasses.replace(load_case("demo"), model_path=str(tmp_path))
    with pytest.raises(
        UserError, match=r"^model_path: .* holds neither model\.safetensors nor model\.safetensors\.ind"
    ):
        preflight.check_ready(case)
    without = dataclasses.replace(case.model_config, with_ckpt=False)
    preflight.check_ready(dataclasses.replace(case, model_config=without))
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).touch()
        preflight.check_ready(case)
        (tmp_path / name).unlink()


def test_a_plugin_is_asked_for_in_the_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    case = load_case("demo", ["platform=ascend", "exe_mode=eager", "method=none"])
    monkeypatch.setattr(preflight, "version", lambda package: {"torch": "2.7.1+cpu"}[package])
    asked: list[str] = []
    monkeypatch.setattr(preflight, "find_spec", asked.append)
    with pytest.raises(UserError) as caught:
        preflight.check_ready(case)
    assert str(caught.value) == (
        "platform: ascend needs torch_npu, which is not installed: on a machine with CANN, .venv/bin/python -m pip "
        "install torch_npu==2.7.1"
    )
    monkeypatch.setattr(preflight, "find_spec", lambda name: object())
    preflight.check_ready(case)
    assert asked == ["torch_npu"]
