"""The keys of cluster and hardware files: their defaults and bounds, and which values are refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.cluster import Cluster, Day, Load, Search, check_day, read_cluster
from planner.machine import FOLDER, Device, Hardware, Links, read_hardware
from tools.config_docs import config_docs, table
from umbra.errors import UserError
from umbra.files import ROOT


def test_the_described_keys_have_their_defaults_and_bounds() -> None:
    """docs/cluster_keys.md is what users read."""
    written = (ROOT / "docs" / "cluster_keys.md").read_text()
    assert config_docs()["cluster_keys.md"] == written
    assert table(Cluster) in written
    assert table(Hardware) in written


def test_defaults_of_search_and_day() -> None:
    assert Search() == Search(("none",), (1.0,), (), 256, 4096)
    assert Day() == Day((), (), (), (), 60.0)
    assert (Day().hour_s, Day(minutes=1.5).hour_s) == (3600, 90)
    assert (Hardware().name, Hardware().platform) == ("", "ascend")
    assert Hardware().device == Device()


def file(folder: Path, **changes: Any) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"case": "demo", "hardware": "some", "devices": 8} | changes))
    return path


def test_a_file_gives_a_cluster(tmp_path: Path) -> None:
    found = read_cluster(
        file(tmp_path, search={"worlds": [1, 8], "resident": [0, 1], "methods": ["none", "q8", "q4"]}),
        ["load.rate=2.5", "devices=16"],
    )
    search = Search(("none", "q8", "q4"), (0.0, 1.0), (1, 8))
    assert found == Cluster("", "demo", "some", 16, Load(2.5), search=search)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"case": ""}, "cluster.yaml: case is missing: docs/cluster_keys.md has every key"),
        ({"hardware": ""}, "cluster.yaml: hardware is missing: docs/cluster_keys.md has every key"),
        ({"search": {"worlds": [0]}}, "cluster.yaml: search.worlds: 0 does not divide devices: 8"),
        ({"search": {"worlds": [-8]}}, "cluster.yaml: search.worlds: -8 does not divide devices: 8"),
        ({"search": {"worlds": [8, 16]}}, "cluster.yaml: search.worlds: 16 does not divide devices: 8"),
        ({"search": {"resident": [-0.1]}}, "cluster.yaml: search.resident: -0.1 must be from 0 to 1"),
        ({"search": {"resident": [1, 1.1]}}, "cluster.yaml: search.resident: 1.1 must be from 0 to 1"),
        (
            {"simulation": {"day": {"rates": [1] * 23}}},
            "cluster.yaml: simulation.day.rates: 23 numbers, must be 24: one for each hour",
        ),
        ({"loads": {}}, "cluster.yaml: unknown key 'loads', did you mean 'load'?; all keys: docs/cluster_keys.md"),
    ],
)
def test_what_no_cluster_can_be_is_refused(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError) as caught:
        read_cluster(file(tmp_path, **changes))
    assert str(caught.value) == error


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--cluster .*/none\.yaml: no such file; planner/clusters/ has examples"):
        read_cluster(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"--set nothing=1: |--set nothing: unknown key.*docs/cluster_keys\.md"):
        read_cluster(file(tmp_path), ["nothing=1"])


@pytest.mark.parametrize(
    ("name", "least", "wrong"),
    [("rates", 0, -0.5), ("prompt_tokens", 1, 0), ("output_tokens", 1, 0), ("repeats", 0, -0.5)],
)
def test_the_numbers_of_a_day_have_their_least(name: str, least: int, wrong: float) -> None:
    values: Any = (*([1] * 23), least)
    check_day(dataclasses.replace(Day(), **{name: values}), "file")
    for bad in (wrong, float("inf")):
        bad_values: Any = (*([1] * 23), bad)
        with pytest.raises(UserError, match=rf"^file: simulation\.day\.{name}: {bad} must be at least {least}$"):
            check_day(dataclasses.replace(Day(), **{name: bad_values}), "file")
    if name == "repeats":
        with pytest.raises(UserError, match=r"^file: simulation\.day\.repeats: 1\.5 must be at most 1$"):
            check_day(Day(repeats=(*([1.0] * 23), 1.5)), "file")


def test_links_that_join_so_many_devices() -> None:
    of = Hardware(node=Links(devices=8), pod=Links(devices=64))
    assert [of.links(span) for span in (1, 8, 9, 64, 65)] == ["node", "node", "pod", "pod", "network"]
    assert [Hardware(pod=Links(devices=2)).links(span) for span in (2, 3)] == ["pod", "network"]


def test_a_constant_may_be_zero() -> None:
    of = Hardware(node=Links(peer_us=0.0), name="made")
    assert of.need("node.peer_us") == 0.0
    assert of.need("device.step_us") == 0.0
    with pytest.raises(UserError, match=r"^hardware made: pod\.peer_us is missing, which this prediction needs: add"):
        of.need("pod.peer_us")


def test_hardware_has_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("node: {devices: 3}\n")
    found = read_hardware(str(tmp_path / "own.yaml"))
    assert (found.name, found.node.devices) == ("own", 3)
    known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    assert read_hardware(known[0]).name == known[0]
    with pytest.raises(UserError) as caught:
        read_hardware("other")
    assert str(caught.value) == (
        f"hardware: other: no such file; there are {', '.join(known)}, or give a path ending in .yaml"
    )
    (tmp_path / "own.yaml").write_text("nodes: {}\n")
    with pytest.raises(UserError, match=r"^own\.yaml: unknown key 'nodes', .*; all keys: docs/cluster_keys\.md$"):
        read_hardware(str(tmp_path / "own.yaml"))
