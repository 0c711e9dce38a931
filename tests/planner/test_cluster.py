"""The cluster planner: what is counted is what a run of the layout does, times follow from constants by the formulas,
layouts are refused with their rules, and the best are the best. After a change of what it prints, UMBRA_PRINTED=write
writes the new text."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from umbra.base.errors import UserError
from umbra.executor.config.load import load_case
from umbra.executor.plan.sketch import cache_of, sketch_of, weights_of
from umbra.executor.platform.ascend.plan.memory import make_plan
from umbra.ops.counted import Collective, Done
from umbra.planner.cluster import Cluster, Guesses, Load, Search, Targets, read_cluster
from umbra.planner.layouts import Layout, Sizes, divisors, make_layout, sizes_of, tokens_by_guesses
from umbra.planner.machine import DeviceRates, Hardware, HostRates, Links, read_hardware
from umbra.planner.plan import make_cluster_plan, row_of, show_cluster_plan
from umbra.planner.times import GIGA, PARTS, Placing, collective_seconds, step_times
from umbra.planner.work import CountedRank, RankWork

CASES: list[tuple[str, tuple[str, ...]]] = [("qwen3_235b_a22b_bf16_tp16", ())]
CASES += [("qwen3_235b_a22b_bf16_tp16", ("attn_tp_size=1", "moe_tp_size=1", "batch_size=32", "aiv_group=none"))]
CASES += [("minimax_m2_w4a16_tp8", ()), ("qwen3_30b_a3b_q4_cpu", ()), ("gpt_oss_120b_bf16_tp8", ())]
CASES += [("qwen35_397b_w4a16_tp16", ()), ("deepseek_v2_lite_q4_cpu", ()), ("deepseek_r1_w8a8_tp16", ())]
CASES += [("deepseek_r1_w8a8_tp16", ("draft_config.method=mtp",))]
CASES += [("qwen35_397b_w4a16_tp16", ("draft_config.method=mtp",))]
CASES += [("qwen38_27b_w8a8_tp1", ("draft_config.method=mtp",))]
IDS = ["235b", "235b-ep", "m2", "30b-cpu", "gpt-oss", "states", "latents", "r1", "r1-mtp", "states-mtp", "dense-mtp"]
PRINTED = Path(__file__).parents[1] / "data" / "cluster_plan.txt"
LINKS = Links(devices=8, gbps=100.0, collective_us=10.0, peer_us=1.0, exchange_us=40.0)
HARDWARE = Hardware(
    platform="ascend",
    node=LINKS,
    pod=Links(devices=64, gbps=50.0, collective_us=20.0, peer_us=2.0, exchange_us=40.0),
    network=Links(gbps=10.0, collective_us=60.0, peer_us=3.0, exchange_us=40.0),
    device=DeviceRates(
        memory_gb=64,
        read_gbps=1000.0,
        read_fraction=0.5,
        attention_fraction=0.5,
        tflops=100.0,
        multiply_fraction=0.5,
        quantised_tflops=2.0,
        unpack_gbps=100.0,
        launch_us=5.0,
        attention_us=10.0,
        step_us=100.0,
    ),
    host=HostRates(devices=8, memory_gb=1000.0, read_gbps=100.0, tflops=1.0, handover_us=10.0, copy_gbps=20.0),
    name="made",
)


@pytest.mark.parametrize(("name", "overrides"), CASES, ids=IDS)
def test_memory_is_that_of_the_whole_model(name: str, overrides: tuple[str, ...]) -> None:
    """Layers of a kind are built once and multiplied."""
    case = load_case(name, overrides)
    sketch, counted = sketch_of(case), CountedRank(case)
    memory = counted.memory
    assert counted.limits == sketch.limits
    sizes = {part.name: part.nbytes for part in weights_of(sketch.model)}
    experts = sizes.pop("experts", 0) + sizes.pop("experts' scales and biases", 0)
    assert memory.experts == experts
    assert memory.rest == sum(sizes.values()) - sizes["rotary"]
    assert memory.page * (sketch.pages + 1) == cache_of(sketch).nbytes


@pytest.mark.parametrize(("name", "overrides"), [CASES[0], CASES[2]], ids=["235b", "m2"])
def test_a_decode_step_reads_what_the_memory_plan_says(name: str, overrides: tuple[str, ...]) -> None:
    case = load_case(name, overrides)
    plan, own = make_plan(case), case.data_config.batch_size // case.attn_dp_size
    work = CountedRank(case).decode(own, case.max_sequence_length - 1)
    rest, experts, cached = (part.nbytes for part in plan.decode)
    norms = sum(part.nbytes for part in plan.sections["weights"] if part.name == "norms")  # counted as activations
    biases = rest - norms - work.total("weights") + experts
    assert 0 <= biases < 2e-4 * rest
    assert work.total("cached") == pytest.approx(cached, rel=1e-9)


def test_tensor_parallelism_does_not_divide_latents() -> None:
    """A token's latents have 1,152 bytes in each of 61 layers. With 128 heads a die multiplies longer than it reads."""
    dp = ("attn_tp_size=4", "batch_size=64", "aiv_group=none")
    tp, dp4 = (CountedRank(load_case("deepseek_r1_w8a8_tp16", overrides)) for overrides in ((), dp))
    assert tp.page_bytes == dp4.page_bytes == 61 * 1152 * 128
    reads = [counted.decode(16, 4095).total("cached") for counted in (tp, dp4)]
    assert reads == [16 * 4096 * 61 * 1152] * 2
    whole = CountedRank(
        load_case("deepseek_v3_w4a16_offload", ("offload_config.mode=none", "offload_config.arena_mb=0"))
    )
    [attention] = {(one.cached, one.macs) for one in whole.decode(1, 8191).done if one.name == "latent_attention"}
    assert attention == (8192 * 1152, 8192 * 128 * 1088)


def test_kernels_and_collectives_of_a_layer() -> None:
    """As the lists of tests/ascend/test_eager.py have them."""
    layers = 94
    tp, ep = (CountedRank(load_case(name, overrides)).decode(2, 100) for name, overrides in CASES[:2])
    outside = 3 + 2  # embedding and two tables of angles; final norm and head
    assert tp.total("kernels") == ep.total("kernels") - layers == 13 * layers + outside  # an exchange has one more
    assert [(m.kind, m.group, m.ranks, m.times) for m in tp.messages if m.times > 1] == [
        ("all_reduce", "attn_tp", 16, layers - 1),
        ("all_reduce", "world", 16, layers - 1),
    ]
    assert {(m.kind, m.group) for m in ep.messages} == {("dispatch", "world"), ("combine", "world")}
    assert all(m.nbytes == 8 * 2 * 4096 * 2 for m in ep.messages)  # eight experts for each of two rows
    m2, oss = (CountedRank(load_case(name)).decode(1, 100) for name in (CASES[2][0], "gpt_oss_120b_bf16_tp8"))
    assert [{one.few for one in work.done if one.mixture} for work in (m2, oss)] == [{True}, {False}]
    assert sum(m.times for m in m2.messages if m.kind == "all_reduce") == 3 * 62 + 1  # a third one for split norms


def spans(span: int) -> dict[str, int]:
    return dict.fromkeys(("world", "attn_tp", "attn_dp", "embed_tp", "lmhead_tp"), span)


def test_the_formulas_of_collectives() -> None:
    def seconds(kind: str, nbytes: int, ranks: int = 8, span: int = 8) -> tuple[object, str]:
        return collective_seconds(Collective(kind, "world", ranks, nbytes, 1), span, HARDWARE)

    fixed = 16e-6  # 10 + 6 peers more
    assert seconds("all_reduce", 1000) == (pytest.approx(fixed + 7 * 1000 / 100e9), "one shot")
    assert seconds("all_reduce", 10**6) == (pytest.approx(2 * fixed + 2 * 7 / 8 * 1e6 / 100e9), "two shots")
    assert seconds("all_gather", 10**6)[0] == pytest.approx(fixed + 7e6 / 100e9)
    assert seconds("reduce_scatter", 10**6)[0] == pytest.approx(fixed + 7 / 8 * 1e6 / 100e9)
    assert seconds("dispatch", 10**6)[0] == pytest.approx(fixed + 40e-6 + 7 / 8 * 1e6 / 100e9)
    assert seconds("all_gather", 0, 2, 16)[0] == pytest.approx(20e-6)  # two ranks in different nodes of a pod
    assert seconds("all_gather", 0, 2, 65)[0] == pytest.approx(60e-6)


def test_the_formulas_of_kernels() -> None:
    def times(*done: Done, resident: float = 1.0, sharing: int = 8) -> dict[str, float]:
        parts = step_times(RankWork(done, ()), Placing(spans(1), resident, sharing), HARDWARE).parts
        return {part: seconds for part, seconds in parts.items() if seconds and part != "host"}

    read = 0.5 * 1000 * GIGA
    linear = Done("linear", 3, 1, weights=1e6, rows=1e4, macs=1e6)
    assert times(linear) == pytest.approx({"weights": 3e6 / read, "activations": 3e4 / read, "launches": 15e-6})
    busy = dataclasses.replace(linear, macs=1e9)
    assert times(busy)["products"] == pytest.approx(3 * (2e9 / 50e12 - 1.01e6 / read))
    packed = dataclasses.replace(linear, plain=False)
    few = times(dataclasses.replace(packed, macs=1e9))  # for few rows it takes 1 ms: it is quicker to unpack
    assert few["weights"] == pytest.approx(3e6 / 100e9)
    assert times(packed)["weights"] == pytest.approx(3e6 / read)
    unknown = dataclasses.replace(packed, few=False)
    assert times(unknown)["weights"] == pytest.approx(3e6 / 100e9)
    for name in ("attention", "latent_attention"):
        attention = Done(name, 1, 1, cached=1e6, macs=1e9)
        products = 2e9 / 50e12 - 1e6 / read
        assert times(attention) == pytest.approx({"KV": 1e6 / read, "products": products, "launches": 10e-6})
    moe = Done("moe", 1, 5, weights=1e6, macs=1e3, mixture=True)
    half = times(moe, resident=0.5)
    assert half["weights"] == pytest.approx(0.5e6 / read)
    assert half["shadow experts"] == pytest.approx(0.5e6 / 20e9 - 0.5e6 / read)  # copied: quicker than the host
    alone = times(dataclasses.replace(moe, weights=1e8), resident=0.5, sharing=1)
    assert alone["shadow experts"] == pytest.approx(10e-6 + 0.5e8 / 100e9 - 0.5e8 / read)


CLUSTER = Cluster(
    case="qwen3_30b_a3b_bf16_tp8",
    hardware="made",
    devices=8,
    load=Load(rate=1.0, prompt_tokens=512, output_tokens=128),
    targets=Targets(ttft_ms=2000.0, tpot_ms=60.0),
    search=Search(worlds=(4, 8), most_sequences=64),
)


@pytest.fixture(scope="module")
def layout() -> Layout:
    return make_layout(CLUSTER, Sizes(2, 4, 2, 4, "none", 1.0), HARDWARE)


def test_layouts_are_refused_with_the_rule() -> None:
    def refused(sizes: Sizes, hardware: Hardware = HARDWARE, **changes: Any) -> str:
        with pytest.raises(UserError) as caught:
            make_layout(dataclasses.replace(CLUSTER, **changes), sizes, hardware)
        return str(caught.value)

    assert "divide" in refused(Sizes(1, 3, 3, 3, "none", 1.0))  # of 32 heads, 4 KV heads
    assert "platform: ascend" in refused(Sizes(1, 8, 8, 8, "q8", 1.0))
    small = dataclasses.replace(HARDWARE, device=dataclasses.replace(HARDWARE.device, memory_gb=4.0))
    assert "does not fit: " in refused(Sizes(1, 8, 8, 8, "none", 1.0), small)
    poor = dataclasses.replace(HARDWARE, host=dataclasses.replace(HARDWARE.host, memory_gb=1.0))
    assert "a host holds" in refused(Sizes(1, 8, 8, 8, "none", 0.5), poor)
    assert "runs on ascend" in refused(Sizes(1, 8, 8, 8, "none", 1.0), dataclasses.replace(HARDWARE, platform="cpu"))
    dense: dict[str, Any] = {"case": "qwen38_27b_w8a8_tp1"}
    assert "moe_tp_size: 1 divides experts" in refused(Sizes(2, 4, 4, 1, "auto", 1.0), **dense)
    assert "no experts that a host could hold" in refused(Sizes(2, 4, 4, 4, "auto", 0.5), **dense)


def test_guesses_take_rows_and_passes_of_their_layer() -> None:
    """Rows read the union of their experts; hosts hold none of the layer's own. What does not pay is left out."""
    counted = CountedRank(load_case("deepseek_r1_w8a8_tp16", ["draft_config.method=mtp"]))
    plain, drafted = counted.decode(1, 100), counted.decode(1, 100, 2)
    experts = [sum(one.weights * one.times for one in work.done if one.mixture) for work in (plain, drafted)]
    share = 8 / 256
    assert experts[1] == pytest.approx(experts[0] * (1 - (1 - share) ** 3) / share)
    heads = [one for one in drafted.done if one.name == "linear" and one.weights == plain.done[-1].weights]
    assert sum(one.times for one in heads) == 3
    assert drafted.total("cached") == pytest.approx(plain.total("cached") * (3 * 61 + 3 + 1) / 61)
    cluster = dataclasses.replace(CLUSTER, case="deepseek_r1_w8a8_tp16", devices=16)
    sizes = Sizes(1, 16, 16, 16, "auto", 1.0)
    tokens = [
        make_layout(dataclasses.replace(cluster, guesses=Guesses(rates)), sizes, HARDWARE).decode(1).total
        for rates in ((), (0.0,), (0.85,), (0.85, 0.6))
    ]
    assert tokens[0] == tokens[1] > tokens[2] >= tokens[3]
    assert tokens_by_guesses((0.8, 0.5)) == pytest.approx([1.0, 1.8, 2.2])


def write(folder: Path, **changes: Any) -> Path:
    hardware = {
        "platform": "ascend",
        **{part: dataclasses.asdict(getattr(HARDWARE, part)) for part in ("node", "pod", "network", "device", "host")},
    }
    (folder / "made.yaml").write_text(yaml.safe_dump(hardware))
    cluster: dict[str, Any] = {"case": CLUSTER.case, "hardware": str(folder / "made.yaml"), "devices": 8}
    cluster |= {"load": {"rate": 1.0, "prompt_tokens": 512, "output_tokens": 128}}
    cluster |= {"targets": {"tpot_ms": 60, "ttft_ms": 2000}, "search": {"worlds": [4, 8], "most_sequences": 64}}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster | changes))
    return folder / "cluster.yaml"


def test_a_plan_finds_the_best_of_all(tmp_path: Path) -> None:
    plan = make_cluster_plan(write(tmp_path))
    tried = list(sizes_of(plan.cluster))
    assert len(tried) == len(divisors(4)) ** 2 + len(divisors(8)) ** 2
    assert len(tried) == len(plan.rated) + len(plan.slow) + len(plan.refused)
    assert plan.quickest[0].load.tpot == min(rated.load.tpot for rated in plan.in_time)
    rates = [rated.most.rate for rated in plan.cheapest if rated.most]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == max(rated.most.rate for rated in plan.in_time if rated.most)
    assert all(set(rated.layout.decode(1).parts) == set(PARTS) for rated in plan.rated)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"hardware": ""}, "hardware is missing: docs/cluster_keys.md has every key"),
        ({"hardware": "atlas_a9"}, "there are atlas_a2, atlas_a3"),
        ({"loads": {}}, "unknown key 'loads', did you mean 'load'?; all keys: docs/cluster_keys.md"),
        ({"search": {"worlds": [3]}}, "search.worlds: 3 does not divide devices: 8"),
        ({"guesses": {"accepted": [0.5, 2]}}, "guesses.accepted: 2.0 must be from 0 to 1"),
        ({"search": {"resident": [-0.1]}}, "search.resident: -0.1 must be from 0 to 1"),
        ({"simulation": {"day": {"rates": [1.0]}}}, "simulation.day.rates: 1 numbers, must be 24: one for each hour"),
        ({"simulation": {"day": {"repeats": [2] * 24}}}, "simulation.day.repeats: 2.0 must be at most 1"),
    ],
)
def test_errors_in_a_cluster_file_are_one_line(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError) as caught:
        read_hardware(read_cluster(write(tmp_path, **changes)).hardware)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_and_overrides_give_a_cluster(tmp_path: Path) -> None:
    search = {"worlds": [1, 8], "resident": [0, 1], "methods": ["none", "q8"]}
    cluster = read_cluster(write(tmp_path, search=search), ["load.rate=2.5", "devices=16"])
    assert (cluster.devices, cluster.load.rate) == (16, 2.5)
    assert cluster.search == Search(("none", "q8"), (0.0, 1.0), (1, 8))
    assert read_hardware(cluster.hardware).name == "made"
    with pytest.raises(UserError, match=r"--cluster .*/none\.yaml: no such file; planner/clusters/ has examples"):
        read_cluster(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"--set nothing"):
        read_cluster(tmp_path / "cluster.yaml", ["nothing=1"])


@pytest.mark.thorough
def test_the_text_is_that_of_the_last_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Traffic that some layouts do not keep up with, and targets that some do not meet."""
    file = write(
        tmp_path,
        targets={"tpot_ms": 50, "ttft_ms": 90},
        load={"rate": 14, "prompt_tokens": 512, "output_tokens": 128},
        search={"worlds": [4], "most_sequences": 64, "resident": [0.5, 1.0], "methods": ["none", "q8"]},
    )
    show_cluster_plan(file, [], tmp_path / "rows.json", tmp_path / "plot.png")
    text = capsys.readouterr().out
    if os.environ.get("UMBRA_PRINTED") == "write":
        PRINTED.write_text(text)
    assert text == PRINTED.read_text()
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == list(map(row_of, make_cluster_plan(file).rated))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    none = write(tmp_path, search={"worlds": [8], "methods": ["q8"]})
    with pytest.raises(UserError, match=r"cluster\.yaml: no layout is possible; the first: .*platform: ascend"):
        show_cluster_plan(none, [], None, None)
