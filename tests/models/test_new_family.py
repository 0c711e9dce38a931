"""A new model family is one folder and one line in the registry. Those of the toy family lie in tests/toys/toy_family;
its model is Qwen3-MoE under other names, with a router that chooses by sigmoid. docs/adding_a_model.md follows it."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.command import umbra
from tests.tiny import make_runner, save_tiny, tiny_case, write_case
from tests.toys.toy_family.text import EXPRESSION, FORMAT
from umbra import LLM, SamplingParams
from umbra.base.files import ROOT
from umbra.models.gguf import folder as unpacked
from umbra.models.registry import FAMILIES
from umbra.models.tokenizers import tokenizer_in
from umbra.text.answer import Answer, ToolCall
from umbra.text.parser import reader
from umbra.tools.benchmarks.gguf_file import write_gguf

pytestmark = pytest.mark.slow

LAYERS = ROOT / "models/layers"
NAMES = {
    "model.": "transformer.",
    ".mlp.gate.": ".mixture.chooser.",
    ".mlp.": ".mixture.",
    "gate_proj": "open",
    "up_proj": "wide",
    "down_proj": "close",
}
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}{% if tools %}Say <toy:calls>{% endif %}"
TEXT = "abba 122 ab"
PROMPTS = [[5, 17, 3, 88, 2, 41], [7], list(range(30, 53))]
TOKENS = 12


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the registry's line."""
    monkeypatch.setitem(FAMILIES, "toy_moe", "tests.toys.toy_family.family:TOY_MOE")
    monkeypatch.setattr(unpacked, "FOLDERS", tmp_path / "unpacked")


@pytest.fixture
def oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Qwen3MoeForCausalLM:
    """A checkpoint of the toy family in `model`, beside transformers' model of the same weights."""

    def by_sigmoid(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = F.linear(x.reshape(-1, router.hidden_dim), router.weight).sigmoid()
        weights, ids = scores.topk(router.top_k)
        return scores, weights / weights.sum(-1, keepdim=True), ids

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", by_sigmoid)
    folder = tmp_path / "model"
    model = save_tiny(folder, vocab_size=320, moe_intermediate_size=32)
    tensors = load_file(folder / "model.safetensors")
    for theirs, ours in NAMES.items():
        tensors = {name.replace(theirs, ours): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "toy", "architectures": ["ToyMoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes and two merges, of which the split allows the one of letters alone."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*letters, "ab", "12"])}
    tokenizer = Tokenizer(BPE(vocabulary, [("a", "b"), ("1", "2")]))
    split = pre_tokenizers.Split(Regex(EXPRESSION), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<toy:eos>", "<toy:end>")])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<toy:eos>", chat_template=TEMPLATE)
    whole.save_pretrained(folder)


def checkpoint(folder: Path, kind: str) -> Path:
    """The checkpoint in `folder`/model, or the GGUF file that is made of it."""
    if kind == "gguf":
        runner = make_runner(tiny_case(folder, folder / "model", model_name="toy_moe"), folder)
        write_gguf(folder / "model.gguf", runner.engine.model, runner.config, folder / "model")
        return folder / "model.gguf"
    return folder / "model"


@torch.no_grad()
def continued(model: Qwen3MoeForCausalLM, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_family_is_one_folder_and_one_line(tmp_path: Path, oracle: Qwen3MoeForCausalLM, kind: str) -> None:
    settings: dict[str, Any] = {"model_config": {"output_format": "toy"}, "exe_mode": "graph"}
    llm = LLM(write_case(tmp_path / "toy.yaml", checkpoint(tmp_path, kind), model_name="toy_moe", **settings))
    ids = llm.tokenizer.encode(TEXT, chat=False)
    assert [llm.tokenizer.whole_text([id]) for id in ids] == ["ab", "b", "a", " ", "1", "2", "2", " ", "ab"]
    prompts = [*PROMPTS, ids]
    outs = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True))
    assert [list(out.tokens) for out in outs] == [continued(oracle, prompt) for prompt in prompts]


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.usefixtures("oracle")
def test_its_answers_have_its_format(tmp_path: Path, kind: str) -> None:
    folder = unpacked.checkpoint_folder(checkpoint(tmp_path, kind))
    format = tokenizer_in(folder).format("auto")
    assert format == FORMAT
    tools = [{"type": "function", "function": {"name": "weather"}}]
    parser = reader(format, tools, reasoning=False, split=True)
    said = 'Yes.<toy:calls><toy:call>weather<toy:with>{"days": 2}</toy:call></toy:calls>'
    parts = [*parser.push(said), *parser.finish()]
    assert Answer.of(parts) == Answer("", "Yes.", (ToolCall("weather", '{"days": 2}'),))


@pytest.mark.usefixtures("oracle")
def test_its_layouts_fit_ascend(tmp_path: Path) -> None:
    """`plan` runs the family's own steps on meta."""
    settings: dict[str, Any] = {"platform": "ascend", "exe_mode": "ge_graph", "cache_config": {"page_size": 0}}
    settings["model_config"] = {"dtype": "bfloat16"}
    case = write_case(tmp_path / "toy.yaml", tmp_path / "model", model_name="toy_moe", **settings)
    done = umbra("plan", str(case))
    assert "fullest at " in done.stdout, done.stdout + done.stderr


def test_the_guide_names_every_layer() -> None:
    """docs/adding_a_model.md has every class of models/layers/ that is a module, and none that does not exist."""
    stems = [path.stem for path in LAYERS.glob("[a-z]*.py")]
    modules = {stem: importlib.import_module(f"umbra.models.layers.{stem}") for stem in stems}
    there = {
        f"{name}.{word}"
        for name, module in modules.items()
        for word, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__
    }
    named = set(re.findall(rf"`((?:{'|'.join(modules)})\.\w+)`", (ROOT / "docs/adding_a_model.md").read_text()))
    assert there <= named
    assert all(hasattr(modules[name], word) for name, _, word in (path.partition(".") for path in named))
