"""GGUF files as checkpoints: the same logits as the model that they were written from, and what is refused."""

import itertools
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn

from tests.families import ROWS
from tests.families.deepseek_v3 import GGUF_YARN
from tests.families.row import Row
from tests.fuzz.gguf import latent
from tests.gguf_models import mostly_q4_k, save_gguf
from tests.tiny import make_runner, save_tiny, save_tiny_of, tiny_case
from tests.variants import covering
from umbra import LLM
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.commands.inspect_checkpoint import inspect_checkpoint
from umbra.commands.logits import prefill_logits
from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.checkpoint.load import load_checkpoint
from umbra.executor.checkpoint.stop_ids import stop_ids
from umbra.executor.config.load import load_model_config, model_folder
from umbra.executor.plan.weight_formats import build_of
from umbra.executor.run.defaults import RUNNING, case_of_checkpoint
from umbra.models.gguf import folder as unpacked
from umbra.models.gguf.container import read_gguf
from umbra.models.gguf.metadata import config_of
from umbra.models.gguf.types import BY_NAME
from umbra.models.gguf.vocabulary import Vocabulary
from umbra.models.hf_config import HfConfig
from umbra.models.layers.base import layers_of
from umbra.models.layers.embedding import LMHead, VocabEmbedding
from umbra.models.layers.experts import Experts
from umbra.models.layers.latent_attention import KeysAndValues
from umbra.models.layers.linear import MergedLinear, RowLinear
from umbra.models.registry import family, model_class
from umbra.models.tokenizers import tokenizer_in
from umbra.ops import load_ops
from umbra.ops.cpu import engine
from umbra.ops.cpu.matrix import NativeExperts
from umbra.ops.parallel.join import parallel_of

SIZES: dict[str, Any] = dict(hidden_size=256, head_dim=32, num_attention_heads=8, num_key_value_heads=4)
SIZES |= dict(moe_intermediate_size=256, intermediate_size=256, num_hidden_layers=2, initializer_range=0.05)
FILES = [row for row in ROWS.values() if family(row.name).gguf]
PROMPTS = [[5, 17, 3, 88, 2, 41], [7], list(range(30, 53))]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacked, "FOLDERS", tmp_path / "unpacked")


def logits(folder: Path, checkpoint: Path, family: str, **sections: Any) -> list[Tensor]:
    runner = make_runner(tiny_case(folder, checkpoint, model_name=family, **sections), folder)
    return prefill_logits(runner, PROMPTS)


@pytest.mark.parametrize(("row", "variant"), [*((row, "tiny") for row in FILES), (ROWS["gemma4"], "shared")], ids=str)
def test_a_family_means_the_same(tmp_path: Path, row: Row, variant: str) -> None:
    """Within what the logarithm of a state's rates costs, and that of divisors in float32."""
    most = 1e-4 if row.name == "llama" else 1e-5 if any("linear_" in key for key in row.sizes) else 0
    row.save(tmp_path / "model", **row.gguf, **row.variant(variant))
    save_gguf(tmp_path / "model", tmp_path / "model.gguf", row.name)
    read, expected = (logits(tmp_path, tmp_path / name, row.name) for name in ("model.gguf", "model"))
    for ours, theirs in zip(read, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=most)


def mixed(name: str) -> str:
    """Another type for each matrix."""
    kinds = [kind for kind in BY_NAME if kind != "MXFP4"]
    return "F32" if "norm" in name or "gate_inp" in name else kinds[sum(name.encode()) % len(kinds)]


def test_every_type_is_read(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", **SIZES)
    means = save_gguf(tmp_path / "model", tmp_path / "model.gguf", "qwen3_moe", mixed)
    none = {"quantization": {"method": "none"}}
    read, expected = (logits(tmp_path, path, "qwen3_moe", **none) for path in (tmp_path / "model.gguf", means))
    for ours, theirs in zip(read, expected, strict=True):
        assert torch.equal(ours, theirs)


# Row; types of gates and ups, downs, attention and values; what the CPU keeps of experts, queries and keys, values.
@pytest.mark.parametrize(
    ("kinds", "ranks"),
    covering([(row, *kept) for row in FILES for kept in row.kept], [1, 2]),
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_every_bit_is_kept(tmp_path: Path, kinds: tuple[Row, str, str], ranks: int) -> None:
    row, types, kept = kinds
    wide, down, attention, values = types.split()

    def kind_of(name: str) -> str:
        if "_exps.weight" in name:
            return down if "down" in name else wide
        kind = values if any(word in name for word in ("attn_v", "k_b", "kv_a", "ssm_out", "output.")) else attention
        kind = kind if "attn_" in name or "ssm_out" in name or name in ("output.weight", "token_embd.weight") else "F32"
        return "F32" if any(word in name for word in ("norm", "sinks", "bias")) else kind

    row.save(tmp_path / "model", **{**SIZES, **row.gguf_wide})
    means = save_gguf(tmp_path / "model", tmp_path / "model.gguf", row.name, kind_of)
    for rank in range(ranks):
        read, expected = (built(tmp_path, path, row.name, rank, ranks) for path in (tmp_path / "model.gguf", means))
        for (path, ours), (_, theirs) in zip(layers_of(read), layers_of(expected), strict=True):
            if isinstance(ours, Experts):
                a, b = cast(NativeExperts, ours.weights), cast(NativeExperts, theirs.weights)
                assert [a.w13.format.kind, a.w2.format.kind] == kept.split()[:2]
                for expert, which in itertools.product(range(ours.experts), ("gate", "up", "down")):
                    assert torch.equal(a.dequantised(expert, which), b.dequantised(expert, which))
            elif isinstance(ours, KeysAndValues):
                for which in ("keys", "values"):
                    mine, other = (cast(Any, getattr(layer, which)) for layer in (ours, theirs))
                    assert mine.packed.format.kind == "q8"
                    rows = [torch.cat([m.packed.dequantised(h, m.rows) for h in range(m.count)]) for m in (mine, other)]
                    exact = row.name == "deepseek_v3"  # whose keys and values are Q8_0
                    torch.testing.assert_close(*rows, rtol=0, atol=0 if exact else float(rows[1].abs().max()) / 250)
            elif isinstance(ours, VocabEmbedding):
                ids = torch.arange(ours.part.start, ours.part.stop)
                tables = (cast(Any, layer).table for layer in (ours, theirs))
                assert torch.equal(*(load_ops("cpu").embedding(ids, table, int(ids[0])) for table in tables))
            elif isinstance(ours, RowLinear | MergedLinear) or (isinstance(ours, LMHead) and "float" not in kept):
                mine, other = (cast(Any, layer).weight.parts for layer in (ours, theirs))
                if path.endswith("qkv_proj"):
                    assert {part.packed.format.kind for part in mine} == set(kept.split()[2:])
                if path.endswith("out_proj"):
                    assert [part.packed.format.kind for part in mine] == kept.split()[3:]
                rows = [torch.cat([part.packed.dequantised(0, part.rows) for part in parts]) for parts in (mine, other)]
                assert torch.equal(*rows)


def built(folder: Path, checkpoint: Path, family: str, rank: int, ranks: int) -> nn.Module:
    """This rank's model with its weights, without the other ranks."""
    sizes = dict.fromkeys(("attn_tp_size", "moe_tp_size", "embed_tp_size"), ranks)
    case = tiny_case(folder, checkpoint, model_name=family, world_size=ranks, parallel_config=sizes)
    engine.start(1, "auto")
    build = build_of(case, load_ops("cpu"), parallel_of(case.parallel_sizes, rank, {}), torch.device("cpu"), True)
    model = cast(Any, model_class(family)(load_model_config(case), build))
    load_checkpoint(model, model_folder(case), read_scheme(model_folder(case)), model.ignores, progress=False)
    return cast(nn.Module, model)


DEMO = ROOT / "checkpoints" / "austen_moe"
TEXT = "def f(x):\n\treturn {'a': 12345.678}  # ünïcode 日本語\r\n\n   🙂 I'll can't <|im_end|>WE'RE <|im_start|>user\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    save_gguf(DEMO, path, "qwen3_moe", lambda name: "F32" if "norm" in name or "gate_inp" in name else "Q8_0")
    return path


def test_the_tokenizer_is_the_original(demo: Path) -> None:
    folder = unpacked.checkpoint_folder(demo)
    ours, theirs = tokenizer_in(folder), tokenizer_in(DEMO)
    for chat in (False, True):
        ids = ours.encode(TEXT, chat)
        assert ids == theirs.encode(TEXT, chat)
        assert ours.decode(ids) == theirs.decode(ids)
    assert stop_ids(folder, ()) == stop_ids(DEMO, ())


@pytest.mark.parametrize(
    "pre", ["gpt-4o", "llama-bpe", "qwen2", "qwen35", "tekken", "deepseek-v3", "deepseek-llm", "kimi-k2"]
)
def test_each_pre_splits_as_its_models(pre: str) -> None:
    tokens = [*"abc 123", "12", "<eos>", "<bos>", "[PAD0]"]
    tokens[3] = "\u0120"  # a space in the byte alphabet
    data: dict[str, Any] = {"pre": pre, "tokens": tokens, "token_type": [1] * 8 + [3, 3, 5], "merges": ["1 2"]}
    data |= {"bos_token_id": 9, "eos_token_id": 8}
    words = Vocabulary(HfConfig({f"tokenizer.ggml.{key}": value for key, value in data.items()}, "x.gguf"))
    backend = Backend.from_str(json.dumps(words.tokenizer()))
    ids = backend.encode("ab 123<eos>").ids
    digits = (
        [4, 5, 6] if pre in ("qwen2", "qwen35", "tekken", "deepseek-llm") else [7, 6]
    )  # one by one, or three together
    assert ids == [*([9] if pre in ("llama-bpe", "tekken") else []), 0, 1, 3, *digits, 8]


SPACE = "\u2581"
PIECES = ["a", "b", "c", SPACE, "é", "ab", "bc", "abc", f"{SPACE}a", f"{SPACE}ab", "bcab", "ca", "cab", f"{SPACE}é"]
SCORES = [-1.0, -2.0, -3.0, -4.0, -5.0, -9.0, -7.0, -8.0, -6.5, -10.0, -5.5, -7.0, -11.0, -2.0]


def pieces_of(text: str) -> list[str]:
    """Returns the tokens of SentencePiece: of neighbours that are a token together, those with the highest score are
    joined first, and the first of equals; what is no token is written in bytes."""
    parts, scores = list(SPACE + text.replace(" ", SPACE)), dict(zip(PIECES, SCORES, strict=True))
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]:
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [token for p in parts for token in ([p] if p in scores else [f"<0x{b:02X}>" for b in p.encode()])]


def test_a_tokenizer_with_merges_and_bytes() -> None:
    """Texts are split at line breaks, and a character that is no token is written in bytes."""
    letters = [*"abc\n", "\u2581", "ab", "\u2581ab", "\n\n", "c\n"]
    tokens = ["<unk>", "<bos>", "<|turn>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(letters)]
    merges = ["a b", "\u2581 ab", "\n \n", "c \n"]
    data: dict[str, Any] = {"model": "gemma4", "tokens": tokens, "token_type": kinds, "merges": merges}
    data |= {"bos_token_id": 1, "add_bos_token": True}
    words = Vocabulary(HfConfig({f"tokenizer.ggml.{key}": value for key, value in data.items()}, "x.gguf"))
    tokenizer = Backend.from_str(json.dumps(words.tokenizer()))
    text = "ab abc\n\n<|turn>\u00e9"
    expected = ["<bos>", "ab", "\u2581ab", "c", "\n\n", "<|turn>", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode(text).tokens == expected
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == f"<bos>{text}"


def test_sentence_piece_joins_by_scores() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<mark>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    scores = [0.0] * 259 + SCORES + [0.0]
    data: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores}
    data |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    words = Vocabulary(HfConfig({f"tokenizer.ggml.{key}": value for key, value in data.items()}, "x.gguf"))
    backend = Backend.from_str(json.dumps(words.tokenizer()))
    chance = random.Random(5)
    texts = [
        "",
        "abc",
        " é",
        "日\n",
        *("".join(chance.choices("abcé 日", k=chance.randint(1, 30))) for _ in range(200)),
    ]
    for text in texts:
        encoded = backend.encode(text)
        assert encoded.tokens == ["<s>", *(pieces_of(text) if text else [])], text
        assert backend.decode(encoded.ids) == text
    assert backend.encode("ab<mark>c").tokens == ["<s>", *pieces_of("ab"), "<mark>", *pieces_of("c")]
    assert words.generation(())["eos_token_id"] == [2]
    data["scores"] = scores[1:]
    wrong = Vocabulary(HfConfig({f"tokenizer.ggml.{key}": value for key, value in data.items()}, "x.gguf"))
    with pytest.raises(UserError, match=r"x.gguf: tokenizer.ggml.scores: .* must have a number for each of 274 tokens"):
        wrong.tokenizer()


def test_a_file_runs_as_it_is(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(demo, dtype="float32")
    (reply,) = llm.generate(["It was"], llm.default_sampling())
    assert reply.text
    assert "norm_topk_prob true" in capsys.readouterr().out
    inspect_checkpoint(demo, None, [], None)
    said = capsys.readouterr().out
    assert "500 modules in Q8_0: kept as they are on cpu" in said
    assert "complete: every tensor is known" in said


def info(data: bytes, tensor: str) -> int:
    """Returns the place of a matrix's type in the header, which precedes its offset."""
    return data.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor) + 4 + 2 * 8


def typed(tensor: str, kind: int) -> Callable[[bytes], bytes]:
    """The file with another type of the tensor."""
    return lambda data: data[: (at := info(data, tensor))] + struct.pack("<I", kind) + data[at + 4 :]


def swapped(data: bytes) -> bytes:
    one, other = (info(data, f"blk.0.attn_{x}.weight") + 4 for x in "kv")
    return data[:one] + data[other : other + 8] + data[one + 8 : other] + data[one : one + 8] + data[other + 8 :]


def renamed(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old.encode(), new.encode())


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lambda data: data[:-4096], r"tensor \S+ ends at byte \d+ of \d+"),
        (lambda data: data[:800], "the header ends within it"),
        (lambda data: data + bytes(64), "bytes, but the header tells of"),
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + b"\0\0\0\3" + data[8:], "its numbers are big-endian"),
        (swapped, r"tensor blk.0.attn_k.weight has offset \d+, where \d+ was expected"),
        (
            typed("blk.0.attn_q.weight", 41),
            r"\.gguf: tensor blk.0.attn_q.weight has type Q1_0, which is not read, only F",
        ),
        (typed("blk.0.attn_q.weight", 212), "has type 212, one of ik_llama.cpp's own"),
        (typed("blk.0.attn_q.weight", 12), "32 columns are no multiple of Q4_K's 256"),
        (typed("blk.0.attn_q.weight", 1), r"tensor \S+ has offset \d+, where \d+ was expected"),
        (renamed("blk.0.attn_q.weight", "blk.0.attn_x.weight"), "1 tensors missing: .*0.self_attn.q_proj.weight"),
        (renamed("blk.0.attn_q.weight", "blk.0.attn_k.weight"), "blk.0.attn_k.weight stands twice in the header"),
        (renamed("qwen3moe", "qwen9moe"), "general.architecture: 'qwen9moe' must be one of qwen3moe, "),
        (renamed("head_count_kv", "head_count_xx"), "num_key_value_heads|self_attn.k_proj.weight has shape"),
        (renamed("moe.expert_count", "moe.expert_xount"), "model.gguf: key 'qwen3moe.expert_count' is missing"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, edit: Callable[[bytes], bytes], complaint: str) -> None:
    save_tiny(tmp_path / "model")
    path = tmp_path / "model.gguf"
    save_gguf(tmp_path / "model", path, "qwen3_moe")
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(UserError, match=complaint) as error:
        logits(tmp_path, path, "qwen3_moe")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("length_mla", "length_mlx", r"v_b_proj.weight has shape \[8, 16, 48\], expected \[8, 72, 48\]"),
        ("attn_k_b", "attn_x_b", "2 tensors missing: model.layers.0.self_attn.kv_b_proj.weight"),
        ("rope.dimension_count", "rope.dimension_counx", "key 'deepseek2.rope.dimension_count' is missing"),
    ],
)
def test_latents_that_do_not_fit_are_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "model.gguf"
    save_tiny_of(tmp_path / "model", "deepseek_v3", **GGUF_YARN)
    save_gguf(tmp_path / "model", path, "deepseek_v3")
    path.write_bytes(renamed(old, new)(path.read_bytes()))
    with pytest.raises(UserError, match=complaint) as error:
        logits(tmp_path, path, "deepseek_v3")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("experts", "gating", "meant"),
    [(160, 1, ("deepseek_v2", 8, 3)), (256, 2, ("deepseek_v3", 8, 4)), (384, 2, ("deepseek_v3", 1, 1))],
)
def test_files_without_groups_of_experts_have_deepseeks(
    tmp_path: Path, experts: int, gating: int, meant: tuple[str, int, int]
) -> None:
    (tmp_path / "x.gguf").write_bytes(latent({"expert_count": experts, "expert_gating_func": gating}))
    config = config_of(read_gguf(tmp_path / "x.gguf"))
    assert (config["model_type"], config["n_group"], config["topk_group"]) == meant


def test_parts_are_one_checkpoint(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    save_gguf(tmp_path / "model", tmp_path / "model.gguf", "qwen3_moe", split=12)
    first, second, third = sorted(tmp_path.glob("model-*.gguf"))
    for number, part in enumerate((first, second, third)):  # as in the hub's cache
        part.rename(tmp_path / f"blob{number}")
        part.symlink_to(f"blob{number}")
    case, _ = case_of_checkpoint(first, RUNNING)
    assert (case.name, case.model_path) == ("model", str(first))
    read, expected = (logits(tmp_path, path, "qwen3_moe") for path in (first, tmp_path / "model"))
    assert all(map(torch.equal, read, expected))
    with pytest.raises(UserError, match=r"give the first of its parts, model-00001-of-00003.gguf"):
        logits(tmp_path, second, "qwen3_moe")
    second.write_bytes(third.read_bytes())
    with pytest.raises(UserError, match=r"split.no and split.count say part 2 of 3, the name says 1 of 3"):
        logits(tmp_path, first, "qwen3_moe")
    third.unlink()
    with pytest.raises(UserError, match=r"model-00003-of-00003.gguf: cannot be read: No such file"):
        logits(tmp_path, first, "qwen3_moe")


def test_mixed_types_mean_their_floats(tmp_path: Path) -> None:
    """Within what rounded activations cost; the same bits wherever experts are."""
    save_tiny(tmp_path / "model", **SIZES)
    means, path = save_gguf(tmp_path / "model", tmp_path / "m.gguf", "qwen3_moe", mostly_q4_k), tmp_path / "m.gguf"
    read, expected = logits(tmp_path, path, "qwen3_moe"), logits(tmp_path, means, "qwen3_moe")
    for ours, theirs in zip(read, expected, strict=True):
        assert ((ours - theirs).norm(dim=1) <= 0.03 * theirs.norm(dim=1)).all()
    offload = {"mode": "fixed", "slots": 5, "measure_s": 0.01, "stream_tokens": 20}
    for ours, theirs in zip(logits(tmp_path, path, "qwen3_moe", offload_config=offload), read, strict=True):
        assert torch.equal(ours, theirs)


def test_scales_must_be_finite(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", **SIZES)
    save_gguf(tmp_path / "model", tmp_path / "m.gguf", "qwen3_moe", mostly_q4_k)
    reader = GGUFReader(tmp_path / "m.gguf", "r+")
    for name in ("blk.0.ffn_up_exps.weight", "token_embd.weight"):
        (tensor,) = [tensor for tensor in reader.tensors if tensor.name == name]
        half, tensor.data.reshape(-1)[:2] = tensor.data.reshape(-1)[:2].copy(), (0, 0x7C)
        reader.data.flush()
        with pytest.raises(UserError, match=r"(up_proj|embed_tokens).weight: scales are not all finite numbers"):
            logits(tmp_path, tmp_path / "m.gguf", "qwen3_moe")
        tensor.data.reshape(-1)[:2] = half


@pytest.mark.parametrize(
    ("marks", "stops"),
    [
        ("<|im_end|> <|end|> <|x|>", "<e> <|im_end|> <|end|>"),
        ("<|end|> <|return|> <|call|>", "<e> <|return|> <|call|>"),  # harmony's end of a message, not of an answer
        ("<|user|> <|observation|>", "<e> <|user|>"),
    ],
)
def test_what_ends_an_answer_and_how_it_is_sampled(marks: str, stops: str) -> None:
    tokens = ["<e>", *marks.split()]
    data = {"ggml.pre": "qwen2", "ggml.tokens": tokens, "ggml.token_type": [3] * len(tokens), "ggml.eos_token_id": 0}
    data |= {"chat_template": "one", "chat_template.tool_use": "two"}
    metadata = {f"tokenizer.{key}": value for key, value in data.items()} | {"general.sampling.temp": 0.6000000238}
    words = Vocabulary(HfConfig(metadata | {"general.sampling.top_k": 20}, "x.gguf"))
    settings = words.generation(("<|user|>",))
    assert [tokens[id] for id in settings.pop("eos_token_id")] == stops.split()
    assert settings == {"temperature": 0.6, "top_k": 20}
    assert words.settings()["chat_template"][1] == {"name": "tool_use", "template": "two"}
