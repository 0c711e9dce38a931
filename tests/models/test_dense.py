"""Dense decoders in the layouts of published files: Mistral's models that also see pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.drafts import Told, lookup
from tests.tiny import make_runner, oracle_logits, save_tiny_of, tiny_case
from umbra.base.errors import UserError
from umbra.commands.inspect_checkpoint import inspect_checkpoint
from umbra.commands.logits import collect_logits
from umbra.executor.engine.schedule.request import Request, SamplingParams
from umbra.executor.engine.step.loop import Loop
from umbra.models.registry import family_in

LENGTHS = 1, 6, 7, 8, 31
IDS = [[(7 * i + 31 * length) % 95 + 1 for i in range(length)] for length in LENGTHS]
NAMES = {
    "official": ("language_model.model.", "language_model.lm_head."),
    "transformers": ("model.language_model.", "lm_head."),
}


def in_a_wrapper(folder: Path, layout: str) -> None:
    """Makes of the checkpoint in `folder` one that also sees pictures."""
    decoder, head = NAMES[layout]
    tensors = {
        name.replace("model.", decoder, 1) if name.startswith("model.") else name.replace("lm_head.", head): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    seeing = "model." * (layout == "transformers")
    tensors |= {f"{seeing}{name}.weight": torch.ones(3) for name in ("vision_tower.ln_pre", "multi_modal_projector.x")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole | {"vision_config": {"model_type": "pixtral"}}))


@pytest.mark.parametrize(("family", "layout"), [("ministral3", "official"), ("mistral", "transformers")])
def test_what_reads_text_is_found_in_a_model_that_sees_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, layout: str
) -> None:
    """In chunks of any size, which end within and between windows and lengths at which queries grow."""
    oracle = save_tiny_of(tmp_path / "model", family)
    in_a_wrapper(tmp_path / "model", layout)
    assert family_in(tmp_path / "model") == family

    def logits_in(chunk: int, **sections: Any) -> dict[str, np.ndarray]:
        sizes = {"batch_size": len(IDS), "chunked_prefill_size": chunk}
        case = tiny_case(tmp_path, tmp_path / "model", model_name=family, data_config=sizes, **sections)
        return collect_logits(make_runner(case, tmp_path), IDS, 3)

    ours = logits_in(1024)
    for i in range(len(IDS)):
        expected = oracle_logits(oracle, ours[f"ids_{i}"].tolist()).numpy()
        assert expected.std() > 0.5
        np.testing.assert_allclose(np.concatenate([ours[f"prefill_{i}"], ours[f"decode_{i}"]]), expected, atol=1e-4)
    for name, logits in logits_in(7, exe_mode="graph").items():
        np.testing.assert_allclose(logits, ours[name], atol=1e-5)
    inspect_checkpoint(tmp_path / "model", None, [], None)
    assert "warning" not in capsys.readouterr().out


def test_a_wrapper_of_another_decoder_is_refused(tmp_path: Path) -> None:
    save_tiny_of(tmp_path / "model", "mistral")
    in_a_wrapper(tmp_path / "model", "official")
    path = tmp_path / "model/config.json"
    path.write_text(path.read_text().replace('"mistral"', '"gemma"'))
    with pytest.raises(UserError, match=r"model_type: 'mistral3' is not supported, only qwen3_moe, "):
        family_in(tmp_path / "model")


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "ministral", "ministral3"])
def test_prefixes_and_drafts_change_no_token(tmp_path: Path, family: str) -> None:
    """A conversation that goes on twice computes only what is new, and drafts are verified over what was cached; with
    and without windows."""
    save_tiny_of(tmp_path / "model", family, eos_token_id=None, max_position_embeddings=256)
    windows = {"sliding_window": 16} if family == "mistral" else {}
    if windows:
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | windows))

    texts: list[list[int]] = []

    def answers(serving: bool, drafts: int) -> tuple[list[int], list[int]]:
        case = tiny_case(
            tmp_path,
            tmp_path / "model",
            model_name=family,
            exe_mode="graph",
            draft_config=lookup(drafts),
            data_config={"batch_size": 4, "input_max_len": 200, "max_new_tokens": 24},
            cache_config={"page_size": 16},
        )
        engine = make_runner(case, tmp_path).engine
        loop = Loop(engine, frozenset(), serving=serving)
        loop.scheduler.drafts = Told(drafts, texts) if drafts else loop.scheduler.drafts
        ids, cached = [(11 * i) % 95 + 1 for i in range(40)], list[int]()
        for _ in range(3):
            sequence = loop.submit(Request(tuple(ids), SamplingParams(max_tokens=24)))
            while not loop.idle:
                loop.step()
            cached.append(sequence.cached_tokens)
            texts.append(sequence.ids.tolist())
            ids = [*texts[-1], 5, 17, 3]
        assert (drafts > 0) == (0 < loop.timings.accepted_tokens < loop.timings.drafted_tokens)
        return texts[-1], cached

    expected, cached = answers(serving=False, drafts=0)
    assert cached == [0, 0, 0]
    for drafts in (0, 3):
        assert answers(serving=True, drafts=drafts) == (expected, [0, 48, 80])
