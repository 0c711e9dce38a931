"""Layers that predict further tokens in the formats of published checkpoints: their guesses are those of the same
weights in floats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.executor.engine.step.drafts_ranks import answers
from tests.fakes.drafts import FreeDrafts
from tests.families.deepseek_v3 import LATENT
from tests.gguf_models import save_gguf
from tests.models.guesses import PROMPTS, finish
from tests.models.test_mtp import FAMILIES
from tests.modelslim import modelslim_tiny
from tests.mtp import Oracle
from tests.quantised import is_quantised, quantise_tiny
from tests.ranks import run_ranks
from tests.tiny import make_runner, tiny_case, write_case
from umbra.base.errors import UserError
from umbra.commands.quantize.awq import AwqTarget
from umbra.commands.quantize.convert import convert
from umbra.commands.quantize.fp8 import Fp8Target
from umbra.commands.quantize.source import CheckpointSource
from umbra.commands.quantize.w8a8 import W8a8Target
from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.config.load import load_case
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.models.batch import Batch
from umbra.models.gguf import folder as unpacked


def guesses(folder: Path, checkpoint: Path, family: str, **sections: Any) -> Tensor:
    """The logits of all guesses after two prompts and while they are answered."""
    case = tiny_case(
        folder, checkpoint, model_name=family, draft_config={"method": "mtp", "tokens": 3}, exe_mode="eager", **sections
    )
    loop, seen = make_runner(case, folder).loop, list[Tensor]()
    model, drafter = loop.engine.model, loop.speculation.drafter
    assert drafter
    loop.scheduler.drafts = FreeDrafts(3)

    def run(batch: Batch) -> tuple[Tensor, Tensor]:
        ids, hidden = model.guess(batch)
        seen.append(model.lm_head(hidden))
        return ids, hidden

    drafter.run = drafter.captured = run
    for prompt in PROMPTS:
        loop.submit(Request(tuple(prompt), SamplingParams(max_tokens=6)))
    finish(loop)
    return torch.cat(seen)


def stacked(folder: Path) -> None:
    """Makes one tensor of all gates and ups, and one of all downs, of the layer's experts, as Qwen3.5 has them."""
    tensors, at = load_file(folder / "model.safetensors"), "mtp.layers.0.mlp.experts."
    experts = range(len([name for name in tensors if name.startswith(at)]) // 3)
    parts = [[tensors.pop(f"{at}{e}.{which}_proj.weight") for e in experts] for which in ("gate", "up", "down")]
    gates, ups, downs = map(torch.stack, parts)
    tensors |= {f"{at}gate_up_proj": torch.cat((gates, ups), 1), f"{at}down_proj": downs}
    save_file(tensors, folder / "model.safetensors")


SIZES: dict[str, Any] = dict(hidden_size=128, head_dim=32, moe_intermediate_size=64, intermediate_size=64)
SIZES |= dict(initializer_range=0.05, shared_expert_intermediate_size=64)


def sizes_of(family: str, **more: int) -> dict[str, Any]:
    rope = LATENT["rope_parameters"] | dict(mscale=0.707, mscale_all_dim=0.707)  # of which GGUF files have one
    latents = dict(head_dim=None, kv_lora_rank=64, q_lora_rank=64, v_head_dim=32, rope_parameters=rope)
    return SIZES | (latents if family in ("deepseek_v3", "glm4_moe_lite") else {}) | more


EXCEPT_MTP: dict[str, Any] = {"dynamic": {r"-:.*mtp.*": {}, r"-:.*mlp\.gate$": {}}}
# Family; format, group and bits of `quantise_tiny`, or types of modelslim; the modules of the layer that stay floats.
FORMATS: dict[str, tuple[str, Any, str, dict[str, Any]]] = {
    "DeepSeek-V3": ("deepseek_v3", ("fp8", 0, 8, True), "eh_proj", {}),
    "Qwen3-Next FP8": ("qwen3_next", ("fp8", 0, 8, True), "mtp.fc", {"modules_to_not_convert": ["lm_head", "mtp.fc"]}),
    "GLM FP8": ("glm4_moe", ("float-quantized", -1, 8, True), "eh_proj", {}),
    "GPTQ": ("qwen3_next", ("gptq", 32, 4, True), "mtp.", EXCEPT_MTP),
    "AWQ": ("glm4_moe", ("awq", 32, 4, False), "layers.2.", {"modules_to_not_convert": ["mlp.gate", "model.layers.2"]}),
    "AWQ of all": ("glm4_moe_lite", ("awq", 32, 4, False), "nothing", {}),
    "modelslim": ("qwen3_next", "W8A8_DYNAMIC", "mtp.fc", {}),
    "modelslim, floats": ("glm4_moe", "W8A8_DYNAMIC", "layers.2.", {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_means_its_floats(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    family, format, floats_at, settings = FORMATS[name]
    model, checkpoint = tmp_path / "model", tmp_path / "quantised"
    Oracle(model, family, **sizes_of(family))
    quantised: Callable[[str], bool] = lambda tensor: is_quantised(tensor) and floats_at not in tensor  # noqa: E731
    if isinstance(format, str):
        type_of = lambda module: format if quantised(f"{module}.weight") else "FLOAT"  # noqa: E731
        floats = modelslim_tiny(model, checkpoint, type_of)
    else:
        scheme, group, bits, symmetric = format
        floats = quantise_tiny(model, checkpoint, scheme, group, bits, symmetric, quantised, **settings)
    if name == "GPTQ":
        stacked(checkpoint)
    none = {"quantization": {"method": "none"}}
    expected = guesses(tmp_path, floats, family, **none)
    torch.testing.assert_close(guesses(tmp_path, checkpoint, family, **none), expected, atol=2e-3, rtol=0)
    capsys.readouterr()
    kept = guesses(tmp_path, checkpoint, family)
    said = capsys.readouterr().out
    assert not [part for part in ("mtp.", "layers.2") if part in said]  # as not stored as the config says
    assert (kept[: len(PROMPTS)] - expected[: len(PROMPTS)]).abs().mean() < 0.1 * expected.abs().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_files_mean_the_same(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose experts have blocks, which are kept. Hy3 takes all of its scaled experts: one that rounding
    exchanges for another would weigh more than rounding."""
    monkeypatch.setattr(unpacked, "FOLDERS", tmp_path / "unpacked")
    sizes = dict(moe_intermediate_size=256, hidden_size=256, intermediate_size=256)
    sizes |= {"num_experts_per_tok": 8} if family == "hy_v3" else {}
    Oracle(tmp_path / "model", family, **sizes_of(family, **sizes))
    save_gguf(tmp_path / "model", tmp_path / "floats.gguf", family)
    expected, read = (guesses(tmp_path, tmp_path / name, family) for name in ("model", "floats.gguf"))
    torch.testing.assert_close(read, expected, atol=1e-5, rtol=0)

    def kinds(name: str) -> str:
        blocks = "_exps" in name or (family == "qwen3_5" and "ffn_" in name and "norm" not in name)  # it has no experts
        return ("Q6_K" if "down" in name else "Q4_K") if blocks else "F32"

    means = save_gguf(tmp_path / "model", tmp_path / "blocks.gguf", family, kinds)
    none = {"quantization": {"method": "none"}}
    expected = guesses(tmp_path, means, family, **none)
    assert torch.equal(guesses(tmp_path, tmp_path / "blocks.gguf", family, **none), expected)
    kept = guesses(tmp_path, tmp_path / "blocks.gguf", family)
    assert 0 < (kept[: len(PROMPTS)] - expected[: len(PROMPTS)]).abs().mean() < 0.1 * expected.abs().mean()


@pytest.mark.parametrize("family", ["glm4_moe_lite", "qwen3_next"])
@pytest.mark.parametrize("target", ["awq", "fp8", "w8a8"])
def test_what_quantize_writes_still_drafts(tmp_path: Path, family: str, target: str) -> None:
    """In FP8 like other layers, but for what it projects with; otherwise in floats."""
    Oracle(tmp_path / "model", family, **sizes_of(family))
    if family == "qwen3_next":
        stacked(tmp_path / "model")
    source, out = CheckpointSource(tmp_path / "model"), tmp_path / "out"
    convert(
        out, {"awq": AwqTarget(source, (), 32), "fp8": Fp8Target(source, ()), "w8a8": W8a8Target(source, ())}[target]
    )
    written = read_scheme(out)
    at, layer, sign = ("mtp", "mtp.layers.0", "fc") if source.mtp == "mtp" else ("model.layers.2", "", "eh_proj")
    experts = written.encoding(f"{layer or at}.mlp.experts.1.up_proj")
    assert (experts is not None) == (target == "fp8")
    assert written.encoding(f"{at}.{sign}") is None
    expected = guesses(tmp_path, tmp_path / "model", family)[: len(PROMPTS)]
    drafted = guesses(tmp_path, out, family)[: len(PROMPTS)]
    assert 0 < (drafted - expected).abs().mean() < 0.2 * expected.abs().mean()


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_a_checkpoint_may_lack_the_layer(tmp_path: Path, family: str) -> None:
    """As many that were quantised again do. What else is wrong is not said first."""
    Oracle(tmp_path / "model", family)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not name.startswith(("mtp.", "model.layers.2.", "lm_head"))}
    save_file(kept, tmp_path / "model" / "model.safetensors")
    at = "mtp" if family == "qwen3_next" else r"model.layers.2"
    with pytest.raises(UserError, match=rf"draft_config.method: mtp: .*{at}, but the checkpoint does not hold it"):
        guesses(tmp_path, tmp_path / "model", family)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config.get("mtp_num_hidden_layers", config.get("num_nextn_predict_layers")) == 1


@pytest.mark.slow
def test_two_ranks_draft_like_one(tmp_path: Path) -> None:
    """In FP8 the layer is quantised, beside W8A8 it is in floats; experts are divided, or whole on a rank."""
    Oracle(tmp_path / "model", "qwen3_next", **sizes_of("qwen3_next"))
    stacked(tmp_path / "model")
    source, jobs = CheckpointSource(tmp_path / "model"), []
    for name, target in (("fp8", Fp8Target(source, ())), ("w8a8", W8a8Target(source, ()))):
        convert(tmp_path / name, target)
        mtp = {"method": "mtp", "tokens": 3}
        case = write_case(
            tmp_path / f"{name}.yaml",
            tmp_path / name,
            model_name="qwen3_next",
            exe_mode="graph",
            draft_config=mtp,
            data_config={"max_new_tokens": 24},
        )
        texts, accepted = answers(make_runner(load_case(str(case)), tmp_path), PROMPTS)
        assert accepted == 0
        jobs += [(f"{name}-{tp}", str(case), ["world_size=2", f"moe_tp_size={tp}"], texts) for tp in (1, 2)]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    done = run_ranks(tmp_path, 2, ["tests/executor/engine/step/drafts_ranks.py", str(tmp_path / "jobs.json")])
    assert done.returncode == 0, done.stdout + done.stderr
    for name, _, _, texts in jobs:
        tokens, accepted = json.loads((tmp_path / f"{name}.json").read_text())
        assert tokens == texts
        assert accepted > 8
