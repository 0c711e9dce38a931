"""Names and patterns of modules: those of published configs match what they mean, and no pattern takes long."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.checkpoint.formats.patterns import inside, pattern, target
from umbra.errors import UserError

PATHS = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.o_proj",
    "model.layers.61.block_sparse_moe.gate",
    "model.layers.61.block_sparse_moe.experts.255.w1",
    "model.layers.61.mlp.experts.17.gate_proj",
]
TAKEN = [
    (r".*lm_head", {0}),
    (r".*block_sparse_moe.gate$", {3}),
    (r".*\.gate\b", {3}),
    (r".*self_attn\.(q|k|v|o)_proj$", {1, 2}),
    (r".*(gate|e_score).*", {3, 5}),
    (r"(?:lm_head|model\.layers\.\d+\.(self_attn|mlp)\.).*", {0, 1, 2, 5}),
    (r".*block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$", {4}),
    (r"model\.layers\.[0-9]\..*", {1, 2}),
    (r"lm_head|.*w\d", {0, 4}),
]


@pytest.mark.parametrize(("text", "matches"), TAKEN)
def test_patterns_of_published_configs(text: str, matches: set[int]) -> None:
    assert {i for i, path in enumerate(PATHS) if target(f"re:{text}", "here")(path)} == matches


REFUSED = [
    "(a+)+$", "(a|b)*", "(a|b)+", "(a|b)?", "(a|b){9}", ".**", "(?=a)", "(?!a)", "(?P<n>a)", r"(a)\1", "(a", "a)", "(",
    "x" * 201, ".*" * 5, "(.*a|.*b)(.*c|.*d)(.*.*.*)", "(a|b)" * 6, "|".join("a" * 40), "(" * 60 + ")" * 60 + "|" * 40,
    r"\(a|b\)", "[(a|b)]", "a{1000}", "a\n", "[z-a]",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_could_take_long_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match="here: pattern ") as raised:
        pattern(text, "here")
    assert len(str(raised.value)) < 250


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="ab.*+?()|[]\\dwb$^:-{2}", max_size=60))
def test_any_pattern_is_refused_or_means_the_same_as_to_re(text: str) -> None:
    start = time.process_time()
    try:
        matches = pattern(text, "here")
    except UserError:
        return
    for path in ("a" * 60, "ab." * 20, "model.layers.0.b"):
        assert bool(matches(path)) == bool(re.match(text, path))
    assert time.process_time() - start < 2


def test_names_are_whole_parts_of_a_path() -> None:
    gate = inside(["gate", "model.layers.0."])
    assert gate("model.layers.7.block_sparse_moe.gate")
    assert gate("model.layers.0.self_attn.q_proj")
    for other in ("gate_proj", "agate", "gate2.x", "model.layers.00.x", "model.layers.10"):
        assert not gate(f"model.layers.7.mlp.{other}")
    assert not inside([])("lm_head")
