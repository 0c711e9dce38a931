"""Experts in slots of an arena: the layout of a block, the kernel's tiling data, and the kernel in the twin."""

import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes.ascend_c import Counts, Library, TwinError, host
from tests.fakes.ascend_c.launch import launch
from tests.ops.vector_core.test_host import FIELDS, laid
from tests.ops.vector_core.test_kernels import BFLOAT, BOUND, HALF, worst_row
from tests.ops.vector_core.weights import Mutation, distinct, random_weight, unnoticed
from tests.variants import thorough_but
from umbra.ops.ascend.vector_core import reference
from umbra.ops.ascend.vector_core.blocks import PLACE, BlockLayout, expert_slot
from umbra.ops.ascend.vector_core.planes import planes_of
from umbra.ops.ascend.vector_core.signatures import InPlanes
from umbra.ops.formats import Format
from umbra.ops.interface import SILU_EXPERTS

pytestmark = pytest.mark.slow

INT, FLOAT, BYTE = torch.int32, torch.float32, torch.uint8
OP = "UmbraFusedMoeSlotsW4a16"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("in_planes", [False, True])
def test_planes_begin_at_multiples_of_512_bytes(in_planes: bool) -> None:
    layout = BlockLayout(inner=96, hidden=160, dtype=BFLOAT, group=32, group2=32, zeros=True, in_planes=in_planes)
    if in_planes:  # 160 * 96, 192 * 8 * 2, the same, 96 * 80, 160 * 8 * 2, the same
        shapes: dict[str, tuple[int, ...]] = dict(w13=(2, 192, 40), s13=(1, 192, 8), w2=(1, 160, 48), z2=(1, 160, 8))
        assert layout.offsets == dict(w13=0, s13=15360, z13=18432, w2=21504, s2=29184, z2=31744)
        assert layout.block_bytes == 34304
    else:  # 160 * 96, 5 * 192 * 2, the same, 96 * 80, 3 * 160 * 2, the same
        shapes = dict(w13=(160, 24), s13=(5, 192), w2=(96, 20), z2=(3, 160))
        assert layout.offsets == dict(w13=0, s13=15360, z13=17408, w2=19456, s2=27136, z2=28160)
        assert layout.block_bytes == 29184
    block = torch.arange(layout.block_bytes // 2).to(torch.int16).view(BYTE)
    views = layout.views(block)
    assert {name: tuple(views[name].shape) for name in shapes} == shapes
    assert (views["w13"].dtype, views["s13"].dtype) == (BYTE if in_planes else INT, BFLOAT)
    begins = {name: 2 * int(view.view(torch.int16).flatten()[0]) for name, view in views.items()}
    assert begins == layout.offsets
    views["s2"].fill_(0)
    assert not block[layout.offsets["s2"] :][: views["s2"].nbytes].any()  # in place


def test_a_slot_is_counted_as_the_vector_cores_read_it() -> None:
    assert expert_slot(96, 160, Format("q4", 32, zeros=True), SILU_EXPERTS, BFLOAT) == (
        34304,
        PLACE,
    )  # as above, in planes
    rows = BlockLayout(4128, 160, BFLOAT, 32, 32)
    assert expert_slot(4128, 160, Format("q4", 32), SILU_EXPERTS, BFLOAT) == (
        rows.block_bytes,
        PLACE,
    )  # more than w2 may have


def test_unquantised_experts_are_two_planes() -> None:
    layout = BlockLayout(inner=24, hidden=40, dtype=HALF)
    assert (layout.offsets, layout.block_bytes) == (dict(w13=0, w2=4096), 4096 + 2048)
    views = layout.views(torch.zeros(layout.block_bytes, dtype=BYTE))
    assert {name: (tuple(v.shape), v.dtype) for name, v in views.items()} == dict(
        w13=((40, 48), HALF), w2=((24, 40), HALF)
    )


@given(
    st.integers(1, 200),
    st.integers(1, 200),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([32, 64, 128]),
    st.booleans(),
    st.sampled_from([HALF, BFLOAT]),
)
def test_the_kernel_is_told_the_same_places(
    wide: int, tall: int, group: int, group2: int, zeros: bool, dtype: torch.dtype
) -> None:
    hidden, inner = min(wide * group, 8192), min(tall * group2, 4096)
    layout = BlockLayout(inner, hidden, dtype, group, group2, zeros, in_planes=True)
    inputs = [((2, layout.hidden), dtype), ((9999,), BYTE), ((7,), INT), ((2, 3), INT), ((2, 3), dtype)]
    told = host(OP, inputs, attributes=[layout.inner, group, group2, zeros])
    fields = dict(zip(FIELDS, struct.unpack_from(f"<{len(FIELDS)}I", told.tiling), strict=True))
    assert {"w13": 0, **{name: fields[name] for name in list(layout.offsets)[1:]}} == layout.offsets
    same = dict(tokens=2, topK=3, experts=7, k=hidden, n=inner, zeros=zeros)
    same |= laid(planes_of(hidden, group)) | laid(planes_of(inner, group2, ordered=True), "2")
    assert {name: fields[name] for name in same} == same
    assert (told.outputs, told.key) == ({"y": ((2, layout.hidden), dtype)}, 1 if dtype == HALF else 2)


@dataclass
class Mixture:
    """Random experts at `places` of an arena, in which all other bytes are 0xFF, which is NaN."""

    places: list[int]
    ids: Tensor
    hidden: int = 256
    inner: int = 96
    groups: tuple[int, int] = (64, 32)
    dtype: torch.dtype = BFLOAT
    zeros: bool = False
    float_sums: bool = False
    arena: Tensor | None = None  # or one of exactly the bytes that are needed

    def __post_init__(self) -> None:
        count = len(self.places)
        self.up = random_weight(count, self.hidden, 2 * self.inner, self.groups[0], self.dtype, self.zeros)
        self.down = random_weight(count, self.inner, self.hidden, self.groups[1], self.dtype, self.zeros, ordered=True)
        self.x = torch.randn(len(self.ids), self.hidden).to(self.dtype)
        self.weights = torch.rand(self.ids.shape).to(self.dtype)
        for expert, start in enumerate(self.places):  # experts at the same place have the same weights
            for plane in (*self.up, *self.down):
                if plane is not None:
                    plane[expert] = plane[self.places.index(start)]

    @cached_property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.inner, self.hidden, self.dtype, *self.groups, self.zeros, in_planes=True)

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        layout, arena = self.layout, self.arena
        if arena is None:
            arena = torch.full((max(*self.places, 0) * PLACE + layout.block_bytes,), 0xFF, dtype=BYTE)
        names = ("w13", "s13", "z13", "w2", "s2", "z2")
        for expert, start in enumerate(self.places):
            if start >= 0:
                views = layout.views(arena[start * PLACE :][: layout.block_bytes])
                for name, plane in zip(names, (*self.up, *self.down), strict=True):
                    if plane is not None:
                        views[name].copy_(plane[expert])
        return self.x, arena, torch.tensor(self.places, dtype=INT), self.ids.int(), self.weights

    @property
    def attributes(self) -> tuple[Any, ...]:
        return self.inner, *self.groups, self.zeros

    def run(self, library: Library | None = None) -> tuple[Tensor, Counts]:
        attributes = (*self.attributes, self.float_sums)
        return launch("fused_moe_slots", *self.inputs, attributes=attributes, library=library)

    def expected(self) -> Tensor:
        """The result computed from the planes themselves, without an arena."""
        starts = torch.tensor(self.places)[self.ids.long().clamp(0, len(self.places) - 1)]
        ids = torch.where(starts < 0, -1, self.ids.int())
        return reference.fused_moe_w4a16(
            self.x,
            InPlanes(*self.up, self.groups[0]),
            InPlanes(*self.down, self.groups[1]),
            ids,
            self.weights,
            precise=True,
        )

    def error(self) -> float:
        return worst_row(self.run()[0], self.expected())


def scattered(layout: BlockLayout, experts: int, missing: int = 0, first: int = 1) -> list[int]:
    """Places in no order, with gaps, at odd multiples of 512 bytes; `missing` of them -1."""
    places, at = [], first | 1
    for _ in range(experts - missing):
        places.append(at)
        at = (at + layout.block_bytes // PLACE + int(torch.randint(0, 4, ()))) | 1
    return [([*places, *[-1] * missing])[i] for i in torch.randperm(experts)]


@pytest.mark.parametrize("float_sums", thorough_but([False, True], False))
@pytest.mark.parametrize("zeros", thorough_but([False, True], True))
@pytest.mark.parametrize("dtype", thorough_but([HALF, BFLOAT], BFLOAT))
def test_numbers(dtype: torch.dtype, zeros: bool, float_sums: bool) -> None:
    shapes = ((128, 128, (32, 32)), (256, 96, (64, 32)), (1024, 192, (128, 64)), (512, 384, (64, 128)))
    for (hidden, inner, groups), (tokens, top_k) in zip(shapes, ((1, 8), (2, 3), (8, 4), (3, 2)), strict=True):
        layout = BlockLayout(inner, hidden, dtype, *groups, zeros, in_planes=True)
        places, ids = scattered(layout, 12, missing=4), distinct(tokens, top_k, 12)
        mixture = Mixture(places, ids, hidden, inner, groups, dtype, zeros, float_sums)
        assert mixture.error() < BOUND[dtype], (hidden, inner)
        given: Any = (*mixture.inputs, *mixture.attributes)
        own = reference.compute("fused_moe_slots_w4a16", *given, precise=True)
        assert torch.equal(own, mixture.expected())


LAYOUT = BlockLayout(96, 256, BFLOAT, 64, 32, in_planes=True)
STEP = LAYOUT.block_bytes // PLACE  # one block after the other


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("places", "ids"),
    [
        ([-1] * 5, [[0, 3], [4, 1]]),
        ([3, -1, STEP + 3], [[-1, 0, 1], [3, 99, -(1 << 31)], [1 << 30, 2, 1]]),
        ([1, -1, 1], [[2, 2, 2, 1], [0, 2, 0, 2], [1, 1, 1, 1]]),
        ([-1, 5], [[1]] * 8),
    ],
    ids=["none", "outside", "repeated ids", "one of them"],
)
def test_patterns(places: list[int], ids: list[list[int]]) -> None:
    assert Mixture(places, torch.tensor(ids)).error() < BOUND[BFLOAT]


@pytest.mark.thorough
@pytest.mark.parametrize("float_sums", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_all_resident_gives_the_bits_of_the_other_op_and_reads_as_much(zeros: bool, float_sums: bool) -> None:
    layout = BlockLayout(192, 512, BFLOAT, 32, 32, zeros, in_planes=True)
    places, ids = scattered(layout, 16), distinct(4, 4, 16)
    mixture = Mixture(places, ids, 512, 192, (32, 32), BFLOAT, zeros, float_sums)
    y, counts = mixture.run()
    inputs = mixture.x, *mixture.up, *mixture.down, ids, mixture.weights
    theirs, before = launch("fused_moe", *inputs, attributes=(32, 32, float_sums))
    assert torch.equal(y, theirs)
    mine, other = ({name: dict(count) for name, count in counted.buffers.items()} for counted in (counts, before))
    planes = sum(other.pop(name, {"read": 0})["read"] for name in ("w13", "s13", "z13", "w2", "s2", "z2"))
    assert mine.pop("arena") == {"read": planes, "written": 0}
    assert mine.pop("places") == {"read": 48 * 16 * 4, "written": 0}  # the whole table, by each core
    assert mine.pop("weights") == other.pop("weights")
    assert mine == other
    assert counts.total["repeats"]["Cast<half,int4b_t>"] == before.total["repeats"]["Cast<half,int4b_t>"]


@pytest.mark.thorough
def test_each_plane_of_a_resident_expert_is_read_once() -> None:
    """Each expert is chosen by several tokens. Experts that are missing, or not chosen, are not read."""
    layout = BlockLayout(96, 512, HALF, 32, 32, True, in_planes=True)
    ids = torch.tensor([[0, 1, 2, 3]] * 6)
    places = [-1] * 2 + scattered(layout, 4)
    _, counts = Mixture(places, ids, 512, 96, (32, 32), HALF, True).run()
    scales = 512 // 32 * 192 * 2 + 8 * 512 * 2  # w2 has three groups, and room for eight
    assert counts.buffers["arena"]["read"] == 2 * (512 * 96 * 3 // 2 + 2 * scales)


def beyond_4_gb(folder: Path) -> Mixture:
    """A mixture with places beyond 4 GB, in a sparse file of 5 GB: only the blocks are written or read."""
    arena = torch.from_file(str(folder / "arena"), shared=True, size=5 << 30, dtype=BYTE)
    layout, middle = BlockLayout(96, 256, BFLOAT, 64, 32, True, in_planes=True), (1 << 32) // PLACE
    last = ((5 << 30) - layout.block_bytes) // PLACE
    ids = torch.tensor([[0, 1, 2], [4, 2, 3]])
    return Mixture([last, -1, middle - 5, *scattered(layout, 2)], ids, zeros=True, arena=arena)


def test_an_arena_beyond_4_gb(tmp_path: Path) -> None:
    mixture = beyond_4_gb(tmp_path)
    assert mixture.error() < BOUND[BFLOAT]
    mixture.inputs[2][0] += 1
    with pytest.raises(TwinError, match="of arena, which has 5368709120"):
        mixture.run()


PLAN, MATRIX, SLOTS = "umbra_plan.h", "umbra_matrix.h", "umbra_fused_moe_slots_w4a16.cpp"
MISTAKES: dict[str, Mutation] = {  # another answer, or the twin stops
    "missing ones are computed": (PLAN, "if (chosen.place[i] < 0) continue;", ";"),
    "the expert's number is its place": (PLAN, "place[i] = in.GetValue(id[i] - begin);", "place[i] = id[i];"),
    "the table is not read": (PLAN, "room.Fetch(in, table[begin], some);", ";"),
    "32 bits": ("umbra_product.h", "place * m.apart", "static_cast<uint32_t>(place * m.apart)"),
    "32 bits of scales": ("umbra_product.h", "place * m.scalesApart", "static_cast<uint32_t>(place * m.scalesApart)"),
    "scales are a matrix apart": (
        MATRIX,
        "bank.apart ? bank.apart : static_cast<uint64_t>(sections) * n * kept * sizeof(half)",
        "static_cast<uint64_t>(sections) * n * kept * sizeof(half)",
    ),
    "zero points are scales": (SLOTS, "arena + t.z13", "arena + t.s13"),
    "zero points of w2 are scales": (SLOTS, "arena + t.z2", "arena + t.s2"),
    "no weights": ("umbra_pairs.h", "weights.of[i] = room.sums.GetValue(i);", "weights.of[i] = 1;"),
}


@pytest.mark.thorough
def test_every_mistake_is_noticed(tmp_path: Path) -> None:
    mixture = beyond_4_gb(tmp_path)

    def right(library: Library) -> bool:
        y, expected = mixture.run(library)[0].double(), mixture.expected()
        return bool((y - expected).norm() < BOUND[BFLOAT] * expected.norm())

    assert unnoticed(tmp_path, "fused_moe_slots", MISTAKES, right) == ["no mistake"]
