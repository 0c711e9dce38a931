"""Tiny checkpoints written as GGUF by llama.cpp's own package: its names, keys and quantisation."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor

from umbra.executor.checkpoint.index import renamed
from umbra.models.registry import family as family_record
from umbra.tools.benchmarks.gguf_file import describe_tokenizer

ARCHITECTURES = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
HALVES: dict[str, Any] = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
HALVES |= {"IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,)}
HALVES |= dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,))
PUBLISHED = {"max_position_embeddings": "model_max_length", "num_experts_per_tok": "num_experts_per_token"}
PUBLISHED |= {"n_shared_experts": "num_shared_experts", "norm_topk_prob": "moe_renormalize"}
SIZES = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
AS_GLM = {"mlp.router.gate": "mlp.gate", "mlp.expert_bias": "mlp.gate.e_score_correction_bias"}  # Hy3's names
AS_GLM |= {"mlp.shared_mlp": "mlp.shared_experts", "final_layernorm": "shared_head.norm"}
EXPERT = re.compile(r"(.*\.experts\.)\d+\.(.*)")
Kinds = Callable[[str], str]  # the type of the tensor of this name


def mostly_q4_k(name: str) -> str:
    """The types of a file that is called Q4_K_M: another one for values and downs in half of the layers."""
    if any(word in name for word in ("norm", "gate_inp")):
        return "F32"
    return "Q6_K" if name == "output.weight" or re.match(r"blk\.0\.(attn_v|ffn_down)", name) else "Q4_K"


def stacked(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with those of all experts in one and the gates apart from the ups."""
    stacks: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        tensor = tensors[name]
        if match := EXPERT.fullmatch(name):
            stacks.setdefault(match[1] + match[2], []).append(tensor)
        elif ".experts.gate_up_proj" in name:
            rows = tensor if name.endswith("bias") else tensor.mT
            for first, which in enumerate(("gate", "up")):
                yield re.sub("gate_up_proj(_bias)?", _named(which), name), rows[:, first::2]
        elif ".experts.down_proj" in name:
            yield re.sub("down_proj(_bias)?", _named("down"), name), tensor if name.endswith("bias") else tensor.mT
        else:
            yield name, tensor
    yield from ((name, torch.stack(experts)) for name, experts in stacks.items())


def delta_net(tensors: dict[str, Tensor], config: dict[str, Any], family: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model with gated DeltaNet layers as llama.cpp's converter has them."""
    keys, heads, depth, width = (config[f"linear_{key}"] for key in SIZES)

    def tiled(values: Tensor, size: int, first: int = 0) -> Tensor:
        """The value heads behind `first` rows in the order in which they share the key heads."""
        if family == "qwen3_next":
            return values
        order = torch.arange(heads).view(keys, -1).T.flatten()
        return torch.cat([values[:first], values[first:].unflatten(0, (heads, size))[order].flatten(0, 1)])

    for name, tensor in tensors.items():
        _, _, last = name.partition(".linear_attn.")
        if last == "in_proj_qkvz.weight" and ".0." not in name:  # older files have it as it is, in groups of a key head
            *qkv, z = tensor.unflatten(0, (keys, -1)).split([depth, depth, *[heads // keys * width] * 2], 1)
            yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in qkv])
            yield name.replace("qkvz", "z"), z.flatten(0, 1)
        elif last in ("in_proj_qkv.weight", "conv1d.weight"):
            yield name, tiled(tensor.squeeze(1) if "conv" in last else tensor, width, 2 * keys * depth)
        elif last == "in_proj_z.weight":
            yield name, tiled(tensor, width)
        elif last == "out_proj.weight":
            yield name, tiled(tensor.T, width).T
        elif last in ("in_proj_b.weight", "in_proj_a.weight"):
            yield name, tiled(tensor, 1)
        elif last == "A_log":
            yield name, -tiled(tensor, 1).exp()
        elif ".layers.0.mlp.experts." in name and "down" not in name and family == "qwen3_5_moe":  # one tensor of both
            if "gate" in name:
                yield name.replace("gate", "gate_up"), torch.cat([tensor, tensors[name.replace("gate", "up")]])
        elif last == "dt_bias":
            yield name.replace("dt_bias", "dt_proj.bias"), tiled(tensor, 1)
        else:
            yield name, tensor + (name.endswith("norm.weight") and last != "norm.weight")


def paired(tensors: dict[str, Tensor], config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors with those rows of queries and keys beside each other that rotate together."""
    half = config["head_dim"] // 2
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = tensor.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)
        yield name, tensor


def divisors(config: dict[str, Any]) -> Any:
    """Returns those of the frequencies of Llama 3's rotary embedding, as llama.cpp's converter makes them."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    low, high, factor = (rope[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim) / (2 * np.pi)
    fast = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (fast + (1 - fast) / factor)).astype(np.float32)


def latent(tensors: dict[str, Tensor], config: dict[str, Any], family: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model with latents: keys and values together, as older files have them, in DeepSeek-V2."""
    for name, tensor in tensors.items():
        if "kv_b_proj" in name and family != "deepseek_v2":
            sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
            key, value = tensor.unflatten(0, (-1, sum(sizes))).split(sizes, 1)
            yield name.replace("kv_b", "k_b"), key.mT
            yield name.replace("kv_b", "v_b"), value
        else:
            yield name, tensor


def channel_delta_net(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of layers whose channels have decays of their own as llama.cpp's converter has them."""
    for name, tensor in tensors.items():
        if "_conv1d" in name:
            yield name, tensor[None].transpose(1, 2)
        elif name.endswith("A_log"):
            yield name, -tensor.exp()
        else:
            yield name.replace("dt_bias", "dt_proj.bias"), tensor


def _named(which: str) -> Callable[[re.Match[str]], str]:
    return lambda match: f"{which}_proj.{'bias' if match[1] else 'weight'}"


def save_gguf(folder: Path, path: Path, family: str, kinds: Kinds = lambda name: "F32", split: int = 0) -> Path:
    """Writes the checkpoint in `folder`, with its tokenizer if it has one, to `path`, and what its values mean in
    floats to another file, which is returned. A part has at most `split` tensors, if that is not 0."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = config.get("text_config", config)
    record = family_record(family)
    assert record.gguf
    arch = ARCHITECTURES.get(record.gguf.name, MODEL_ARCH.GLM4_MOE)  # Hy3's tensors have the names of GLM's
    means = path.with_name(f"means-{path.name}")
    depth = config["num_hidden_layers"]
    tensors = {as_last_layer(name, depth): tensor for name, tensor in tensors.items()}
    predicting = f"model.layers.{depth}.eh_proj.weight" in tensors
    if family == "hy_v3":
        tensors = {renamed(name, AS_GLM.items()): tensor for name, tensor in tensors.items()}
    if "linear_num_key_heads" in config:
        tensors = dict(delta_net(tensors, config, family))
    if "linear_attn_config" in config:
        config |= {name: config[of] for name, of in PUBLISHED.items()}
        tensors = dict(channel_delta_net(tensors))
    if "kv_lora_rank" in config:
        tensors = dict(latent(tensors, config, family))
    if family in ("llama", "ministral3"):
        tensors = dict(paired(tensors, config))
    names, further = (get_tensor_name_map(of, depth + 1) for of in (arch, MODEL_ARCH.GLM4_MOE))
    writers = [GGUFWriter(file, record.gguf.name, split_max_tensors=split) for file in (path, means)]
    for writer in writers:
        describe(writer, config, family, predicting)
        if (folder / "tokenizer.json").is_file():
            describe_tokenizer(writer, folder)
    own = {name: tensor for name, tensor in tensors.items() if family == "gemma4" and gemma_name(name)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    for theirs, tensor in (*own.items(), *stacked(rest)):
        ours = (
            gemma_name(theirs)
            if theirs in own
            else names.get_name(theirs, try_suffixes=(".weight", ".bias")) or further.get_name(theirs, (".weight",))
        )
        if ours is None:
            ours = names.get_name(f"{theirs.replace('_correction_bias', '_correction')}.bias", (".bias",))
        assert ours, theirs
        ours = f"{ours}.weight" if ours.endswith("attn_sinks") else ours
        values = tensor.float().contiguous().numpy()
        values = values[0] if ours.endswith("gate_inp_shexp.weight") else values
        kind = GGMLQuantizationType[kinds(ours)]
        data = in_type(values, kind)
        writers[0].add_tensor(ours, data, raw_dtype=kind)
        mean = dequantize(data, kind).reshape(values.shape)
        if kind == GGMLQuantizationType.NVFP4:  # with a factor for each matrix
            factors = np.arange(5, 5 + (len(values) if values.ndim == 3 else 1), dtype=np.float32) / 8
            writers[0].add_tensor(ours.replace(".weight", ".scale"), factors)
            mean = mean * factors.reshape(-1, *[1] * (values.ndim - 1))
        writers[1].add_tensor(ours, mean)
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return means


def in_type(values: Any, kind: GGMLQuantizationType, scale: float = 1e-4) -> Any:
    """The rows quantised; to random levels with the same scale everywhere where the package only reads the type."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        columns, nbytes = GGML_QUANT_SIZES[kind]
        shape = *values.shape[:-1], values.shape[-1] // columns, nbytes
        blocks = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        if kind == GGMLQuantizationType.NVFP4:
            blocks[..., :4] &= 31
        if kind == GGMLQuantizationType.IQ1_M:  # d has four bits in each of four numbers
            nibbles = np.float16(scale).view(np.uint16) >> np.array((0, 4, 8, 12), np.uint16) & 15
            blocks[..., 49::2] = blocks[..., 49::2] & 15 | nibbles.astype(np.uint8) << 4
        for at in HALVES.get(kind.name, ()):
            blocks[..., at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return blocks.reshape(*shape[:-2], -1)


def as_last_layer(name: str, depth: int) -> str:
    """The name of a tensor of a hybrid's layer that predicts further tokens as in other families."""
    own = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
    if not name.startswith("mtp."):
        return name
    module = name.removeprefix("mtp.").removesuffix(".weight")
    return f"model.layers.{depth}.{own.get(module, module.removeprefix('layers.0.'))}.weight"


GEMMA = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def gemma_name(name: str) -> str:
    """The name of a tensor of Gemma 4 that the package's table lacks, or has for other layouts; empty: it has it."""
    _, _, rest = name.partition(".layers.")
    layer, _, last = rest.partition(".")
    return f"blk.{layer}.{GEMMA[last]}" if last in GEMMA else ""


def describe_gemma(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """The attention of both kinds of layers, and what bounds the logits."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    kv_heads = {True: config["num_key_value_heads"], False: config["num_key_value_heads"]}
    if config["attention_k_eq_v"]:
        kv_heads[False] = config["num_global_key_value_heads"]
    width, swa = config["global_head_dim"], config["head_dim"]
    writer.add_head_count_kv([kv_heads[own] for own in slides])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_key_length_swa(swa)
    writer.add_value_length_swa(swa)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count_swa(swa)
    turning = width // 8
    writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + [1e30] * (width // 2 - turning), np.float32))


def describe(writer: GGUFWriter, config: dict[str, Any], family: str, predicts: bool) -> None:
    """`predicts`: the layer that predicts further tokens is among the tensors; it is read by none that lacks it."""
    rope, head_dim = config.get("rope_parameters") or config, config.get("head_dim") or _even_heads(config)
    if family == "gemma4":
        rope, head_dim = rope["full_attention"], config["global_head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    predicting = int(predicts or family in ("glm4_moe", "glm4_moe_lite", "qwen3_5_moe", "qwen3_5"))
    writer.add_block_count(config["num_hidden_layers"] + predicting)
    writer.add_embedding_length(config["hidden_size"])
    inner, shared = config.get("intermediate_size", 1), config.get("num_kv_shared_layers", 0)
    widths = [inner] * (config["num_hidden_layers"] - shared) + [2 * inner] * shared
    writer.add_feed_forward_length(widths if shared else inner)
    writer.add_head_count(config["num_attention_heads"])
    if "kv_lora_rank" in config:
        describe_latents(writer, config, family)
    elif family == "gemma4":
        describe_gemma(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    share = {"glm4_moe": 0.5, "minimax_m2": 0.5, "qwen3_next": 0.25, "qwen3_5_moe": 0.25, "qwen3_5": 0.25}.get(
        family, 1
    )
    writer.add_rope_dimension_count(config.get("qk_rope_head_dim") or int(share * head_dim))
    experts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if count := next((count for count in experts if count), 0):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if predicting:
        writer.add_nextn_predict_layers(predicting)
    if predicting > predicts:
        writer.add_tensor(f"blk.{config['num_hidden_layers']}.nextn.eh_proj.weight", np.zeros((2, 32), np.float32))
    if "n_shared_experts" in config:
        writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 1))
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config["norm_topk_prob"] or family == "glm4_moe":
            writer.add_expert_weights_norm(config["norm_topk_prob"])
    elif family == "hy_v3":
        writer.add_expert_shared_feed_forward_length(config["num_shared_experts"] * config["moe_intermediate_size"])
        writer.add_expert_weights_scale(config["router_scaling_factor"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    elif "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    elif family == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(config))
    elif "factor" in rope:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "ministral3":
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if "linear_num_key_heads" in config:
        keys, heads, depth, width = (config[f"linear_{key}"] for key in SIZES)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(depth)
        writer.add_ssm_group_count(keys)
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_inner_size(heads * width)
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if family in ("qwen3_5_moe", "qwen3_5"):
        writer.add_rope_dimension_sections([2, 1, 1, 0])


def _even_heads(config: dict[str, Any]) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def describe_latents(writer: GGUFWriter, config: dict[str, Any], family: str) -> None:
    """As older files do for DeepSeek-V2, and as the first files did for GLM-4.7-Flash, without the kind of gating."""
    turning, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    widths = config["qk_nope_head_dim"] + turning, config["v_head_dim"]
    if family == "deepseek_v2":
        writer.add_head_count_kv(config["num_attention_heads"])
        writer.add_key_length(widths[0])
        writer.add_value_length(widths[1])
    else:
        writer.add_head_count_kv(1 if family != "kimi_linear" else kv_heads(config))
        writer.add_key_length(latent + turning)
        writer.add_value_length(latent)
        writer.add_key_length_mla(widths[0])
        writer.add_value_length_mla(widths[1])
    if family == "glm4_moe_lite":
        writer.add_tokenizer_pre("glm4")
    if family in ("deepseek_v3", "kimi_linear"):
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_kv_lora_rank(latent)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if family == "kimi_linear":
        writer.add_ssm_conv_kernel(config["linear_attn_config"]["short_conv_kernel_size"])
        writer.add_kda_head_dim(config["linear_attn_config"]["head_dim"])
        return
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if "mscale_all_dim" in config["rope_parameters"]:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def kv_heads(config: dict[str, Any]) -> list[int]:
    """None for layers with states."""
    full = config["linear_attn_config"]["full_attn_layers"]
    return [int(number in full) for number in range(1, config["num_hidden_layers"] + 1)]
