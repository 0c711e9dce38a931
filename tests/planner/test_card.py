"""One device beside its host: the published formula of a token, sides of a prefill that end together, hit rates."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from umbra.base.errors import UserError
from umbra.cpu_offload.planner.hits import CURVES, curve_of, hit_rate
from umbra.planner.benchmarks.card_validation import beside, rows
from umbra.planner.card import prefill, resident_share
from umbra.planner.cluster import Cluster, read_cluster
from umbra.planner.machine import read_hardware
from umbra.planner.plan import make_cluster_plan, show_cluster_plan
from umbra.planner.served import named, served

HARDWARE = read_hardware("single_card_a3")
FLASH = named("deepseek_v4_flash", HARDWARE)


@pytest.mark.parametrize(("hit", "total"), [(0.262, (20.0, 39, 48)), (0.5, (22.7, 50, 65)), (0.6, (24.1, 57, 76))])
def test_a_token_takes_what_the_published_formula_says(hit: float, total: tuple[float, ...]) -> None:
    """With its host at 139 GB/s, where the hardware file has the 137 of a microbenchmark."""
    times = [n / FLASH.decode(n, 16384, hit, 0) for n in (1, 4, 8)]
    assert times == pytest.approx(total, rel=0.02)
    assert 1.85 / FLASH.decode(1, 0, 0.6, 1) == pytest.approx(34.1, rel=0.02)  # of 36.1, less 3 ms of the guess


def test_residents_take_what_the_rest_leaves() -> None:
    share = resident_share(FLASH, HARDWARE, 1, 16384)
    assert share is not None
    assert share == pytest.approx(0.28, abs=0.005)  # 71 of 256
    assert resident_share(FLASH, HARDWARE, 1, 16384, guesses=1) == pytest.approx(share - 1 / 43, abs=1e-3)
    assert resident_share(FLASH, HARDWARE, 1000, 1 << 20) is None
    small = served("qwen36_35b_a3b_w4a16_tp1", Cluster(), HARDWARE)
    assert resident_share(small, HARDWARE, 1, 1024) == 1.0


def test_a_prefill_takes_longer_in_chunks_and_less_with_residents() -> None:
    def seconds(prompt: int, resident: float = 0.0, chunk: int = 1 << 20, gbps: float = 27.0) -> float:
        return prefill(FLASH, HARDWARE.with_link(gbps), prompt, chunk, resident).seconds

    assert seconds(16) < seconds(128) < seconds(2048) < seconds(2048, chunk=1024)
    assert seconds(2048) > seconds(2048, 0.28) > seconds(2048, 0.28, gbps=110.0) > seconds(2048, 1.0)
    assert seconds(2048, 1.0) == sum(FLASH.prefill(2048, 0))
    with pytest.raises(UserError, match=r"host\.memory_gbps: 155 must be above host\.copy_gbps: 200"):
        seconds(16, gbps=200.0)


def test_published_figures_are_near_the_model() -> None:
    """The least are the rival's prefills, which take longer than their parts add up to."""
    assert all((0.5 if "prefill" in row["what"] else 0.8) < row["ratio"] < 1.25 for row in rows(FLASH, HARDWARE))
    assert len(list(beside(FLASH, HARDWARE))) == 11


def test_hit_rates_grow_from_none_to_all() -> None:
    for curve in (*CURVES.values(), curve_of("0.125:0.485,0.25:.704", "hits")):
        rates = [hit_rate(curve, share / 100) for share in range(101)]
        assert (rates[0], rates[-1]) == (0.0, 1.0)
        assert rates == sorted(rates)
    assert hit_rate((), 0.3) == pytest.approx(0.3)
    assert hit_rate(CURVES["v4_flash_moved"], 0.3) == pytest.approx((0.464 + 0.81) / 2)


def write(folder: Path, **card: Any) -> Path:
    file = folder / "card.yaml"
    asked = {"models": ["deepseek_v4_flash", "glm46_w4a16_offload"], "sequences": [1, 8], "accepted": [0.8]} | card
    load = {"prompt_tokens": 16384, "output_tokens": 1024}
    file.write_text(yaml.safe_dump({"hardware": "single_card_a3", "load": load, "card": asked}))
    return file


def test_the_plan_of_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, prompts=[128, 8192], links=[27, 110])
    show_cluster_plan(file, [], tmp_path / "rows.json", None)
    text = capsys.readouterr().out
    assert "deepseek_v4_flash: 43 layers of 256 experts, 6 a token, 13.37 MB each; the host holds 147.2 GB\n" in text
    assert "even, a guess right 80%" in text
    assert "do not fit" in text
    flash, glm = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [one["sequences"] for one in glm["decode"]] == [1, 1]  # 8 of so many tokens do not fit
    assert [one["accepted"] for one in flash["decode"]] == [None, None, 0.8, 0.8]
    assert [one["longest"] for one in flash["prefill"]] == ["link", "link", "device", "device"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"curves": ["flat"]}, "card.curves: 'flat' is not one of even, "),
        ({"curves": ["0.5:0.6,0.4:0.7"]}, "card.curves: '0.5:0.6,0.4:0.7' is not one of even, "),
        ({"curves": ["0.5:nan"]}, "card.curves: '0.5:nan' is not one of even, "),
        ({"accepted": [2]}, "card.accepted: 2.0 must be from 0 to 1"),
        ({"prompts": [0]}, "card.prompts: 0 must be more than 0"),
        ({}, "card.models: one device is not simulated"),
        ({"models": ["qwen3_30b_a3b_q4_cpu"]}, "card.models: case qwen3_30b_a3b_q4_cpu runs on cpu"),
        ({"models": ["qwen38_27b_w8a8_tp1"]}, "qwen38_27b_w8a8_tp1: a dense model has no experts for a card and its"),
    ],
)
def test_errors_of_a_card_are_one_line(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(UserError) as caught:
        show_cluster_plan(file, [], None, None) if changes else make_cluster_plan(file)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"devices: 2: card\.models are served by 1 device"):
        read_cluster(write(tmp_path), ["devices=2"])
