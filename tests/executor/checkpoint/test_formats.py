"""Quantised checkpoints: weights have the values that the format defines, both as floats and kept bit for bit."""

import contextlib
import itertools
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.quantised import modelopt_fp8, mxfp4_tiny, quantise_tiny
from tests.tiny import make_runner, save_tiny, save_tiny_of, tiny_case
from umbra.base.errors import UserError
from umbra.commands.logits import prefill_logits
from umbra.executor.checkpoint.formats.detect import SCHEMES, read_scheme
from umbra.executor.checkpoint.load import load_checkpoint
from umbra.executor.config.load import load_model_config
from umbra.executor.plan.weight_formats import build_of
from umbra.models.hf_config import HfConfig
from umbra.models.layers.base import layers_of
from umbra.models.layers.experts import Experts
from umbra.models.layers.linear import MergedLinear, RowLinear
from umbra.models.registry import family_in, model_class
from umbra.ops import load_ops
from umbra.ops.cpu import engine
from umbra.ops.cpu.matrix import NativeExperts
from umbra.ops.formats import Format
from umbra.ops.parallel.join import parallel_of
from umbra.tools.benchmarks.checkpoint_loading import loaded, write

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = dict(hidden_size=256, head_dim=32, num_attention_heads=8, num_key_value_heads=4)
SIZES |= dict(moe_intermediate_size=128, intermediate_size=128, num_experts=8, num_experts_per_tok=2)
SIZES |= dict(initializer_range=0.05)
# format, group, bits, symmetric; whether the CPU keeps it bit for bit
FORMATS = [("awq", 32, 4, False, True), ("gptq", -1, 4, True, True), ("gptq_v2", 64, 4, False, True)]
FORMATS += [("gptq", 64, 8, False, False), ("pack-quantized", 32, 4, False, True)]
FORMATS += [("pack-quantized", 128, 8, False, False), ("int-quantized", -1, 8, True, True), ("w8a8", -1, 8, True, True)]
FORMATS += [("float-quantized", -1, 8, True, True), ("float-quantized", 0, 8, True, True), ("fp8", 0, 8, True, True)]
FORMATS += [("auto_round:auto_gptq", 128, 4, True, True), ("auto_round", 64, 4, False, True)]
FORMATS += [("auto_round:auto_awq", 32, 4, False, True), ("desc_act", 64, 4, False, False)]
FORMATS += [("actorder", 128, 8, True, False)]
FORMATS += [("modelopt", 16, 4, True, True), ("nvfp4-pack-quantized", 16, 4, True, True)]
IDS = [f"{name}-{bits}bit-g{group}-{'sym' if sym else 'asym'}" for name, group, bits, sym, _ in FORMATS]
PROMPTS = [[5, 17, 3, 88, 2, 41], [7], list(range(30, 53))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float") / "model"
    save_tiny(folder, **SIZES)
    return folder


def logits(folder: Path, checkpoint: Path, **sections: Any) -> list[Tensor]:
    runner = make_runner(tiny_case(folder, checkpoint, **sections), folder)
    return prefill_logits(runner, PROMPTS)


@pytest.mark.parametrize(("format", "group", "bits", "symmetric", "kept"), FORMATS, ids=IDS)
def test_every_format_means_its_floats(
    tmp_path: Path, model: Path, format: str, group: int, bits: int, symmetric: bool, kept: bool
) -> None:
    floats = quantise_tiny(model, tmp_path / "quantised", format, group, bits, symmetric)
    none = {"quantization": {"method": "none"}}
    expected = logits(tmp_path, floats, **none)
    for ours, theirs in zip(logits(tmp_path, tmp_path / "quantised", **none), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    quantised = built(tmp_path / "quantised", quantization=none["quantization"] if format == "desc_act" else {})
    assert_kept(quantised, load_file(floats / "model.safetensors"), kept)


@pytest.mark.parametrize("format", ["modelopt", "nvfp4-pack-quantized"])
@pytest.mark.parametrize("family", ["qwen3_5", "llama"])
def test_dense_models_are_kept_in_nvfp4(tmp_path: Path, family: str, format: str) -> None:
    """Also layers with states, whose projections stand beside each other."""
    sizes = {key: value for key, value in SIZES.items() if "experts" not in key and "moe" not in key}
    save_tiny_of(tmp_path / "model", family, eos_token_id=None, **sizes)
    floats = quantise_tiny(tmp_path / "model", tmp_path / "quantised", format, 16, 4, True)
    none = {"model_name": family, "quantization": {"method": "none"}}
    expected = logits(tmp_path, floats, **none)
    for ours, theirs in zip(logits(tmp_path, tmp_path / "quantised", **none), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    means, checked = load_file(floats / "model.safetensors"), 0
    for path, layer in layers_of(built(tmp_path / "quantised")):
        matrix: Any = layer.weight if isinstance(layer, MergedLinear | RowLinear) else None
        if matrix is None or not matrix.packed.format.quantised:
            continue
        names = [source.name for source in layer.sources] if isinstance(layer, MergedLinear) else [path.split(".")[-1]]
        of = dict.fromkeys(f"{path.rpartition('.')[0]}.{name}" for name in names)
        mean = torch.cat([means[f"{module}.weight"] for module in of])
        kept = matrix.packed.dequantised(0, matrix.rows)
        assert torch.equal(kept.flatten().sort()[0], mean.flatten().sort()[0])  # rows of gates stand elsewhere
        checked += 1
    assert checked >= 8


def test_activation_order_is_rounded(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = logits(tmp_path, quantise_tiny(model, tmp_path / "quantised", "desc_act", 64))
    for ours, theirs in zip(logits(tmp_path, tmp_path / "quantised"), expected, strict=True):
        assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()
    title = "56 matrices in GPTQ, 4 bits in groups of 64 in activation order, with zero points"
    assert f"\n{title}: kept by no format, so rounded to 8 bits" in capsys.readouterr().out


def built(checkpoint: Path, rank: int = 0, **sections: Any) -> nn.Module:
    """This rank's model with its weights, without the other ranks."""
    case = tiny_case(checkpoint.parent, checkpoint, **{"model_name": family_in(checkpoint)} | sections)
    engine.start(1, "auto")
    build = build_of(case, load_ops("cpu"), parallel_of(case.parallel_sizes, rank, {}), torch.device("cpu"), True)
    model = cast(Any, model_class(case.model_name)(load_model_config(case), build))
    load_checkpoint(model, checkpoint, read_scheme(checkpoint), model.ignores, progress=False)
    return cast(nn.Module, model)


def assert_kept(model: nn.Module, means: dict[str, Tensor], kept: bool) -> None:
    """Every matrix equals the checkpoint's to the last bit, and has as many bits as there if `kept`."""
    checked = 0
    for path, layer in layers_of(model):
        if isinstance(layer, Experts):
            native = cast(NativeExperts, layer.weights)
            assert native.w13.format.quantised == kept
            for expert, which in itertools.product(range(layer.experts), ("gate", "up", "down")):
                mean = means[f"{path}.{expert}.{which}_proj.weight"]
                mine = mean[:, layer.part] if which == "down" else mean[layer.part]
                assert torch.equal(native.dequantised(expert, which), mine)
                checked += 1
        elif isinstance(layer, RowLinear):
            checked += check_matrix(layer.weight, means[f"{path}.weight"][:, layer.part], kept)
        elif isinstance(layer, MergedLinear) and layer.sources[0].name != "gate":
            parent = path.rpartition(".")[0]
            rows = [means[f"{parent}.{source.name}.weight"][source.part] for source in layer.sources]
            checked += check_matrix(layer.weight, torch.cat(rows), kept)
    assert checked == 2 * (3 * 8 + 2)


def check_matrix(matrix: Any, mean: Tensor, kept: bool) -> bool:
    assert matrix.packed.format.quantised == kept
    return torch.equal(matrix.packed.dequantised(0, matrix.rows), mean)


@pytest.mark.parametrize(
    "format", ["awq", "int-quantized", "w8a8", "float-quantized", "fp8", "desc_act", "actorder", "modelopt"]
)
def test_splits_keep_every_bit(tmp_path: Path, model: Path, format: str) -> None:
    """Also where the columns of a rank begin inside a quantisation group of 128, or its rows inside a packed word."""
    rows = format.endswith("-quantized") or format == "w8a8"
    bits, group = (8, -1) if rows else (4, 128)
    floats = quantise_tiny(model, tmp_path / "quantised", format, group, bits, symmetric=rows)
    means = load_file(floats / "model.safetensors")
    sections: dict[str, Any] = {"world_size": 4, "quantization": {"method": "none" if "act" in format else "auto"}}
    for rank in range(4):
        assert_kept(built(tmp_path / "quantised", rank, **sections), means, kept="act" not in format)


def test_modelopt_mixes_and_may_say_so_in_a_file_of_its_own(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention in FP8, experts in NVFP4, each matrix with a float32 of its own."""
    floats = quantise_tiny(model, tmp_path / "quantised", "modelopt")
    tensors, means = (load_file(folder / "model.safetensors") for folder in (tmp_path / "quantised", floats))
    layers = {}
    for name in [name for name in means if name.removesuffix(".weight") + ".weight_scale_2" in tensors]:
        module = name.removesuffix(".weight")
        layers[module] = {"quant_algo": "NVFP4", "group_size": 16}
        if ".self_attn." in name:
            layers[module] = {"quant_algo": "FP8"}
            del tensors[f"{module}.weight_scale_2"]
            written, means[name] = modelopt_fp8(load_file(model / "model.safetensors")[name])
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in written.items()}
    save_file(tensors, tmp_path / "quantised" / "model.safetensors")
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    said = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    beside = tmp_path / "quantised" / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    assert_kept(built(tmp_path / "quantised"), means, kept=True)
    assert "56 scales of activations are not used: activations are rounded with scales" in capsys.readouterr().out
    said["quantized_layers"] = {"model.layers.0.self_attn.q_proj": {"quant_algo": "MXFP8"}}
    beside.write_text(json.dumps({"quantization": said}))
    with pytest.raises(UserError, match="quant_algo: 'MXFP8' must be one of NVFP4, W4A16_NVFP4, FP8"):
        read_scheme(tmp_path / "quantised")


@pytest.mark.parametrize(
    ("format", "key", "rule", "part"),
    [
        ("gptq", "dynamic", r"+:.*\.1\..*_attn\.(q|k|v|o)_proj", ".1.self_attn."),
        ("auto_round", "extra_config", r"layers\.1\..*down_proj$", ".down_proj."),
    ],
)
def test_modules_may_have_settings_of_their_own(
    tmp_path: Path, model: Path, format: str, key: str, rule: str, part: str
) -> None:
    """Attention or the downs of layer 1 in 8 bits in groups of 32, the rest in 4 bits in groups of 64."""
    quantise_tiny(model, tmp_path / "eight", format, 32, 8, True)
    quantise_tiny(model, tmp_path / "quantised", format, 64, 4, True)
    means: dict[str, Tensor] = {}
    for suffix in ("", "-floats"):
        files = [tmp_path / f"{name}{suffix}" / "model.safetensors" for name in ("quantised", "eight")]
        four, eight = (load_file(file) for file in files)
        means = four | {name: tensor for name, tensor in eight.items() if part in name and ".layers.1." in name}
        save_file(means, files[0])
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    config["quantization_config"][key][rule] = {"bits": 8, "group_size": 32}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    quantised = built(tmp_path / "quantised")
    assert_kept(quantised, means, kept=True)
    layer = cast(Any, quantised).model.layers[1]
    formats = [w.format for w in (layer.self_attn.o_proj.weight.packed, layer.mlp.experts.weights.w2)]
    wide = [format == Format("q8", 32) for format in formats]
    assert wide == [part != ".down_proj.", part == ".down_proj."]


@pytest.mark.parametrize("scale", [1.5e-5, 6e4, 7e4])
def test_scales_in_bfloat16_are_kept_if_float16_has_them(tmp_path: Path, model: Path, scale: float) -> None:
    """As Kimi-K2-Thinking has them: routed experts only, symmetric, in groups of 32."""
    floats = quantise_tiny(model, tmp_path / "quantised", "pack-quantized", 32, 4, True)
    tensors, means = (load_file(folder / "model.safetensors") for folder in (tmp_path / "quantised", floats))
    tensors = {name: tensor for name, tensor in tensors.items() if ".self_attn." not in name}
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        levels = (means[name[:-6]].unflatten(1, (-1, 32)) / tensors[name].float()[..., None]).round()
        tensors[name] = tensors[name].bfloat16()
        tensors[name][0, 0] = scale
        means[name[:-6]] = (levels * tensors[name].float()[..., None]).flatten(1)
    save_file(
        tensors | {n: t for n, t in means.items() if ".self_attn." in n}, tmp_path / "quantised/model.safetensors"
    )
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    config["quantization_config"]["ignore"].append(r"re:.*self_attn.*")
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    if scale > 65504:
        with pytest.raises(UserError, match=r"quantised: .*experts\.0\.gate_proj\.weight: .* beyond float16's range"):
            built(tmp_path / "quantised")
        return
    experts = cast(Any, built(tmp_path / "quantised")).model.layers[1].mlp.experts.weights
    assert (experts.w13.format.kind, experts.w13.format.group) == ("q4", 32)
    for expert, which in itertools.product(range(8), ("gate", "up", "down")):
        mean = means[f"model.layers.1.mlp.experts.{expert}.{which}_proj.weight"]
        assert torch.equal(experts.dequantised(expert, which), mean)


@pytest.fixture(scope="module")
def oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss in MXFP4."""
    folder = tmp_path_factory.mktemp("mxfp4")
    save_tiny_of(folder / "oss", "gpt_oss", num_hidden_layers=2, intermediate_size=128)
    mxfp4_tiny(folder / "oss", folder / "mxfp4")
    return folder / "mxfp4"


@pytest.mark.parametrize(("ranks", "moe_tp"), [(1, 1), (2, 2), (2, 1), (4, 2)])
def test_mxfp4_keeps_every_bit_of_experts(oss: Path, ranks: int, moe_tp: int) -> None:
    means = load_file(oss.with_name("mxfp4-floats") / "model.safetensors")
    sizes = {"world_size": ranks, "parallel_config": {"moe_tp_size": moe_tp}}
    for model, rank in ((built(oss, rank, **sizes), rank) for rank in range(ranks)):
        for path, layer in layers_of(model):
            if isinstance(layer, Experts):
                native, part = cast(NativeExperts, layer.weights), layer.part
                gates, downs = means[f"{path}.gate_up_proj"].mT, means[f"{path}.down_proj"].mT
                assert native.w13.format.kind == "mxfp4"
                for slot, expert in enumerate(range(*layer.here.indices(8))):
                    assert torch.equal(native.dequantised(slot, "gate"), gates[expert, ::2][part])
                    assert torch.equal(native.dequantised(slot, "up"), gates[expert, 1::2][part])
                    assert torch.equal(native.dequantised(slot, "down"), downs[expert][:, part])
                    bias = means[f"{path}.down_proj_bias"][expert] * (rank % moe_tp == 0)
                    assert torch.equal(native.w2.biases[0][slot], bias)


def test_mxfp4_means_its_floats(tmp_path: Path, oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = logits(tmp_path, oss.with_name("mxfp4-floats"), model_name="gpt_oss")
    # Products with experts in 4 bits and all that are in 8 have activations of 8 bits.
    for quantization, most in (({"method": "none"}, 1e-4), ({}, 0.1), ({"rest": "q8"}, 0.1)):
        kept = logits(tmp_path, oss, model_name="gpt_oss", quantization=quantization)
        for ours, theirs in zip(kept, expected, strict=True):
            assert (ours - theirs).abs().mean() < most * theirs.abs().mean()
    assert "rounded again" not in capsys.readouterr().out
    logits(tmp_path, oss, model_name="gpt_oss", quantization={"method": "q4"})
    assert capsys.readouterr().out.count("MXFP4 is rounded again") == 1


@pytest.mark.parametrize(
    ("checkpoint", "rest", "kinds"),
    [
        ("mxfp4", "none", ("float32", "mxfp4", "float32")),
        ("mxfp4", "q8", ("q8", "mxfp4", "q8")),
        ("awq", "none", ("float32", "q4", "q8")),
        ("awq", "q8", ("q8", "q4", "q8")),
    ],
)
def test_what_a_checkpoint_leaves_in_floats_may_be_quantised(
    tmp_path: Path, model: Path, oss: Path, checkpoint: str, rest: str, kinds: tuple[str, str, str]
) -> None:
    """Attention, experts, head; never the router."""
    folder = oss
    if checkpoint == "awq":  # with attention in floats
        folder = tmp_path / "awq"
        floats = load_file(quantise_tiny(model, folder, "awq") / "model.safetensors")
        tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if ".self_attn." not in n}
        tensors |= {n: t for n, t in floats.items() if ".self_attn." in n}
        save_file(tensors, folder / "model.safetensors")
    quantised = cast(Any, built(folder, quantization={"rest": rest}))
    layer = quantised.model.layers[0]
    weights = layer.self_attn.qkv_proj.weight.packed, layer.mlp.experts.weights.w2, quantised.lm_head.weight.packed
    assert tuple(weight.format.kind for weight in weights) == kinds
    assert not (layer.mlp.router if checkpoint == "mxfp4" else layer.mlp.gate).weight.quantised


@pytest.mark.parametrize("method", ["none", "q8"])
def test_rest_needs_weights_that_are_kept(oss: Path, method: str) -> None:
    with pytest.raises(
        UserError, match=f"quantization.rest: q8 .*MXFP4 in blocks of 32; quantization.method: {method}"
    ):
        built(oss, quantization={"method": method, "rest": "q8"})


@pytest.mark.thorough
def test_loading_needs_little_more_than_it_keeps(tmp_path: Path) -> None:
    """0.7 GB of AWQ: memory maps are dropped while the checkpoint is read."""
    write(
        tmp_path / "awq",
        "awq",
        num_hidden_layers=18,
        num_experts=16,
        vocab_size=1024,
        num_attention_heads=4,
        num_experts_per_tok=2,
    )
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        _, kept, peak = child.submit(loaded, tmp_path / "awq").result()
    assert kept > 600e6
    assert peak < kept + 450e6


def edited(model: Path, folder: Path, format: str, edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """A broken checkpoint: `edit` changes its tensors and its quantization_config."""
    to = folder / "quantised"
    mxfp4_tiny(model.with_name("oss"), to) if format == "mxfp4" else quantise_tiny(model, to, format, 32)
    tensors, config = load_file(to / "model.safetensors"), json.loads((to / "config.json").read_text())
    edit(tensors, config["quantization_config"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return to


Q, OSS = "model.layers.1.mlp.experts.3.up_proj", "model.layers.1.mlp.experts.down_proj"


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    def edit(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors[name] = change(tensors[name])

    return edit


def bad_scale(value: float) -> Callable[[Tensor], Tensor]:
    return lambda scales: scales.clone().index_fill_(0, torch.tensor([1]), value)


@pytest.mark.parametrize(
    ("format", "edit", "complaint"),
    [
        ("awq", lambda t, c: t.pop(f"{Q}.scales"), rf"1 tensors missing: {Q}\.scales"),
        ("awq", put(f"{Q}.scales", bad_scale(float("nan"))), rf"{Q}\.scales: scales are not all finite"),
        ("awq", put(f"{Q}.qweight", lambda x: x.long()), rf"{Q}\.qweight has type I64, expected one of I32"),
        ("awq", lambda t, c: c.update(group_size=128), r"qzeros has shape \[8, 16\], expected \[2, 16\]"),
        ("awq", lambda t, c: c.update(quant_method="exl2"), r"quant_method: 'exl2' must be one of awq, gptq"),
        ("gptq", put(f"{Q}.g_idx", lambda x: x.flip(0)), rf"{Q}\.g_idx: inputs are not in the order of their groups"),
        ("gptq", lambda t, c: c.update(dynamic={"+:.*up_proj": {"bits": 8}}), r"qweight has shape \[32, 128\], exp"),
        ("desc_act", put(f"{Q}.g_idx", lambda x: x + 1), rf"{Q}\.g_idx: each group from 0 to 7 must have 32 inputs"),
        ("actorder", put(f"{Q}.weight_g_idx", lambda x: x - (x == 3).int()), rf"{Q}\.weight_g_idx: each group from 0"),
        ("actorder", lambda t, c: t.pop(f"{Q}.weight_g_idx"), rf"1 tensors missing: {Q}\.weight_g_idx"),
        ("actorder", lambda t, c: c.update(format="mxfp4-pack-quantized"), "format: 'mxfp4-pack-quantized' must be"),
        (
            "modelopt",
            lambda t, c: c.update(quant_algo="NVFP4_AWQ"),
            "quant_algo: 'NVFP4_AWQ' must be one of NVFP4, W4A16",
        ),
        ("modelopt", put(f"{Q}.weight_scale_2", lambda x: x / 0), rf"{Q}\.weight_scale_2: scales are not all finite"),
        ("modelopt", lambda t, c: c.update(ignore=["*" * 9]), "ignore: .*at most 4 '\\*' in each"),
        ("auto_round", lambda t, c: c.update(extra_config={"a{9}": {"bits": 8}}), "is too intricate"),
        ("auto_round", lambda t, c: c.update(packing_format="auto_round:llm_compressor"), "packing_format: '.*must be"),
        ("gptq", lambda t, c: c.update(sym=True), r"qzeros: sym is true, but zero points are not all 8"),
        ("gptq", lambda t, c: c.update(quant_method="awq", modules_to_not_convert=["gate"]), r"g_idx, GPTQ's"),
        ("pack-quantized", put(f"{Q}.weight_shape", lambda x: x + 1), rf"{Q}\.weight_shape: \[129, 257\] is not the"),
        ("pack-quantized", lambda t, c: c.update(ignore=["re:" + ".*" * 9]), "is too intricate"),
        (
            "pack-quantized",
            lambda t, c: (c.clear(), c.update(quant_method="awq", group_size=32)),
            r"weight_packed, compressed-tensors' pack-quantized",
        ),
        ("mxfp4", lambda t, c: t.pop(f"{OSS}_scales"), rf"1 tensors missing: {OSS}_scales"),
        (
            "mxfp4",
            put(f"{OSS}_scales", lambda x: x.index_fill(0, torch.tensor([1]), 255)),
            rf"{OSS}_scales: scales are not all finite",
        ),
        ("mxfp4", put(f"{OSS}_scales", lambda x: x.char()), rf"{OSS}_scales has type I8, expected one of U8"),
        (
            "mxfp4",
            put(f"{OSS}_blocks", lambda x: x[:, :, :-1]),
            rf"{OSS}_blocks has shape \[8, 64, 3, 16\], expected \[8, 64, 4, 16\]",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, model: Path, oss: Path, format: str, edit: Any, complaint: str) -> None:
    checkpoint = edited(oss if format == "mxfp4" else model, tmp_path, format, edit)
    with pytest.raises(UserError, match=complaint) as error:
        built(checkpoint)
    assert str(checkpoint) in str(error.value) or Q in str(error.value) or "layers.0" in str(error.value)


def test_ranks_that_would_cut_a_block_are_refused(oss: Path) -> None:
    with pytest.raises(UserError, match=r"experts\.down_proj: 128 quantised columns over 8 ranks are 16 on each"):
        built(oss, world_size=8, parallel_config={"moe_tp_size": 8})


@given(
    st.sampled_from(list(SCHEMES)),
    st.dictionaries(
        st.sampled_from(
            [
                "bits",
                "group_size",
                "version",
                "sym",
                "desc_act",
                "format",
                "config_groups",
                "ignore",
                "modules_to_not_convert",
                "weight_block_size",
                "dynamic",
                "zero_point",
                "lm_head",
                "packing_format",
                "extra_config",
            ]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
            max_leaves=6,
        ),
    ),
)
def test_any_config_is_read_or_refused(method: str, config: dict[str, Any]) -> None:
    with contextlib.suppress(UserError):
        settings = {"bits": 4, "group_size": 32, "packing_format": "auto_round"} | config
        scheme = SCHEMES[method](HfConfig(settings, "config.json"))
        assert scheme.encoding("model.layers.0.mlp.gate_proj") in (None, *scheme.encodings)
        for encoding in scheme.encodings:
            stored = encoding.stored("model.layers.0.mlp.gate_proj", 256, 256)
            assert all(prod(need.shape) <= 1 << 20 for need in stored.tensors.values())
