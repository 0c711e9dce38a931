"""The benchmarks run, write the rows they document, and give llama.cpp exactly the numbers that the engine holds."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from tests.fakes.peer import DyingPeer
from tests.tiny import make_runner, save_tiny, save_tiny_m2, save_tiny_of, tiny_case, write_case
from umbra.commands.logits import prefill_logits
from umbra.executor.model_runner import ModelRunner
from umbra.models.gguf import folder as unpacked
from umbra.models.layers.base import layers_of
from umbra.tools.benchmarks import cpu, latent_forms
from umbra.tools.benchmarks.gguf_entries import entries
from umbra.tools.benchmarks.gguf_file import TYPES, write_gguf
from umbra.tools.benchmarks.gguf_mix import MIXES, write_mix
from umbra.tools.benchmarks.peer_process import PeerDied, PeerProcess
from umbra.tools.benchmarks.umbra_engine import EngineSetup, Umbra

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A case with sizes that can be quantised, and positions for the longest prompt."""
    folder = tmp_path_factory.mktemp("benchmarks")
    save_tiny(folder / "model", moe_intermediate_size=32, max_position_embeddings=4096)
    return str(write_case(folder / "tiny.yaml", folder / "model", model_config={"dtype": "bfloat16"}))


@pytest.fixture(scope="module")
def m2_case(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("benchmarks_m2")
    save_tiny_m2(folder / "model", max_position_embeddings=4096)
    settings = dict(model_name="minimax_m2", model_config={"dtype": "bfloat16"})
    return str(write_case(folder / "tiny.yaml", folder / "model", **settings))


@pytest.fixture(scope="module")
def gpt_oss_case(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("benchmarks_gpt_oss")
    save_tiny_of(folder / "model", "gpt_oss")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    (folder / "model" / "model.safetensors").unlink()
    settings = dict(model_name="gpt_oss", model_config={"dtype": "bfloat16"})
    return str(write_case(folder / "tiny.yaml", folder / "model", **settings))


@pytest.fixture(scope="module")
def latent_case(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("benchmarks_latent")
    sizes = dict(
        mlp_layer_types=["sparse"] * 3,
        num_hidden_layers=3,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        moe_intermediate_size=32,
    )
    save_tiny_of(folder / "model", "glm4_moe_lite", **sizes)
    settings = dict(model_name="glm4_moe_lite", model_config={"dtype": "bfloat16"})
    return str(write_case(folder / "tiny.yaml", folder / "model", **settings))


@pytest.mark.parametrize(
    ("family", "format", "head"),
    [
        ("case", "q4", "Q8_0"),
        ("case", "q8", "Q8_0"),
        ("m2_case", "q4", "Q8_0"),
        ("gpt_oss_case", "auto", "BF16"),
        ("latent_case", "q4", "Q8_0"),
    ],
)
def test_gguf_file_has_every_weight(
    family: str, format: str, head: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    engine = Umbra(EngineSetup(request.getfixturevalue(family), None, format, 1, "auto", 1, 16))
    write_gguf(tmp_path / "tiny.gguf", engine.model, engine.config)
    tensors = {t.name: t for t in GGUFReader(tmp_path / "tiny.gguf").tensors}
    assert tensors["output.weight"].tensor_type.name == head
    for entry in entries(engine.model, engine.config):
        tensor = tensors.pop(entry.name)
        assert tuple(reversed(tensor.shape.tolist())) == entry.shape
        assert tensor.tensor_type.name == TYPES[entry.format]
        kept = torch.cat(list(entry.read())).reshape(entry.shape).float().numpy()
        np.testing.assert_array_equal(dequantize(tensor.data, tensor.tensor_type).reshape(entry.shape), kept)
    assert not tensors
    assert sum(int(np.prod(e.shape)) for e in entries(engine.model, engine.config)) == sum(
        p.kept_elements for path, layer in layers_of(engine.model) for p in layer.pieces(path)
    )


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_of_types_is_read(mix: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", hidden_size=256, head_dim=32, num_attention_heads=8, moe_intermediate_size=256)
    case, path = str(write_case(tmp_path / "tiny.yaml", tmp_path / "model")), tmp_path / "mix.gguf"
    write_mix(path, case, 2, mix)
    engine = Umbra(EngineSetup(case, None, "auto", 1, "auto", 1, 16, checkpoint=path))
    assert engine.config.num_hidden_layers == 2
    for tensor in GGUFReader(path).tensors:
        assert abs(dequantize(tensor.data, tensor.tensor_type).std() - 0.02) < 0.01, tensor.name
    assert engine.prefill([1, 2, 3]).std() > 0.1


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "qwen3_5", "kimi_linear"])
def test_gguf_of_a_model_with_states_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    def runner(path: Path) -> ModelRunner:
        return make_runner(tiny_case(tmp_path, path, model_name=family), tmp_path)

    monkeypatch.setattr(unpacked, "FOLDERS", tmp_path / "unpacked")
    tiled = {"linear_num_value_heads": 6, "linear_value_head_dim": 32}
    save_tiny_of(tmp_path / "model", family, **{"moe_intermediate_size": 32} if family == "kimi_linear" else tiled)
    written, prompts = runner(tmp_path / "model"), [[*range(9)], [3]]
    config: Any = written.config
    write_gguf(tmp_path / "m.gguf", written.engine.model, config)
    pairs = zip(*(prefill_logits(of, prompts) for of in (runner(tmp_path / "m.gguf"), written)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "ministral3"])
def test_gguf_with_pairs_of_rows_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Also with divisors of frequencies in a tensor, and queries that grow."""
    monkeypatch.setattr(unpacked, "FOLDERS", tmp_path / "unpacked")
    save_tiny_of(tmp_path / "model", family)
    cases = (tiny_case(tmp_path, tmp_path / name, model_name=family) for name in ("model", "m.gguf"))
    written, prompts = make_runner(next(cases), tmp_path), [[*range(40)], [3]]
    write_gguf(tmp_path / "m.gguf", written.engine.model, written.config)
    read = make_runner(next(cases), tmp_path)
    for ours, theirs in zip(*(prefill_logits(of, prompts) for of in (read, written)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_gguf_of_minimax_m2_is_in_the_checkpoints_order(tmp_path: Path) -> None:
    """The engine keeps query and key heads in another order; llama.cpp rotates the first columns of a head."""
    oracle = save_tiny_m2(tmp_path / "model", rotary_dim=8).state_dict()  # with 16 of 32 the order is its own inverse
    runner = make_runner(tiny_case(tmp_path, tmp_path / "model", model_name="minimax_m2"), tmp_path)
    written = {e.name: torch.cat(list(e.read())) for e in entries(runner.engine.model, runner.config)}
    theirs = {
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "ffn_gate_inp.weight": "mlp.gate.weight",
        "exp_probs_b.bias": "mlp.e_score_correction_bias",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
    }
    for i in range(3):
        layer = {name: oracle[f"model.layers.{i}.{key}"] for name, key in theirs.items()}
        gate, up = oracle[f"model.layers.{i}.mlp.experts.gate_up_proj"].chunk(2, dim=1)
        for name, tensor in (layer | {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}).items():
            kept = written[f"blk.{i}.{name}"]
            np.testing.assert_array_equal(kept.numpy(), tensor.reshape(kept.shape).numpy(), err_msg=name)


def test_cpu_decode_writes_its_rows(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    sizes = ["--layers", "1", "--contexts", "8", "1100", "--prompts", "20", "130"]
    cpu.main(["decode", "--case", case, *sizes, "--seconds", "0", "--threads", "1", *outputs])
    data = json.loads((tmp_path / "rows.json").read_text())
    assert data["layers"] == 1
    assert data["format"] == "q4"
    rows = data["rows"]
    assert [(r["phase"], r["batch"], r["context"]) for r in rows] == [
        *(("decode", b, c) for c in (8, 1100) for b in (1, 4, 8)),
        *(("prefill", n, 0) for n in (20, 130)),
    ]
    assert rows[3]["step_gb"] - rows[0]["step_gb"] == pytest.approx(1092 * 2 * 2 * 8 * 2 / 1e9)
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert 0 < row["limit_fraction"] < 1
        assert 0 < row["int8_fraction"] < 1
    experts = [r["experts"] for r in rows]
    assert experts[0] == 3  # of one token
    assert 3 < experts[1] <= experts[2] <= 8  # tokens of their own reach other experts
    assert (tmp_path / "rows.png").stat().st_size > 0
    assert capsys.readouterr().out.count("prefill") == 2


def test_cpu_decode_of_a_dense_model_uses_no_experts(tmp_path: Path) -> None:
    save_tiny_of(tmp_path / "model", "qwen3_5", hidden_size=64, intermediate_size=64, num_hidden_layers=4)
    case = str(write_case(tmp_path / "tiny.yaml", tmp_path / "model", model_name="qwen3_5"))
    sizes = ["--layers", "8", "--batches", "2", "--contexts", "8", "--prompts", "20", "--json", str(tmp_path / "rows")]
    cpu.main(["decode", "--case", case, *sizes, "--seconds", "0", "--threads", "1"])
    data = json.loads((tmp_path / "rows").read_text())
    assert data["layers"] == 8
    assert [row["experts"] for row in data["rows"]] == [0, 0]
    assert all(0 < row["limit_fraction"] < 1 and 0 < row["int8_fraction"] < 1 for row in data["rows"])


def test_forms_of_latent_attention_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    latent_forms.main(["--rows", "300+20", "--seconds", "0", "--threads", "1", "--json", str(path)])
    first, second = json.loads(path.read_text())["rows"]
    pairs = 300 * 20 + 300 * 301 / 2
    assert first["counts"] == pytest.approx((pairs * 1088 + 300 * 131072) / (pairs * 320 + 320 * 131072))
    assert first["counts"] > second["counts"]
    assert first["ratio"] > 0


def test_decode_steps_repeat_one_position(case: str) -> None:
    """Any number of steps later, the logits are those of a prefill of context and token."""
    engine = Umbra(EngineSetup(case, 2, "q8", 1, "auto", 2, 16))
    contexts = engine.random_prompts(2, 9, torch.Generator().manual_seed(0))
    expected = [engine.prefill([*context, 5]) for context in contexts]
    engine.begin(contexts)
    for token in (1, 2, 3):
        engine.step([token, token])
    logits = engine.step([5, 5])
    assert (logits - torch.cat(expected)).norm() < 0.02 * logits.norm()


def test_a_peer_that_dies_says_by_which_signal() -> None:
    peer = PeerProcess("llama.cpp", functools.partial(DyingPeer, 8, 3), os.sched_getaffinity(0))
    assert peer.prefill_all([1, 2, 3]).shape == (3, 8)
    for _ in range(2):
        with pytest.raises(PeerDied, match=r"^llama\.cpp: died with SIGSEGV$"):
            peer.prefill([1, 2, 3, 4])
    peer.close()
