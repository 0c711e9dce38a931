"""A device is one folder and one row: the folder is `null/` here, the row is added by a process of its own."""

import json
import subprocess
import sys

from umbra.base.files import ROOT

PROGRAM = """
import json
from umbra.executor.config.platforms import PLATFORMS
from umbra.models.registry import load
PLATFORMS["null"] = load("tests.executor.platform.null.facts:FACTS")

from umbra import LLM
from umbra.base.errors import UserError
from umbra.executor.config.load import load_case
from umbra.executor.run.memory_report import show_plan

def complaint(*overrides):
    try:
        load_case("demo", overrides)
    except UserError as error:
        return str(error)

show_plan(load_case("demo", ['platform="null"', "exe_mode=replayed", "quantization.method=none"]))
settings = {"quantization.method": "none", "dtype": "float32", "max_new_tokens": 6}
outcome = {
    "own": LLM("demo", platform="null", exe_mode="replayed", greeting="hello from null", **settings),
    "cpu": LLM("demo", platform="cpu", exe_mode="eager", **settings),
}
outcome = {name: llm.generate(["It is a truth", "Mr. Bennet"]) for name, llm in outcome.items()}
outcome = {name: [reply.tokens for reply in replies] for name, replies in outcome.items()}
null = 'platform="null"', "exe_mode=eager", "quantization.method=none"
outcome["page_size"] = load_case("demo", null).cache_config.page_size
outcome["complaints"] = [
    complaint("exe_mode=eager", "null_config.greeting=hello"),
    complaint(*null, "greeting=HELLO"),
    complaint(*null, "page_size=16"),
    complaint('platform="null"', "exe_mode=graph"),
    complaint('platform="null"', "exe_mode=eager"),
    complaint(*null, "memory_gb=3"),
    complaint(*null, "offload_config.mode=elastic"),
    complaint(*null, "enable_cache_compile=true"),
]
print(json.dumps(outcome))
"""


def test_a_device_is_a_folder_and_a_row() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "case demo: null, replayed, 1 rank(s)" in done.stdout
    assert "hello from null" in done.stdout
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["page_size"] == 24
    assert outcome["own"] == outcome["cpu"]
    assert all(len(ids) == 6 for ids in outcome["own"])
    for said, wanted in zip(
        outcome["complaints"],
        [
            "null_config.greeting: has no meaning on platform: cpu",
            "null_config.greeting: is too loud",
            "cache_config.page_size: 16 must be a multiple of 3 on platform: null: choose 24",
            "exe_mode: 'graph' is not one of null's: eager, replayed",
            "quantization.method: q8 has no fused kernels on platform: null: choose none",
            "ascend_config.memory_gb: has no meaning on platform: null",
            "offload_config.mode: elastic: platform: null has no shadow experts",
            "enable_cache_compile: true has nothing to keep on platform: null",
        ],
        strict=True,
    ):
        assert wanted in said
