"""A new model family is one folder under models/ and one line in the registry. The tests follow docs/adding_a_model.md
in a copy of the project: their family `toy_moe` is Qwen3-MoE under other names, with a router that chooses by
sigmoid."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch import nn

from tests.tiny import save_tiny
from umbra.base.files import ROOT

pytestmark = pytest.mark.slow

LINE = '    "toy_moe": Family("models.toy_moe.config:ToyMoeConfig", "models.toy_moe.model:ToyMoeForCausalLM"),\n'
LAYERS = ROOT / "models/layers"
NAMES = {"qwen3_moe": "toy_moe", "Qwen3Moe": "ToyMoe"}
ROUTE = "self.ops.route_softmax(self.gate(x), self.top_k, self.renormalise)"


def project_with_a_toy(root: Path) -> None:
    shutil.copytree(ROOT / "models", root / "models", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run.py", root)  # not a link: Python would look for modules beside the original
    for name in ("umbra", "serving", "planner", "executor", "cpu_offload", "text", "ops"):
        (root / name).symlink_to(ROOT / name)
    (root / "models/toy_moe").mkdir()
    for name in ("__init__.py", "config.py", "model.py"):
        text = (ROOT / "models/qwen3_moe" / name).read_text()
        for theirs, ours in NAMES.items():
            text = text.replace(theirs, ours)
        if name == "model.py":
            assert ROUTE in text
            text = text.replace(ROUTE, "self.ops.route_sigmoid(self.gate(x), None, self.top_k, self.renormalise)")
        (root / "models/toy_moe" / name).write_text(text)
    registry = root / "models/registry.py"
    text = registry.read_text()
    registry.write_text(text.replace("FAMILIES = {\n", "FAMILIES = {\n" + LINE))


def test_a_family_runs_from_one_folder_and_one_line(tmp_path: Path) -> None:
    project_with_a_toy(tmp_path)
    save_tiny(tmp_path / "model")
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "toy_moe"}))
    case = {
        "model_name": "toy_moe",
        "model_path": str(tmp_path / "model"),
        "data_config": {"input_max_len": 8, "max_new_tokens": 4, "batch_size": 2},
        "sampling_config": {"ignore_eos": True},
    }
    for name, sections in {
        "toy": {"exe_mode": "graph", "model_config": {"with_ckpt": False}},
        "toy_on_ascend": {"platform": "ascend", "exe_mode": "ge_graph", "model_config": {"with_ckpt": False}},
    }.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(case | sections))

    def run(*arguments: str, name: str) -> str:
        command = [sys.executable, "run.py", *arguments]
        environment = {"CASE_NAME": str(tmp_path / f"{name}.yaml"), "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (tmp_path / "results").mkdir()
    run("--results", str(tmp_path / "results"), name="toy")
    report = json.loads((tmp_path / "results/report.json").read_text())
    assert [len(completion["tokens"]) for completion in report["completions"]] == [4, 4]
    assert "fullest at " in run("--plan", name="toy_on_ascend")  # `--plan` runs the family's own steps on meta


def test_the_guide_names_every_layer() -> None:
    """docs/adding_a_model.md has every class of models/layers/ that is a module, and none that does not exist."""
    modules = {path.stem: importlib.import_module(f"models.layers.{path.stem}") for path in LAYERS.glob("[a-z]*.py")}
    there = {
        f"{name}.{word}"
        for name, module in modules.items()
        for word, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__
    }
    named = set(re.findall(rf"`((?:{'|'.join(modules)})\.\w+)`", (ROOT / "docs/adding_a_model.md").read_text()))
    assert there <= named
    assert all(hasattr(modules[name], word) for name, _, word in (place.partition(".") for place in named))
