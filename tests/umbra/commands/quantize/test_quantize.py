"""`umbra quantize`: rounding, the files it writes, the search for scales, and runs that are killed and resumed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM, Mxfp4Config, PreTrainedModel, Qwen3MoeForCausalLM

from tests import quantised
from tests.command import umbra
from tests.families import ROWS
from tests.families.pictured import save_pictured
from tests.families.row import Row
from tests.quantised import awq_meaning, mxfp4_tiny
from tests.tiny import make_runner, oracle_logits, rounding_bound, save_tiny, save_tiny_of, tiny_case
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.commands.logits import collect_logits
from umbra.commands.quantize import awq, fp8, mxfp4, workers
from umbra.commands.quantize.awq import AwqTarget, quantise
from umbra.commands.quantize.convert import Calibration, convert
from umbra.commands.quantize.fp8 import Fp8Target
from umbra.commands.quantize.layer import CalibratedLayer
from umbra.commands.quantize.mxfp4 import Mxfp4Target
from umbra.commands.quantize.search import fold, search_layer
from umbra.commands.quantize.source import CheckpointSource
from umbra.commands.quantize.w8a8 import W8a8Target
from umbra.ops.formats.mxfp4 import E2M1

pytestmark = pytest.mark.slow

GROUP = 32
WIDE = dict(moe_intermediate_size=32, intermediate_size=64)  # multiples of the group
TEXT = "It is a truth universally acknowledged, that a single man must be in want of a wife. " * 6


def save_model(folder: Path, **options: object) -> Qwen3MoeForCausalLM:
    """A tiny model, its second layer dense, with the demo's tokenizer and vocabulary."""
    model = save_tiny(folder, **(WIDE | {"vocab_size": 4096, "mlp_only_layers": [1]} | options))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((ROOT / "checkpoints/austen_moe" / name).read_bytes())
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize") / "model"
    save_model(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def as_float(folder: Path, to: Path, kind: Any = Qwen3MoeForCausalLM) -> PreTrainedModel:
    """The quantised checkpoint as a float one, in transformers."""
    tensors = tensors_of(folder)
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    floats = {n: t for n, t in tensors.items() if n.rpartition(".")[2] not in ("qweight", "qzeros", "scales")}
    floats |= {f"{name}.weight": awq_meaning(name, tensors).contiguous() for name in names}
    to.mkdir()
    save_file(floats, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config))
    model: PreTrainedModel = kind.from_pretrained(to, dtype=torch.float32).eval()
    return model


def test_plain_rounding_writes_the_format(tmp_path: Path) -> None:
    save_model(tmp_path / "model", attention_bias=True, max_shard_size="100KB")
    before = tensors_of(tmp_path / "model")
    convert(tmp_path / "out", AwqTarget(CheckpointSource(tmp_path / "model"), (), GROUP))
    after = tensors_of(tmp_path / "out")
    linears = {n for n in before if "_proj." in n and n.endswith("weight")}
    assert len(linears) == 2 * 4 + 8 * 3 + 3
    expected = before.keys() - linears
    for name in linears:
        short, (rows, columns) = name.removesuffix(".weight"), before[name].shape
        parts = {part: after[f"{short}.{part}"] for part in ("qweight", "qzeros", "scales")}
        expected |= {f"{short}.{part}" for part in parts}
        groups = columns // GROUP
        assert [(p.dtype, tuple(p.shape)) for p in parts.values()] == [
            (torch.int32, (columns, rows // 8)),
            (torch.int32, (groups, rows // 8)),
            (torch.float16, (groups, rows)),
        ]
        assert torch.equal(awq_meaning(short, after), quantise(before[name], GROUP).floats())
    assert after.keys() == expected
    assert all(torch.equal(after[n], before[n]) for n in before.keys() - linears)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "modules_to_not_convert": ["mlp.gate"],
    }
    assert config == json.loads((tmp_path / "model/config.json").read_text())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == after.keys()
    assert index["model.layers.1.mlp.gate_proj.qweight"] == "model-layer-00001.safetensors"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_w8a8_is_written_as_modelslim_does(tmp_path: Path) -> None:
    oracle = save_model(tmp_path / "model", attention_bias=True)
    before = tensors_of(tmp_path / "model")
    convert(tmp_path / "out", W8a8Target(CheckpointSource(tmp_path / "model"), ("o_proj",)))
    types = json.loads((tmp_path / "out/quant_model_description.json").read_text())
    after, kept = tensors_of(tmp_path / "out"), ("norm", "embed", "lm_head", "mlp.gate.", "o_proj")
    for name, w in before.items():
        if name.endswith("bias") or any(part in name for part in kept):
            assert types[name] == "FLOAT"
            assert torch.equal(after[name], w)
            continue
        levels, scale, offset = (after.pop(name + last) for last in ("", "_scale", "_offset"))
        assert (levels.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (len(w), 1))
        assert ((levels * scale - w).abs() <= scale * 0.5001).all()
        assert not offset.any()
        assert {types.pop(name + last) for last in ("", "_scale", "_offset")} == {"W8A8_DYNAMIC"}
    assert {name for name in types if "." in name} == set(after)
    assert types["model_quant_type"] == "W8A8_DYNAMIC"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == json.loads((tmp_path / "model/config.json").read_text())
    case = tiny_case(tmp_path, tmp_path / "out", quantization={"method": "none"})
    ours = torch.from_numpy(collect_logits(make_runner(case, tmp_path), [[5, 17, 3, 88]], 0)["prefill_0"])
    expected = oracle_logits(oracle, [5, 17, 3, 88])
    assert (ours - expected).abs().mean() < 0.1 * expected.abs().mean()


@torch.inference_mode()
def test_the_layers_are_transformers_layers(tmp_path: Path) -> None:
    oracle = save_model(tmp_path, attention_bias=True)
    source, ids = CheckpointSource(tmp_path), torch.arange(40).view(2, 20) * 7
    hidden = source.rest()["model.embed_tokens.weight"][ids]
    for index in range(source.config.num_hidden_layers):
        hidden = CalibratedLayer(source, index, 2, 20).forward(source.layer(index).__getitem__, hidden)
    with torch.no_grad():
        expected = oracle.model(ids).last_hidden_state
        torch.testing.assert_close(oracle.model.norm(hidden), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.quantise is not None], ids=str)
@torch.inference_mode()
def test_an_expert_that_every_token_takes_is_quantised(tmp_path: Path, row: Row) -> None:
    """Its layers are transformers' layers, a search loses nothing, and Umbra reads what is written."""
    oracle = row.save(tmp_path / "model", **{**WIDE, **(row.quantise or {})})
    source, ids = CheckpointSource(tmp_path / "model"), torch.arange(40).view(2, 20) * 2
    hidden = source.rest()["model.embed_tokens.weight"][ids]
    for index in range(2):
        layer, tensors = CalibratedLayer(source, index, 2, 20), source.layer(index)
        exact = layer.forward(tensors.__getitem__, hidden)
        folds = list(search_layer(layer, tensors.__getitem__, hidden, GROUP, lambda name: "_proj." in name))
        folded = dict(fold(tensors, folds))
        torch.testing.assert_close(layer.forward(folded.__getitem__, hidden), exact, atol=1e-4, rtol=1e-4)
        hidden = exact
    torch.testing.assert_close(oracle.model.norm(hidden), oracle.model(ids).last_hidden_state, atol=1e-4, rtol=1e-4)
    convert(tmp_path / "out", AwqTarget(source, (), GROUP))
    dequantised = as_float(tmp_path / "out", tmp_path / "floats", type(oracle))
    case = tiny_case(tmp_path, tmp_path / "out", model_name=row.name, quantization={"method": "none"})
    ours = torch.from_numpy(collect_logits(make_runner(case, tmp_path), ids.tolist(), 0)["prefill_1"])
    torch.testing.assert_close(ours, oracle_logits(dequantised, ids[1].tolist()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("target", [Fp8Target, W8a8Target])
def test_heads_matrices_and_routers_stay_floats(tmp_path: Path, target: type[Fp8Target | W8a8Target]) -> None:
    """Also where no block of FP8 is whole."""
    oracle = save_tiny_of(tmp_path / "model", "deepseek_v3", **WIDE, initializer_range=0.1)
    convert(tmp_path / "out", target(CheckpointSource(tmp_path / "model"), ()))
    tensors, ids = tensors_of(tmp_path / "out"), list(range(40))
    kept = [name for name in tensors if f"{name}_scale" not in tensors and f"{name}_scale_inv" not in tensors]
    assert {name for name in kept if "_proj" in name and name.endswith("weight")} == {
        f"model.layers.{layer}.self_attn.kv_b_proj.weight" for layer in range(2)
    }
    expected, case = oracle_logits(oracle, ids), tiny_case(tmp_path, tmp_path / "out", model_name="deepseek_v3")
    ours = torch.from_numpy(collect_logits(make_runner(case, tmp_path), [ids], 0)["prefill_0"])
    assert 0 < (ours - expected).norm() < 0.1 * expected.norm()


def test_a_model_that_sees_pictures_becomes_one_that_reads(tmp_path: Path) -> None:
    """Each expert's matrices come from tensors of all; states' decays and other small matrices stay in floats."""
    wide = dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "head_dim"), 128)
    save_pictured(
        tmp_path / "model", "qwen3_5_moe", **wide, linear_num_key_heads=8, linear_num_value_heads=8, num_hidden_layers=4
    )
    before = CheckpointSource(tmp_path / "model")
    convert(tmp_path / "out", Fp8Target(before, ()))
    config, after = json.loads((tmp_path / "out/config.json").read_text()), CheckpointSource(tmp_path / "out")
    assert (config["model_type"], config["architectures"]) == ("qwen3_5_moe_text", ["Qwen3_5MoeForCausalLM"])
    assert after.shapes == before.shapes
    for name in before.shapes:
        quantised = f"{name}_scale_inv" in after.files
        assert quantised == (".layers." in name and ("_proj." in name or "in_proj_qkv" in name or "in_proj_z" in name))
        torch.testing.assert_close(after.read(name), before.read(name), rtol=quantised / 16, atol=quantised / 1000)


@torch.no_grad()
def test_all_experts_in_one_tensor_are_written_as_gpt_oss_is(tmp_path: Path) -> None:
    """Weights that were MXFP4 keep their values, others are nearer than with scales that cut nothing off; Umbra and
    transformers read what is written, and what is kept."""
    save_tiny_of(tmp_path / "model", "gpt_oss")
    exact, floats = tmp_path / "exact", mxfp4_tiny(tmp_path / "model", tmp_path / "official")
    convert(exact, Mxfp4Target(CheckpointSource(floats), ()))
    convert(tmp_path / "kept", Mxfp4Target(CheckpointSource(floats), ("layers.0.mlp",)))
    ids, settings = list(range(40)), Mxfp4Config(dequantize=True)
    oracle = GptOssForCausalLM.from_pretrained(floats, dtype=torch.float32)
    expected = oracle_logits(oracle, ids)
    for folder in (exact, tmp_path / "kept"):
        theirs = GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=settings)
        torch.testing.assert_close(oracle_logits(theirs, ids), expected, atol=1e-5, rtol=0)
        case = tiny_case(tmp_path, folder, model_name="gpt_oss", quantization={"method": "none"})
        ours = torch.from_numpy(collect_logits(make_runner(case, tmp_path), [ids], 0)["prefill_0"])
        torch.testing.assert_close(ours, expected, atol=rounding_bound(oracle, [ids]), rtol=0)
    names = tensors_of(tmp_path / "kept").keys()
    assert {name for name in names if "layers.0." in name} == {n for n in tensors_of(floats) if "layers.0." in n}
    weight = torch.randn(2, 64, 64)
    codes, exponents = mxfp4.quantise(weight)
    ours = (torch.tensor(E2M1)[codes.int()] * (exponents.float() - 127).exp2()[..., None]).flatten(-2)
    others = quantised.mxfp4(weight)[1]
    errors = [(means - weight).unflatten(-1, (-1, 32)).square().sum(-1) for means in (ours, others)]
    assert (errors[0] <= errors[1]).all()
    assert errors[0].sum() < errors[1].sum()


@pytest.mark.parametrize(("index", "kv_heads"), [(0, 2), (1, 8)])  # sparse, dense
@torch.inference_mode()
def test_folding_keeps_the_function(tmp_path: Path, index: int, kv_heads: int) -> None:
    save_model(tmp_path, num_key_value_heads=kv_heads, attention_bias=True)
    source = CheckpointSource(tmp_path)
    layer = CalibratedLayer(source, index, 2, 24)
    tensors, x = source.layer(index), torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(3))
    x[..., 5] *= 20
    x[..., 9] = 0
    folds = list(search_layer(layer, tensors.__getitem__, x, GROUP, lambda name: "_proj." in name))
    assert any("self_attn.v_proj.weight" in f.divided for f in folds) == (kv_heads == 8)
    assert any(float(f.scale.max() / f.scale.min()) > 2 for f in folds)
    folded = dict(fold(tensors, folds))
    exact = layer.forward(tensors.__getitem__, x)
    torch.testing.assert_close(layer.forward(folded.__getitem__, x), exact, atol=1e-4, rtol=1e-4)


def test_the_search_loses_less_than_plain_rounding(tmp_path: Path, text: Path) -> None:
    oracle = save_model(tmp_path / "model", initializer_range=0.1)
    with torch.no_grad():  # a few channels that are far larger than the rest, as real models have
        for block in oracle.model.layers:
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight[[3, 17]] *= 12
    oracle.save_pretrained(tmp_path / "model")
    source, ids = CheckpointSource(tmp_path / "model"), torch.arange(200).view(4, 50) * 13
    error = {}
    for way, calibration in (("plain", None), ("aware", Calibration(text, 400))):
        convert(tmp_path / way, AwqTarget(source, (), GROUP), calibration)
        with torch.no_grad():
            logits = as_float(tmp_path / way, tmp_path / f"{way}_float")(ids).logits
            error[way] = float((logits - oracle(ids).logits).square().mean())
    assert error["aware"] < error["plain"] * 0.7, error


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("renamed", "calibrated"), [(False, False), pytest.param(True, True, marks=pytest.mark.thorough)]
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calibrated: bool, renamed: bool
) -> None:
    source, calibration = CheckpointSource(model), Calibration(text, 40) if calibrated else None
    convert(tmp_path / "whole", AwqTarget(source, (), GROUP), calibration)
    expected, rename = bytes_of(tmp_path / "whole"), Path.replace
    for kill_at in range(1, len(expected) + 1):
        out, count = tmp_path / f"killed_{kill_at}", 0

        def dying(path: Path, to: Path, kill_at: int = kill_at) -> Path:
            nonlocal count
            count += 1
            if count == kill_at and not renamed:
                path.write_bytes(path.read_bytes()[:50])  # in the middle of a write
                raise Killed
            moved = rename(path, to)
            if count == kill_at:
                raise Killed
            return moved

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", dying)
            with pytest.raises(Killed):
                convert(out, AwqTarget(source, (), GROUP), calibration)
        assert (out / "config.json").exists() == (renamed and kill_at == len(expected))
        finished = {path: path.stat().st_mtime_ns for path in out.glob("model-layer-*.safetensors")}
        convert(out, AwqTarget(source, (), GROUP), calibration)
        assert bytes_of(out) == expected
        assert finished == {path: path.stat().st_mtime_ns for path in finished}  # not computed again


def test_one_core_writes_the_same_bytes_and_lines_tell_the_progress(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workers, "PAUSE", 0)
    cores, target = os.sched_getaffinity(0), AwqTarget(CheckpointSource(model), (), GROUP)
    convert(tmp_path / "all", target, Calibration(text, 400))
    try:
        os.sched_setaffinity(0, {min(cores)})
        convert(tmp_path / "one", target, Calibration(text, 400))
    finally:
        os.sched_setaffinity(0, cores)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "all")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("quantizing layer 1 of 2: ")
    assert lines[-1].startswith("quantizing layer 2 of 2: ")
    assert lines[-1].endswith(" s left")


def test_other_arguments_are_refused(model: Path, text: Path, tmp_path: Path) -> None:
    source, out = CheckpointSource(model), tmp_path / "out"
    convert(out, AwqTarget(source, (), GROUP), Calibration(text, 40))
    convert(out, AwqTarget(source, (), GROUP), Calibration(text, 40))
    (tmp_path / "other.txt").write_text(TEXT + "!")
    with pytest.raises(UserError, match="was begun with another calibrate: use the same, or remove it"):
        convert(out, AwqTarget(source, (), GROUP), Calibration(tmp_path / "other.txt", 40))
    save_model(tmp_path / "other", rms_norm_eps=1e-5)
    with pytest.raises(UserError, match="another source"):
        convert(out, AwqTarget(CheckpointSource(tmp_path / "other"), (), GROUP), Calibration(text, 40))
    with pytest.raises(UserError, match=r"holds files, but no quantize_state\.json"):
        convert(model, AwqTarget(source, (), GROUP))


def test_bad_checkpoints_are_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"q_proj\.weight: 32 columns are not a multiple of --group 64"):
        convert(tmp_path / "out", AwqTarget(CheckpointSource(model), (), 64))
    assert not (tmp_path / "out").exists()
    save_model(tmp_path / "odd", head_dim=2)
    with pytest.raises(UserError, match=r"k_proj\.weight: 4 rows are not a multiple of 8"):
        convert(tmp_path / "out", AwqTarget(CheckpointSource(tmp_path / "odd"), (), GROUP))
    damaged = load_file(tmp_path / "odd/model.safetensors")
    del damaged["model.norm.weight"]
    save_file(damaged, tmp_path / "odd/model.safetensors")
    with pytest.raises(UserError, match=r"1 tensors missing: model\.norm\.weight"):
        CheckpointSource(tmp_path / "odd")
    save_tiny_of(tmp_path / "fused", "gpt_oss")
    with pytest.raises(UserError, match=r"AWQ and FP8 have matrices of one expert each.*: --format mxfp4"):
        convert(tmp_path / "out", AwqTarget(CheckpointSource(tmp_path / "fused"), (), GROUP))
    with pytest.raises(UserError, match=r"--format mxfp4: is for tensors of all experts, which .* has not"):
        convert(tmp_path / "out", Mxfp4Target(CheckpointSource(model), ()))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tokens", "100"], "--tokens 100: must be at least 2, and needs --calibrate"),
        (["--model", "nowhere"], "--model nowhere: is not a folder"),
        (["--format", "fp8"], "--format fp8: has neither --group nor --calibrate"),
    ],
)
def test_bad_arguments_are_one_line(model: Path, tmp_path: Path, arguments: list[str], complaint: str) -> None:
    done = umbra("quantize", "--model", str(model), "--out", str(tmp_path / "out"), "--group", "32", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


@given(st.integers(0, 2**31), st.sampled_from([1e-7, 1e-5, 0.02, 1.0, 3000.0]), st.floats(-3, 3))
def test_no_weight_moves_by_more_than_half_a_step(seed: int, size: float, shift: float) -> None:
    weight = (torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) + shift) * size
    weight[0, :32] = 0
    q = awq.quantise(weight, GROUP)
    assert q.scales.dtype == torch.float16
    assert (q.scales > 0).all()
    assert isinstance(q.levels, torch.Tensor)
    assert q.levels.max() <= 15
    half = q.scales.float().repeat_interleave(GROUP, dim=1) / 2
    assert ((q.floats() - weight).abs() <= half * (1 + 1e-5)).all()
    assert torch.equal(q.floats()[0, :32], torch.zeros(32))


def test_a_weight_that_is_not_finite_is_named() -> None:
    for bad in (float("nan"), float("inf"), 2e6):
        weight = torch.ones(8, 32)
        weight[3, 4] = bad
        with pytest.raises(UserError, match=r"a\.q_proj\.weight: holds values that are not finite"):
            awq.packed_linear("a.q_proj", weight, GROUP)


# Every finite e4m3 from the least to the largest, from the definition: 4 bits of exponent with bias 7, 3 of fraction.
POSITIVE = [f / 8 * 2.0**-6 for f in range(8)]
POSITIVE += [(1 + f / 8) * 2.0 ** (e - 7) for e in range(1, 16) for f in range(8) if (e, f) != (15, 7)]
VALUES = torch.tensor([-v for v in reversed(POSITIVE[1:])] + POSITIVE, dtype=torch.float64)


def random(seed: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-6, 0.02, 1.0, 3e4, 1e30]), st.floats(0, 9))
def test_every_weight_becomes_the_nearest_value(seed: int, size: float, spread: float) -> None:
    """Blocks of different sizes; within a block, magnitudes that reach far below the smallest normal number."""
    weight = random(seed, 256, 384) * size * torch.exp(spread * random(seed + 1, 256, 384).clamp(-2, 0))
    weight[:128, 128:256] *= 1e-3
    quants, scales = fp8.quantise(weight)
    assert (quants.dtype, quants.shape, scales.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    for i in range(2):
        for j in range(3):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert scales[i, j] == weight[block].abs().max() / 448
            exact = (weight[block] / scales[i, j]).double()
            stored = quants[block].double()
            assert torch.isin(stored, VALUES).all()
            upper = torch.searchsorted(VALUES, exact).clamp(1, len(VALUES) - 1)
            nearest = torch.minimum((VALUES[upper] - exact).abs(), (VALUES[upper - 1] - exact).abs())
            assert torch.equal((stored - exact).abs(), nearest)
            bound = torch.maximum(weight[block].abs() / 16, scales[i, j] / 1024)
            assert ((quants[block].float() * scales[i, j] - weight[block]).abs() <= bound * (1 + 1e-6)).all()
