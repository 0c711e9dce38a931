"""What a rank's model is built with: formats, caches and arenas, from made-up cases and layers."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpu_offload.manager import Settings
from errors import UserError
from executor.config.case import OffloadSettings, QuantizationSettings
from executor.config.units import MB
from executor.engine import building, shadows
from executor.engine.building import (
    bind_arena,
    bind_caches,
    build_of,
    formats_of,
    frame_of,
    init_parallel,
    packed_facts,
)
from executor.engine.shadows import expert_frames, frames_of, make_arena, make_offload, open_arena
from executor.parallel.partitions import ParallelSizes
from ops import load_ops
from ops.format import FORMATS, Format

OPS, CPU = load_ops("reference"), torch.device("cpu")
PAGE, HEADS, WIDTH = 4, 2, 3


def case_of(
    platform: str = "cpu", kv_dtype: str = "auto", mode: str = "none", arena_mb: float | None = None, longest: int = 17,
    **quantised: Any,
) -> Any:  # fmt: skip
    return SimpleNamespace(
        name="made", platform=platform, max_sequence_length=longest, parallel_sizes=ParallelSizes(4, 2),
        quantization=QuantizationSettings(**quantised), model_config=SimpleNamespace(dtype="bfloat16"),
        cache_config=SimpleNamespace(page_size=PAGE, kv_dtype=kv_dtype),
        offload_config=OffloadSettings(mode=mode, start_layer=2, arena_mb=arena_mb, interval=3, timeout_s=9),
    )  # fmt: skip


def scheme_of(*stored: Format | None, kept: Format | None = None) -> Any:
    """A checkpoint with matrices of these formats; `kept` is that of each module."""
    return SimpleNamespace(encodings=[SimpleNamespace(format=one) for one in stored], kept=lambda module: kept)


PLAIN, TILED, HEAD = FORMATS["bfloat16"], Format("bfloat16", tiled=True), FORMATS["q8"]
Q4_128, F8 = Format("q4", 128, True), Format("f8", 128)


@pytest.mark.parametrize(
    ("case", "stored", "quantised_head", "wanted"),
    [
        (case_of(), [], True, (PLAIN, TILED, TILED)),
        (case_of(method="none"), [Q4_128], True, (PLAIN, TILED, TILED)),
        (case_of(), [None, Q4_128, F8], True, (PLAIN, Q4_128, HEAD)),
        (case_of(), [Q4_128], False, (PLAIN, Q4_128, TILED)),
        (case_of(method="q4", group_size=64), [Q4_128], True, (PLAIN, Q4_128, HEAD)),
        (case_of(method="q8", group_size=64), [Q4_128], True, (PLAIN, Format("q8", 64, False), HEAD)),
        (case_of(method="q4", group_size=32, zero_points=True), [], False, (PLAIN, Format("q4", 32, True), TILED)),
        (case_of("ascend"), [F8], False, (PLAIN, TILED, TILED)),  # no op of it multiplies with them
        (case_of("ascend"), [F8, Q4_128], False, (PLAIN, Q4_128, TILED)),
    ],
)
def test_weights_keep_the_formats_of_their_checkpoint_where_they_can(
    case: Any, stored: list[Format | None], quantised_head: bool, wanted: tuple[Format, ...]
) -> None:
    found = formats_of(case, scheme_of(*stored), quantised_head)
    assert (found.plain, found.linear, found.head) == wanted
    assert (found.own is None) == (found.linear not in stored)


@pytest.mark.parametrize(
    ("platform", "kept", "own"),
    [("cpu", F8, F8), ("ascend", F8, None), ("ascend", Q4_128, Q4_128), ("cpu", None, None)],
)
def test_modules_keep_formats_of_their_own(platform: str, kept: Format | None, own: Format | None) -> None:
    found = formats_of(case_of(platform), scheme_of(Q4_128, kept=kept), False)
    assert found.own
    assert found.own("model.layers.0") == own


def test_a_build_has_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "model_folder", lambda case: f"folder of {case.name}")
    monkeypatch.setattr(building, "read_scheme", lambda folder: f"scheme in {folder}")
    monkeypatch.setattr(building, "formats_of", lambda *given: given)
    case, given = case_of(), tuple[Any, ...](["ops", "parallel", CPU, True, "offload", "exchange"])
    build: Any = build_of(case, *given)
    assert build.formats == (case, "scheme in folder of made", True)
    assert (build.ops, build.parallel, build.device, build.offload, build.exchange) == (*given[:3], *given[4:])
    assert (build.dtype, build.max_positions, build.path) == (torch.bfloat16, 17, "")
    least: Any = build_of(case, *given[:4])
    assert (least.offload, least.exchange) == (None, None)


def test_a_rank_joins_only_as_many_as_the_case_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "join", lambda *given: given)
    case: Any = SimpleNamespace(
        name="made", world_size=4, parallel_sizes="sizes", parallel_config=SimpleNamespace(comm_timeout_s=77)
    )
    platform: Any = SimpleNamespace(collectives="gloo", group_options="options")
    ranks: Any = SimpleNamespace(world_size=4, rank=3)
    joined: Any = init_parallel(case, ranks, platform)
    assert joined == ("sizes", 3, 77, "gloo", "options")
    for wrong in (3, 5):
        ranks.world_size = wrong
        with pytest.raises(UserError, match=f"case made: world_size: 4, but this process is one of {wrong}: start"):
            init_parallel(case, ranks, platform)


def test_packed_weights_depend_on_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "native", SimpleNamespace(order=lambda: "rows"))
    assert packed_facts(case_of(method="q4")) == {
        "dtype": "bfloat16",
        "parallel": dataclasses.asdict(ParallelSizes(4, 2)),
        "quantization": dataclasses.asdict(QuantizationSettings(method="q4")),
        "shadows": None,
        "order": "rows",
    }
    assert packed_facts(case_of(mode="elastic"))["shadows"] == 2


class Layer:
    def __init__(self, kv_heads: int = HEADS) -> None:
        self.kv_heads, self.head_dim = kv_heads, WIDTH
        self.caches: list[torch.Tensor] = []

    def bind(self, *caches: torch.Tensor) -> None:
        self.caches = [*caches]


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    made = [Layer(), Layer(), Layer()]
    monkeypatch.setattr(building, "attentions", lambda model: made)
    return made


MODEL: Any = None
BUILD: Any = SimpleNamespace(ops=OPS, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize(("kv_dtype", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_each_layer_has_a_cache_with_a_page_for_padding(layers: list[Layer], kv_dtype: str, dtype: torch.dtype) -> None:
    bind_caches(MODEL, case_of(kv_dtype=kv_dtype), BUILD, 5)
    for layer in layers:
        assert [(cache.shape, cache.dtype) for cache in layer.caches] == [((6, PAGE, HEADS, WIDTH), dtype)] * 2
    assert len({cache.data_ptr() for layer in layers for cache in layer.caches}) == 6


def test_a_frame_has_the_keys_and_values_of_all_layers(layers: list[Layer]) -> None:
    case = case_of(kv_dtype="float32")
    unit = PAGE * HEADS * WIDTH * 4
    assert frame_of(MODEL, case, BUILD) == (6, 6 * unit)
    arena = bind_arena(MODEL, case, BUILD, 4)
    assert arena.shape == (24, PAGE, HEADS, WIDTH)
    for number, layer in enumerate(layers):
        for which, cache in enumerate(layer.caches):
            assert cache.data_ptr() == arena.data_ptr() + (2 * number + which) * unit
            assert len(cache) == 3 * 6 + 1  # so that the last frame's page can be found
            assert cache._base is None
    assert [len(bind_arena(MODEL, case, BUILD, 4, spare)) for spare in (0, 1, unit, unit + 1)] == [24, 25, 25, 26]


def test_caches_of_different_shapes_share_no_arena(layers: list[Layer]) -> None:
    layers.append(Layer(kv_heads=HEADS + 1))
    with pytest.raises(UserError, match=r"case made: caches of different \(heads, width\) cannot share an arena"):
        frame_of(MODEL, case_of(), BUILD)


def test_experts_take_whole_extents() -> None:
    assert [expert_frames(100, 100, count) for count in (0, 1, 5)] == [0, 1, 5]
    assert [expert_frames(1000, 1500, count) for count in (1, 2, 3, 5)] == [3, 3, 6, 9]  # two in three frames


def test_an_open_arena_has_room_for_all_and_a_page_of_padding() -> None:
    assert frames_of(case_of(), 1000, 9, 5) == 9 + 5 + 1
    assert frames_of(case_of(arena_mb=2), 1000, 9, 5) == 2 * MB // 1000
    assert frames_of(case_of(arena_mb=0.5), 4096, 9, 5) == MB // 2 // 4096


def test_an_arena_must_hold_one_sequence_beside_experts_that_stay() -> None:
    """A sequence of 17 tokens has five pages, and one page more is for padding."""
    arena, pinned = make_arena(case_of(mode="fixed"), 6, 1024, 1500, 5, 5, 128)
    assert pinned == expert_frames(1024, 1536, 5) == expert_frames(1024, 1500, 5)
    assert (arena.frames, arena.frame_bytes, arena.units, arena.slot_bytes) == (pinned + 6, 1024, 6, 1536)
    with pytest.raises(UserError, match=rf"case made: offload_config\.arena_mb: {pinned + 5} pages of 1024 bytes, of "):
        make_arena(case_of(mode="fixed"), 6, 1024, 1500, 5, 4, 128)
    arena, pinned = make_arena(case_of(mode="elastic"), 6, 1024, 1500, 5, 4, 128)  # experts give way
    assert (arena.frames, pinned) == (expert_frames(1024, 1500, 5) + 5, 0)
    with pytest.raises(UserError, match="of which experts keep 0, have no room for one sequence of 5 pages: raise it"):
        make_arena(case_of(mode="elastic"), 6, 1024, 1500, 0, 4, 128)
    for longest, least in ((16, 4), (17, 5)):
        with pytest.raises(UserError, match=f"have no room for one sequence of {least} pages"):
            make_arena(case_of(mode="elastic", longest=longest), 6, 1024, 1500, 0, least - 1, 128)
        assert make_arena(case_of(mode="elastic", longest=longest), 6, 1024, 1500, 0, least, 128)[1] == 0


def test_shadow_experts_are_made_as_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "shadow_teams", lambda threads: f"teams of {threads}")
    monkeypatch.setattr(shadows, "ShadowPool", lambda *given: given)
    choices: Any = SimpleNamespace(
        slots=SimpleNamespace(value=40), max_swaps=SimpleNamespace(value=6), threads=SimpleNamespace(value=(7, 2)),
        stream_tokens=SimpleNamespace(value=128),
    )  # fmt: skip
    platform: Any = SimpleNamespace(shadow_device=lambda *given: given)
    config: Any = SimpleNamespace(experts_per_token=8)
    offload: Any = make_offload(case_of(mode="fixed"), choices, platform, config)
    assert offload.settings == Settings("fixed", start_layer=2, slots=40, interval=3, max_swaps=6)
    assert offload.device == (8, 128)
    assert offload.pool == ("teams of 2", 9)


def test_pages_and_experts_share_one_buffer(layers: list[Layer], capsys: pytest.CaptureFixture[str]) -> None:
    """Of 24 units, 6 to a frame; the device wants 5 bytes behind them."""
    case, opened, spared = case_of(mode="elastic", kv_dtype="float32", longest=8), list[Any](), list[int]()

    def spare(slot_bytes: int) -> int:
        spared.append(slot_bytes)
        return 5

    offload: Any = SimpleNamespace(
        slot_bytes=576, most_slots=1, make_room="make_room", slots={(0, 0): 0},
        layers=[SimpleNamespace(count=3), SimpleNamespace(count=4)], open=lambda *given: opened.extend(given),
        device=SimpleNamespace(alignment=32, spare=spare, staging_bytes=2_500_000),
    )  # fmt: skip
    pages: Any = open_arena(case, BUILD, MODEL, offload, 2)
    arena, memory, gather = opened
    assert (arena.frames, arena.frame_bytes, arena.units, arena.slot_bytes) == (1 + 2 + 1, 576, 6, 576)
    assert spared == [576]
    assert (memory.dtype, memory.nbytes) == (torch.uint8, 25 * 96)
    assert memory.data_ptr() == layers[0].caches[0].data_ptr()
    assert (pages.page_size, pages.make_room, gather) == (PAGE, "make_room", pages.gather)
    assert pages.pages == 4 - 1  # experts give way
    memory.copy_(torch.arange(25).repeat_interleave(96))
    pages.copy(6, 18)
    assert memory.view(25, 96)[:, 0].tolist() == [*range(18), *range(6, 12), 24]
    assert capsys.readouterr().out == (
        "arena: 0.0 MB, 4 frames of 576 bytes; 1 of 7 experts resident, 3 frames free; "
        "2.5 MB beside it for experts that are streamed\n"
    )
