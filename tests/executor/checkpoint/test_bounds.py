"""The bounds of a checkpoint's files to the value, what a load makes of their headers, and random weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.checkpoint import header, load, random
from executor.checkpoint.formats.bitpack import covering, groups_of
from executor.checkpoint.formats.patterns import inside, pattern, target, vagueness
from executor.checkpoint.formats.scheme import Needed, Stored, plain
from executor.checkpoint.header import check_header
from executor.checkpoint.index import in_model, read_index
from executor.checkpoint.load import contradictions, ignorable, problems_of, stored_as, wanted_by
from ops.format import Quantised
from text import tokenizer_file
from text.tokenizer_file import check_tokenizer
from umbra.errors import UserError


def piece(name: str, shape: tuple[int, ...], kept: int | None = None, **more: Any) -> Any:
    number = int(torch.tensor(shape).prod())
    facts = {"linear": True, "router": False, "kept_elements": number if kept is None else kept}
    return SimpleNamespace(**{"name": name, "shape": shape, "kept_shape": shape, **facts, **more})


def layers(monkeypatch: pytest.MonkeyPatch, module: Any, *found: Any) -> None:
    """Each of `found` is a layer's pieces."""
    made = [
        (
            f"layer{i}",
            SimpleNamespace(pieces=lambda path, given=given: given, elements=sum(p.kept_elements for p in given)),
        )
        for i, given in enumerate(found)
    ]
    monkeypatch.setattr(module, "layers_of", lambda model: made)


def test_random_weights_come_from_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: dict[str, torch.Tensor] = {}

    def one(name: str, *shape: int) -> Any:
        return piece(name, shape, fill=lambda numbers: filled.setdefault(name, numbers))

    size, seeds = 13, list[int]()
    numbers = torch.randn(size)

    def randn(count: int, generator: torch.Generator) -> torch.Tensor:
        assert count == (1 << 22) - 3  # no factor in common with the length of a row
        seeds.append(generator.initial_seed())
        return numbers

    monkeypatch.setattr(random.torch, "randn", randn)
    block = numbers * 0.02
    layers(monkeypatch, random, [one("row", 6), one("matrix", 3, 4)], [one("large", 2, 9), one("tiny", 2)])
    random.random_weights(torch.nn.Module(), 5)
    assert seeds == [5]
    assert list(filled) == ["large", "matrix", "row", "tiny"]  # the largest first
    again, end = torch.cat([block] * 4), 18
    assert torch.equal(filled["large"].flatten(), again[:end])
    assert torch.equal(filled["matrix"], again[end : end + 12].view(3, 4))
    assert torch.equal(filled["row"], 1 + again[end + 12 : end + 18])
    layers(monkeypatch, random, [piece("tied", (9, 9), fill=None), one("after", 4)])
    filled.clear()
    random.random_weights(torch.nn.Module(), 5)
    assert torch.equal(filled["after"], 1 + block[:4])


def test_the_pieces_of_a_weight_are_kept_together(monkeypatch: pytest.MonkeyPatch) -> None:
    first, tied, other = piece("a.weight", (2, 2)), piece("a.weight", (2, 2)), piece("b.weight", (3,))
    layers(monkeypatch, load, [first, other], [tied])
    model = torch.nn.Module()
    assert wanted_by(model) == {"a.weight": [first, tied], "b.weight": [other]}
    broken = [("place", SimpleNamespace(pieces=lambda path: [first], elements=5))]
    monkeypatch.setattr(load, "layers_of", lambda model: broken)
    with pytest.raises(AssertionError, match="the pieces of place do not fill it exactly"):
        wanted_by(model)


def test_only_matrices_are_stored_as_the_scheme_says() -> None:
    asked: Any = []
    encoding = SimpleNamespace(stored=lambda *given: (asked.append(given), "encoded")[1])
    scheme: Any = SimpleNamespace(encoding=lambda module: encoding if module == "a" else None)
    assert stored_as([piece("a.weight", (4, 6)), "ignored"], scheme) == "encoded"  # type: ignore[list-item,comparison-overlap]
    assert asked == [("a", 4, 6)]
    assert list(stored_as([piece("b.weight", (4, 6))], scheme).tensors) == ["b.weight"]
    assert stored_as([piece("a.weight", (4,), linear=False)], scheme).tensors["a.weight"].shape == (4,)


def test_routers_in_floats_contradict_nothing() -> None:
    wanted: Any = {
        f"{name}.weight": [piece(f"{name}.weight", (2, 2), router="gate" in name, linear="norm" not in name)]
        for name in ("z", "gate", "gate_said", "right", "norm")
    }
    scheme: Any = SimpleNamespace(
        contradicts=lambda module: module != "right", encoding=lambda module: "said" in module
    )
    assert contradictions(wanted, scheme) == ["gate_said", "z"]


def part_of(stored_names: int, part: Any) -> Any:
    asked: Any = []

    def read(files: Any, *slices: slice) -> Any:
        asked.append(slices)
        return part

    stored: Any = SimpleNamespace(tensors=dict.fromkeys("ab"[:stored_names]), read=read)
    of = piece("w", (8, 10), part=(slice(2, 4), slice(None)))
    files: Any = SimpleNamespace(folder="folder")
    found = load._part(files, stored, of)
    assert asked == [(slice(2, 4), slice(0, 10))]
    return found


def test_scales_must_be_finite() -> None:
    good, bad = torch.ones(2, 2), torch.tensor([[1.0, float("nan")]])
    assert part_of(2, good) is good
    assert part_of(1, bad) is bad  # a plain tensor's own values are only warned of
    with pytest.raises(UserError, match=r"^folder: a, b: scales are not all finite numbers$"):
        part_of(2, bad)
    levels = torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(UserError, match="scales are not all finite"):
        part_of(2, Quantised(bits=8, levels=levels, scales=bad, zeros=None))
    assert part_of(2, Quantised(bits=8, levels=levels, scales=good, zeros=None)).scales is good


def test_what_is_finite() -> None:
    large = torch.tensor([3e38, 3e38])  # whose sum is not
    assert load._finite(large)
    assert load._finite(torch.ones(3))
    assert not load._finite(torch.tensor([1.0, float("inf")]))
    assert not load._finite(torch.tensor([float("nan")]))
    for number, finite in ((0x7E, True), (0x7F, False), (0xFE, True), (0xFF, False), (0x80, True)):
        levels = torch.tensor([[0, number]], dtype=torch.uint8)
        floats: Any = Quantised(bits=8, levels=levels.view(torch.float8_e4m3fn), scales=torch.ones(1, 1), zeros=None)
        assert load._finite(floats) == finite
        integers = Quantised(bits=8, levels=levels, scales=torch.ones(1, 1), zeros=None)
        assert load._finite(integers)


def test_tensors_that_no_weight_is_read_from() -> None:
    names = ["a.rotary_emb.inv_freq", "a.k_scale", "a.v_scale", "b", "c", "rotary_emb.inv_freq.x"]
    assert ignorable(names, lambda name: name == "b") == {*names[:3], "b"}


def test_problems_are_named_with_the_likeliest_cause_first() -> None:
    there: Any = {
        "a.weight": ((2, 3), "F32"), "b.qweight": ((2, 2), "I32"), "b.extra": ((1,), "F16"),
        "c.weight": ((9,), "I8"), "d.weight_scale": ((1,), "F32"), "d.weight": ((1,), "F32"),
    }  # fmt: skip
    files: Any = SimpleNamespace(place=there, header=there.__getitem__)
    stored: Any = {
        "a.weight": Stored({"a.weight": Needed((2, 3)), "a.bias": Needed((3,), optional=True)}, None),  # type: ignore[arg-type]
        "b.weight": plain("b.weight", (2, 2)),
        "e.weight": Stored({"e.first": Needed((1,)), "b.extra": Needed((2,))}, None),  # type: ignore[arg-type]
        "c.weight": plain("c.weight", (8,)),
        "d.weight": Stored({"d.weight_packed": Needed((1,))}, None),  # type: ignore[arg-type]
    }
    scheme: Any = SimpleNamespace(title="some format")
    found = dict(problems_of(files, stored, scheme, lambda name: False))
    assert found == {
        "weights that are not stored as the config says (some format)": [
            "b.qweight, AWQ's or GPTQ's",
            "d.weight, unquantised",
            "d.weight_scale, compressed-tensors' int-quantized or float-quantized",
        ],
        "tensors missing": ["b.weight", "d.weight_packed", "e.first"],
        "tensors that the model does not know": ["b.qweight", "d.weight", "d.weight_scale"],
        "tensors that do not fit": [
            "b.extra has shape [1], expected [2]",
            "c.weight has shape [9], expected [8]",
            "c.weight has type I8, expected one of BF16, F16, F32",
        ],
    }
    right: Any = SimpleNamespace(place={"a.weight": there["a.weight"]}, header=there.__getitem__)
    assert problems_of(right, {"a.weight": stored["a.weight"]}, scheme, lambda name: False) == []


def weights(path: Path, entries: dict[str, Any], size: int) -> Path:
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_headers_that_fill_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    good = {
        "__metadata__": {"a": "b"}, "b": entry("F4", [2, 1, 1, 1, 1, 1, 1, 1], 24, 25), "a": entry("F64", [3], 0, 24),
        "c": entry("F6_E2M3", [4], 25, 28), "empty": entry("BF16", [0, 5], 25, 25),
    }  # fmt: skip
    assert check_header(weights(file, good, 28)) == ["b", "a", "c", "empty"]
    length = len(json.dumps(good))
    monkeypatch.setattr(header, "LARGEST_FILE", length)
    assert check_header(file)
    monkeypatch.setattr(header, "LARGEST_FILE", length - 1)
    with pytest.raises(UserError, match=rf"its header should have {length} bytes, .* {length - 1} are allowed$"):
        check_header(file)
    monkeypatch.undo()
    for size, error in ((27, "ends at byte 28 of 27$"), (29, "29 bytes of tensors, but the header tells of 28$")):
        with pytest.raises(UserError, match=rf"^{file}: truncated or corrupt: .*{error}"):
            check_header(weights(file, good, size))
    nine = entry("I8", [1] * 9, 0, 1)
    for wrong in (nine, entry("I8", [2], 0, 1), entry("I8", [-1], 0, 1), entry("I8", [1 << 63], 0, 1)):
        with pytest.raises(UserError, match=r"truncated or corrupt: tensor a has "):
            check_header(weights(file, {"a": wrong}, 1))
    with pytest.raises(UserError, match="begins at byte 1, where 0 was expected"):
        check_header(weights(file, {"a": entry("I8", [1], 1, 2)}, 2))
    with pytest.raises(UserError, match="begins at byte 0, where 1 was expected"):
        check_header(weights(file, {"a": entry("I8", [1], 0, 1), "b": entry("I8", [1], 0, 1)}, 1))


def test_an_index_names_files_beside_it(tmp_path: Path) -> None:
    def read(*names: Any) -> dict[str, str]:
        (tmp_path / "index").write_text(json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}))
        return read_index(tmp_path / "index")

    longest = "x" * (255 - len(".safetensors")) + ".safetensors"
    assert read("a.safetensors", longest) == {"0": "a.safetensors", "1": longest}
    for wrong in (f"x{longest}", "../a.safetensors", "a.bin"):
        with pytest.raises(UserError, match=r"is not the name of a \.safetensors file in the same folder$"):
            read("a.safetensors", wrong)
    for odd in ((), (3,)):
        with pytest.raises(UserError, match=r"weight_map must map tensor names to file names$"):
            read(*odd)


def test_names_of_the_model(tmp_path: Path) -> None:
    aliases = {"mixer": "mlp", "w1": "gate"}
    assert in_model(["a.mixer.w1", "b.w1x"], aliases, tmp_path) == {"a.mlp.gate": "a.mixer.w1", "b.w1x": "b.w1x"}
    assert in_model(["a.mixer"], {}, tmp_path) == {"a.mixer": "a.mixer"}
    with pytest.raises(UserError, match=r": a\.mixer and a\.mlp are two names of one tensor of the model$"):
        in_model(["a.mixer", "a.mlp"], aliases, tmp_path)


def tokenizer(folder: Path, **parts: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    check_tokenizer(folder)


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "content": content, "pattern": pattern}


def adds(*ids: int) -> dict[str, Any]:
    return {"single": [{"SpecialToken": {"id": "s"}}], "special_tokens": {"s": {"ids": list(ids)}}}


GROWS = "would make texts more than 32 times as long"


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"normalizer": replace("x" * 31, Regex="a")}, {"normalizer": replace("x" * 32, Regex="a")}, GROWS),
        ({"decoder": replace("x" * 64, String="ab")}, {"decoder": replace("x" * 65, String="ab")}, GROWS),
        (
            {"normalizer": {"normalizers": [replace("x" * 8, String="a"), replace("x" * 4, String="a")]}},
            {"normalizer": {"normalizers": [replace("x" * 8, String="a"), replace("x" * 5, String="a")]}},
            GROWS,
        ),
        ({"pre_tokenizer": {"prepend": "x" * 64}}, {"pre_tokenizer": {"prepend": "x" * 65}}, GROWS),
        (
            {"post_processor": {"processors": [adds(*range(40)), adds(*range(24))]}},
            {"post_processor": {"processors": [adds(*range(40)), adds(*range(25))]}},
            "post_processor: adds 65 ids to each text, more than 64",
        ),
        ({"model": {"unk_token": "x" * 64}}, {"model": {"unk_token": "x" * 65}}, "model.unk_token: longer than 64"),
        (
            {"model": {"end_of_word_suffix": "x" * 64}},
            {"model": {"end_of_word_suffix": "x" * 65}},
            "model.end_of_word_suffix: longer than 64 characters",
        ),
        ({"decoder": {"type": "Other"}}, {"decoder": {"type": "Precompiled"}}, "decoder: Precompiled is not supported"),
    ],
)
def test_what_a_tokenizer_may_do(tmp_path: Path, good: dict[str, Any], bad: dict[str, Any], error: str) -> None:
    tokenizer(tmp_path, **good)
    with pytest.raises(UserError) as caught:
        tokenizer(tmp_path, **bad)
    assert str(caught.value).startswith(f"{tmp_path}/tokenizer.json: tokenizer not readable: ")
    assert error in str(caught.value)


def test_how_large_a_tokenizer_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}  ")
    (tmp_path / "chat_template.jinja").write_text("12345")
    (tmp_path / "other.json").write_text("1" * 99)
    for name, most in (("LARGEST", 4), ("LARGEST_BESIDE", 5)):
        monkeypatch.setattr(tokenizer_file, name, most)
        check_tokenizer(tmp_path)
        monkeypatch.setattr(tokenizer_file, name, most - 1)
        with pytest.raises(UserError, match=r"tokenizer not readable: larger than 0 MB$"):
            check_tokenizer(tmp_path)
        monkeypatch.setattr(tokenizer_file, name, most)


def test_names_and_patterns_of_modules() -> None:
    matches = inside(["layers.1", ".mlp.gate."])
    assert [matches(m) for m in ("layers.1", "a.layers.1.b", "layers.10", "a.mlp.gate", "mlp", "gate.mlp")] == [
        True, True, False, True, False, False,
    ]  # fmt: skip
    linear, path, expression = target("Linear", "w"), target("a.b", "w"), target("re:a.*b", "w")
    assert [bool(matches("a.b")) for matches in (linear, path, expression)] == [True] * 3
    assert [bool(matches("a.b.c")) for matches in (linear, path, expression)] == [True, False, True]
    assert [vagueness(text) for text in ("a.b", "re:Linear", "Linear")] == [0, 1, 2]
    with pytest.raises(UserError, match=r"^w: pattern '\[z-a\]': "):
        pattern("[z-a]", "w")


def test_rows_in_words_and_columns_in_groups() -> None:
    assert covering(slice(8, 24), 8) == (slice(1, 3), slice(0, 16))
    assert covering(slice(5, 17), 8) == (slice(0, 3), slice(5, 17))
    held, cut = groups_of(slice(64, 128), 32)
    assert held == slice(2, 4)
    scales = torch.arange(4.0).view(2, 2)
    assert cut(scales) is scales
    held, cut = groups_of(slice(48, 112), 32)
    assert held == slice(1, 4)
    assert cut(torch.tensor([[1.0, 2.0, 3.0]])).tolist() == [[1, 2, 2, 3]]  # in groups of 16
