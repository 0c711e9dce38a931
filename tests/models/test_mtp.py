"""Layers that predict further tokens, compared with transformers: the same logits after prompts, in chunks and while
drafts are accepted and refused, and the same guesses going on from guesses."""

from pathlib import Path

import pytest

from tests.models.guesses import compare_guesses
from tests.mtp import Oracle
from tests.tiny import make_runner, save_tiny_of, tiny_case
from umbra.base.errors import UserError

FAMILIES = "glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5", "hy_v3"


@pytest.mark.parametrize("family", FAMILIES)
def test_guesses_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """After guesses of the layer those that the model chooses."""
    oracle = Oracle(tmp_path / "model", family)
    case = tiny_case(
        tmp_path,
        tmp_path / "model",
        model_name=family,
        data_config={"batch_size": 2, "chunked_prefill_size": 9},
        draft_config={"method": "mtp", "tokens": 3},
    )
    loop = make_runner(case, tmp_path).loop
    compare_guesses(loop, oracle.guesses, loop.engine.model.lm_head)


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    save_tiny_of(tmp_path / "model", "qwen2_moe")
    case = tiny_case(tmp_path, tmp_path / "model", model_name="qwen2_moe", draft_config={"method": "mtp"})
    with pytest.raises(UserError, match=r"draft_config.method: mtp: the model has no layers"):
        make_runner(case, tmp_path)
