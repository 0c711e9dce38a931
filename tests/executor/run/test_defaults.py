"""The settings that are chosen for a checkpoint without a case, and what must be there before a rank is started."""

import json
from pathlib import Path

import pytest

from tests.command import umbra
from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.load import load_case, make_case
from umbra.executor.config.units import GB
from umbra.executor.plan.host_memory import check_host_memory
from umbra.executor.plan.sketch import sketch_of, weights_of
from umbra.executor.run.defaults import RUNNING, SERVING, case_of_checkpoint, open_case
from umbra.models.tokenizers import tokenizer_in

DEMO = ROOT / "checkpoints/austen_moe"


def folder(path: Path, positions: int, **more: int) -> Path:
    path.mkdir(exist_ok=True)
    config = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": positions} | more
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("positions", "settings", "prompt", "new"),
    [
        (2, {}, 1, 1),
        (601, {}, 301, 300),
        (5000, {}, 3976, 1024),
        (90_000, {}, 31_744, 1024),
        (5000, {"max_model_len": 100}, 50, 50),
        (5000, {"input_max_len": 70, "max_new_tokens": 8}, 70, 8),
    ],
)
def test_a_context_that_the_model_has(
    tmp_path: Path, positions: int, settings: dict[str, object], prompt: int, new: int
) -> None:
    case, _ = case_of_checkpoint(folder(tmp_path / "model", positions), SERVING, (), settings)
    assert (case.data_config.input_max_len, case.data_config.max_new_tokens) == (prompt, new)
    assert (case.exe_mode, case.data_config.batch_size) == ("graph", 8)


@pytest.mark.parametrize(
    ("gigabytes", "method", "sequences", "context"),
    [
        (100, "auto", 8, 32_768),
        (3, "auto", 8, 16_384),
        (1.7, "auto", 4, 8192),
        (1.2, "q8", 2, 8192),
        (0.9, "q4", 1, 4096),
        (0.01, "q4", 1, 256),
    ],
)
def test_settings_follow_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: float, method: str, sequences: int, context: int
) -> None:
    """The model has 0.5 GB of weights and 8 kB of KV cache a token."""
    model = folder(tmp_path / "model", 40_960, num_hidden_layers=16, num_experts=64, moe_intermediate_size=640)
    monkeypatch.setattr("umbra.executor.run.defaults.free_memory", lambda: int(gigabytes * GB))
    case, keys = case_of_checkpoint(model, SERVING)
    data = case.data_config
    assert (case.quantization.method, data.batch_size, case.max_sequence_length) == (method, sequences, context)
    assert make_case(keys, case.name, "").data_config == data  # what `umbra init` writes


def test_mxfp4_is_counted_as_it_is_and_never_quantised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gpt_oss", "num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 24}))
    monkeypatch.setattr("umbra.executor.run.defaults.free_memory", lambda: GB)
    case, _ = case_of_checkpoint(tmp_path, SERVING)
    assert case.quantization.method == "auto"
    # 16 pages of all tokens and 16 of windows, each 16 tokens of keys and values in 12 layers: 384 kB
    assert (case.max_sequence_length, "(12 MB of KV cache)" in capsys.readouterr().out) == (256, True)
    sizes = {part.name: part.nbytes for part in weights_of(sketch_of(case).model)}
    weights, biases = 24 * 32 * 3 * 2880 * 2880, 24 * 32 * 3 * 2880
    assert (sizes["experts"], sizes["experts' scales and biases"]) == (weights // 2, weights // 32 + 4 * biases)
    q, kv = 64 * 64, 8 * 64
    in_attention = 2880 * (2 * q + 2 * kv) + q + 2 * kv + 2880
    assert sizes["attention"] == pytest.approx(24 * 2 * (in_attention + 64), rel=1e-3)
    assert sizes["head"] == 2 * 201088 * 2880
    with pytest.raises(UserError, match="this model needs a larger machine, or more of them"):
        check_host_memory(case, 1000, sketch_of(case))


def test_init_writes_a_case_that_serves(tmp_path: Path) -> None:
    out = tmp_path / "mine.yaml"
    done = umbra("init", str(DEMO.with_name("austen_hybrid")), "--out", str(out), "--max-num-seqs", "3")
    assert (
        done.returncode,
        "for speculative decoding, which may be faster: --set draft_config.method=mtp" in done.stdout,
    ) == (0, True)
    assert load_case(str(out)).data_config.batch_size == 3
    again = umbra("init", str(DEMO), "--out", str(out))
    assert (again.returncode, "is there already" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("said", "sampling", "expected"),
    [
        ({"do_sample": True, "top_k": 20, "top_p": 0.8, "min_p": 0.1}, {}, (1.0, 20, 0.8, 0.1, 1.0)),
        (
            {"temperature": 0.6, "top_k": -1, "repetition_penalty": 1.1},
            {"temperature": 0.9},
            (0.9, None, 1.0, 0.0, 1.1),
        ),
        ({"do_sample": False, "temperature": 0.6, "top_k": 5}, {}, (0.0, None, 1.0, 0.0, 1.0)),
        ({"do_sample": True, "temperature": 0.6}, {"generation_config": "none"}, (0.0, None, 1.0, 0.0, 1.0)),
    ],
)
def test_sampling_follows_the_checkpoint_below_the_case(
    tmp_path: Path, said: dict[str, object], sampling: dict[str, object], expected: tuple[object, ...]
) -> None:
    (folder(tmp_path / "model", 600) / "generation_config.json").write_text(json.dumps(said))
    (tmp_path / "mine.yaml").write_text(
        json.dumps({"model_path": str(tmp_path / "model"), "sampling_config": sampling})
    )
    for case in (
        open_case(str(tmp_path / "mine.yaml"), SERVING),
        open_case(str(tmp_path / "model"), SERVING, (), sampling),
    ):
        followed = case.sampling_config
        assert (
            followed.temperature,
            followed.top_k,
            followed.top_p,
            followed.min_p,
            followed.repetition_penalty,
        ) == expected


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"temperature": "hot"}, r"generation_config\.json: temperature: 'hot' is not a number"),
        ({"top_p": 7}, r"generation_config\.json: top_p: 7\.0 must be at most 1"),
        ({"temperature": 1e-9}, r"generation_config\.json: sampling_config\.temperature: 1e-09 must be 0 or at least"),
    ],
)
def test_wrong_sampling_of_a_checkpoint_is_named(tmp_path: Path, said: dict[str, object], complaint: str) -> None:
    (folder(tmp_path / "model", 600) / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(UserError, match=complaint):
        open_case(str(tmp_path / "model"), SERVING)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, r"config\.json does not exist: give the folder of a checkpoint"),
        ({"adapter_config.json": "{}"}, "holds a LoRA adapter, not a model: merge it"),
        ({"model.gguf": "GGUF"}, "give one of its GGUF files by its path: model.gguf"),
        ({"config.json": '{"model_type": "bert"}'}, "model_type: 'bert' is not supported, only qwen3_moe"),
        ({"config.json": POINTER}, "config.json is a Git LFS pointer, not the file: run `git lfs pull` in "),
        ({"config.json": "", "model.safetensors": POINTER}, "model.safetensors is a Git LFS pointer"),
    ],
)
def test_a_folder_that_is_no_checkpoint_says_what_to_do(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text or (DEMO / name).read_text())
    with pytest.raises(UserError, match=complaint):
        open_case(str(tmp_path), SERVING)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, r"has no tokenizer\.json: copy it from the checkpoint"),
        ({"tokenizer.model": "x"}, r"has no tokenizer\.json \(tokenizer\.model alone is not read\)"),
        ({"tokenizer.json": POINTER}, r"tokenizer\.json is a Git LFS pointer"),
    ],
)
def test_a_tokenizer_that_is_missing_says_what_to_do(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=complaint):
        tokenizer_in(tmp_path)


def test_a_chat_template_of_the_user_s(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    tokenizer = tokenizer_in(DEMO, template=str(tmp_path / "own.jinja"))
    assert tokenizer.decode(tokenizer.encode("Hello", chat=True)) == "<Hello>"
    model, given = folder(tmp_path / "model", 600), [f"chat_template={tmp_path / 'own.jinja'}"]
    for settings, mode in ((given, "chat"), ([], "default")):
        assert open_case(str(model), RUNNING, settings).model_config.tokenizer_mode == mode
    with pytest.raises(UserError, match=r"chat_template: /dev/zero is larger than 1 MB"):
        tokenizer_in(DEMO, template="/dev/zero")
    with pytest.raises(UserError, match=r"model_config\.chat_template: nowhere cannot be read: No such file"):
        tokenizer_in(DEMO, template="nowhere")
