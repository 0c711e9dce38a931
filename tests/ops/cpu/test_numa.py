"""NUMA: topology and plans on made-up sysfs trees, fallbacks on this machine, page placement on an emulated one."""

import os
import platform
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.cpu.native.build import PRODUCTS, SOURCES, TESTS, program
from tests.tiny import make_runner, save_tiny, tiny_case
from umbra.base.files import ROOT
from umbra.commands.logits import collect_logits
from umbra.ops import load_ops
from umbra.ops.cpu import engine
from umbra.ops.cpu.engine import worth_having
from umbra.ops.cpu.matrix import NativeMatrix
from umbra.ops.formats import FORMATS

pytestmark = pytest.mark.slow

module = engine.module
CPU = torch.device("cpu")
cpu = load_ops("cpu")


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    engine.start(1, "auto")


def make_tree(root: Path, nodes: dict[int, str], siblings: dict[int, str] | None = None) -> Path:
    """A sysfs tree: CPU list of each node, siblings of each CPU that has any."""
    write(root / "node/online", ",".join(map(str, nodes)))
    for node, cpus in nodes.items():
        write(root / f"node/node{node}/cpulist", cpus)
    for cpu, text in (siblings or {}).items():
        write(root / f"cpu/cpu{cpu}/topology/thread_siblings_list", text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def read(root: Path, cpus: int | list[int]) -> list[tuple[int, list[list[int]]]]:
    allowed = list(range(cpus)) if isinstance(cpus, int) else cpus
    return [(node.memory, node.cores) for node in module.read_nodes(str(root), allowed)]


def planned(root: Path, cpus: int, threads: int) -> list[tuple[int, int]]:
    teams = module.plan(module.read_nodes(str(root), list(range(cpus))), threads)
    return [(team.memory, team.threads) for team in teams]


def test_nodes_of_a_machine(tmp_path: Path) -> None:
    count = 4
    make_tree(tmp_path, {n: f"{4 * n}-{4 * n + 3}" for n in range(count)})
    nodes = [(n, [[4 * n + i] for i in range(4)]) for n in range(count)]
    assert read(tmp_path, 4 * count) == nodes
    assert read(tmp_path, [1, 6, 7]) == [(0, [[1]]), (1, [[6], [7]])]  # a cpuset
    assert planned(tmp_path, 4 * count, 4 * count) == [(n, 4) for n in range(count)]
    assert planned(tmp_path, 4 * count, count + 1) == [(n, 2 if n == 0 else 1) for n in range(count)]
    assert planned(tmp_path, 4 * count, 1) == [(0, 1)]
    assert planned(tmp_path, 4 * count, 8 * count) == [(n, 8) for n in range(count)]
    teams = module.plan(module.read_nodes(str(tmp_path), list(range(4 * count))), count)
    assert [team.cpus for team in teams] == [[4 * n + i for i in range(4)] for n in range(count)]


def test_one_node_is_neither_pinned_nor_bound(tmp_path: Path) -> None:
    make_tree(tmp_path, {0: "0-3"})
    assert read(tmp_path, 4) == [(-1, [[0], [1], [2], [3]])]
    (team,) = module.plan(module.read_nodes(str(tmp_path), [0, 1, 2, 3]), 3)
    assert (team.memory, team.threads, team.cpus) == (-1, 3, [])


def test_hyperthreads_are_not_cores(tmp_path: Path) -> None:
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    make_tree(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7"}, siblings)
    assert read(tmp_path, 8) == [(0, [[0, 4], [1, 5]]), (1, [[2, 6], [3, 7]])]
    assert read(tmp_path, [0, 2, 4, 7]) == [(0, [[0, 4]]), (1, [[2], [7]])]
    write(tmp_path / "cpu/cpu0/topology/thread_siblings_list", "0-")
    assert read(tmp_path, 8)[0] == (0, [[0], [1, 5], [4]])


def test_holes_and_nodes_without_cpus(tmp_path: Path) -> None:
    make_tree(tmp_path, {0: "0-1", 3: "4,6", 7: "", 250: "9"})
    assert read(tmp_path, [0, 1, 4, 6, 9]) == [(0, [[0], [1]]), (3, [[4], [6]]), (250, [[9]])]
    teams = module.plan(module.read_nodes(str(tmp_path), [0, 1, 4, 9]), 2)
    assert [team.memory for team in teams] == [0, 3]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("node/node1/cpulist", "2-x"),
        ("node/node1/cpulist", "3-2"),
        ("node/node1/cpulist", "2-99999999999999999999"),
        ("node/node1/cpulist", "2-3," * 4000),
        ("node/node1/cpulist", "1-3"),  # CPU 1 is on node 0 already
        ("node/node1/cpulist", "2"),  # CPU 3 is on no node
        ("node/online", "0-2"),  # no files for node 2
        ("node/online", "0-1024"),
    ],
)
def test_what_makes_no_sense_is_one_node(tmp_path: Path, file: str, text: str) -> None:
    make_tree(tmp_path, {0: "0-1", 1: "2-3"})
    assert len(read(tmp_path, 4)) == 2
    write(tmp_path / file, text)
    assert read(tmp_path, 4) == [(-1, [[0], [1], [2], [3]])]


def test_any_bytes_are_survived(tmp_path: Path) -> None:
    numbers = random.Random(1)
    for _ in range(60):
        make_tree(tmp_path, {0: "0-1", 1: "2-3"})
        for file in ("node/online", "node/node1/cpulist"):
            (tmp_path / file).write_bytes(bytes(numbers.choices(b"0123456789,-\n x", k=numbers.randrange(12))))
        cores = [core for _, cores in read(tmp_path, 4) for core in cores]
        assert sorted(cpu for core in cores for cpu in core) == [0, 1, 2, 3]


def test_ranks_share_the_cores(tmp_path: Path) -> None:
    make_tree(tmp_path, {0: "0-5", 1: "6-11"})
    nodes = module.read_nodes(str(tmp_path), list(range(12)))

    def mine(rank: int, ranks: int) -> list[tuple[int, int]]:
        return [(node.memory, len(node.cores)) for node in module.share(nodes, rank, ranks)]

    assert [mine(r, 2) for r in range(2)] == [[(0, 6)], [(1, 6)]]
    assert [mine(r, 3) for r in range(3)] == [[(0, 4)], [(0, 2), (1, 2)], [(1, 4)]]
    assert mine(0, 1) == [(0, 6), (1, 6)]
    assert all(sum(cores for _, cores in mine(r, 40)) == 1 for r in range(40))


@pytest.mark.parametrize(
    ("cores", "gbps", "best"),
    [
        (192, {48: 100, 96: 180, 128: 200, 192: 190}, 128),
        (96, {24: 195, 48: 200, 64: 200, 96: 200}, 24),
        (3, {1: 5, 2: 10, 3: 9}, 2),
        (2, {}, 2),
    ],
)
def test_threads_worth_having(cores: int, gbps: dict[int, float], best: int) -> None:
    measured = []

    def seconds(threads: int) -> float:
        measured.append(threads)
        return 1 / gbps[threads]

    assert worth_having(cores, seconds) == best
    assert measured == list(gbps)


def test_mbind_here() -> None:
    """Node 0 is everywhere, node 1000 nowhere: then a thread of the team touches, and the start line says so."""
    if not bound_on(0):
        pytest.skip("mbind is forbidden here")
    assert engine.placement() == "1 thread on 1 NUMA node"
    assert not bound_on(1000)
    assert engine.placement() == "1 thread on 1 NUMA node (mbind refused: weights lie where they are first touched)"


def bound_on(memory: int) -> bool:
    engine.start_teams([module.Team(memory, 1, [])], "auto")
    return bool(module.Buffer(1 << 20, 0).bound)


def test_a_matrix_is_for_as_many_nodes_as_it_was_made_for() -> None:
    engine.start_teams([module.Team(-1, 1, [])] * 2, "auto")
    matrix, x = NativeMatrix(64, 64, FORMATS["q8"], CPU), torch.ones(1, 64)
    engine.start(2, "auto")
    with pytest.raises(RuntimeError, match="a matrix made for 2 NUMA nodes meets an engine on 1"):
        cpu.linear(x, matrix, None)


def test_parts_of_a_matrix() -> None:
    engine.start_teams([module.Team(-1, threads, []) for threads in (2, 1, 3)], "auto")
    assert module.split(12) == [0, 4, 6, 12]
    assert module.split(1) == [0, 1, 1, 1]
    assert module.split(0) == [0, 0, 0, 0]
    matrix = NativeMatrix(100, 32, FORMATS["float32"], CPU)  # 7 blocks: 3, 1 and 3
    rows = torch.randn(100, 32)
    matrix.fill(0, rows[:61])
    matrix.fill(61, rows[61:])
    assert torch.equal(matrix.packed.dequantised(0, 100), rows)
    assert matrix.nbytes == 112 * 32 * 4


def test_a_model_over_two_nodes_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pinned, captured, and, on a machine without a node 1, with its weights placed by first touch."""
    save_tiny(tmp_path / "model", moe_intermediate_size=64)
    arrays = []
    for machine, line in (({0: "0-1"}, "2 threads\n"), ({0: "0", 1: "1"}, "2 threads on 2 NUMA nodes")):
        nodes = module.read_nodes(str(make_tree(tmp_path / f"{len(machine)}", machine)), [0, 1])
        monkeypatch.setattr(engine, "own_nodes", lambda nodes=nodes: nodes)
        case = tiny_case(tmp_path, tmp_path / "model", threads=2, exe_mode="graph", quantization={"method": "q8"})
        arrays.append(collect_logits(make_runner(case, tmp_path), [[5, 17, 3], [7]], steps=6))
        assert line in capsys.readouterr().out
        assert torch.get_num_threads() == 1  # PyTorch's threads leave the cores to ours
    for name, logits in arrays[0].items():
        np.testing.assert_array_equal(arrays[1][name], logits)


def test_threads_are_pinned_and_the_caller_freed() -> None:
    before = os.sched_getaffinity(0)
    last = max(before)
    engine.start_teams([module.Team(0, 1, [last]), module.Team(0, 2, sorted(before))], "auto")
    assert os.sched_getaffinity(0) == {last}
    engine.start_teams([module.Team(0, 1, [last])], "auto", [module.Team(0, 2, sorted(before))])
    for widened, cpus in ((True, before), (False, {last}), (True, before)):
        module.widen(widened)
        assert os.sched_getaffinity(0) == cpus
    engine.start(1, "auto")
    assert os.sched_getaffinity(0) == before


def divided(
    root: Path, nodes: dict[int, str], device: int, shadow: int, rank: int = 0, ranks: int = 1
) -> list[list[tuple[int, ...]]]:
    """(memory, threads, first and last CPU) of the teams of both pools."""
    cpus = 1 + max(int(text.rpartition("-")[2]) for text in nodes.values())
    mine = module.share(module.read_nodes(str(make_tree(root, nodes)), list(range(cpus))), rank, ranks)
    pools = module.divide(mine, device, shadow)
    return [[(t.memory, t.threads, *(t.cpus[:: max(1, len(t.cpus) - 1)])) for t in teams] for teams in pools]


def test_two_pools_divide_the_cores(tmp_path: Path) -> None:
    """The lists have for each pool its node, threads, first and last CPU."""
    four = {n: f"{24 * n}-{24 * n + 23}" for n in range(4)}
    assert divided(tmp_path, {0: "0-1"}, 2, 1) == [[(-1, 2)], [(-1, 1)]]  # too small: wherever the system puts them
    assert divided(tmp_path, {0: "0-1"}, 1, 1) == [[(-1, 1)], [(-1, 1)]]
    assert divided(tmp_path, {0: "0-15"}, 8, 4) == [[(-1, 8, 0, 11)], [(-1, 4, 12, 15)]]
    assert divided(tmp_path, {0: "0-15"}, 15, 1) == [[(-1, 15, 0, 14)], [(-1, 1, 15)]]
    assert divided(tmp_path, {0: "0-15"}, 16, 1) == [[(-1, 16)], [(-1, 1)]]
    assert divided(tmp_path, {0: "0-15"}, 16, 0) == [[(-1, 16)], []]
    assert divided(tmp_path, four, 64, 32) == [
        [(n, 16, 24 * n, 24 * n + 15) for n in range(4)],
        [(n, 8, 24 * n + 16, 24 * n + 23) for n in range(4)],
    ]
    one = [(0, 23, 0, 22), *((n, 24, 24 * n, 24 * n + 23) for n in (1, 2, 3))]
    assert divided(tmp_path, four, 95, 1) == [one, [(0, 1, 23)]]
    assert divided(tmp_path, four, 96, 4) == [
        [(n, 24, 24 * n, 24 * n + 23) for n in range(4)],
        [(n, 1, 24 * n, 24 * n + 23) for n in range(4)],
    ]
    for rank in range(2):
        assert divided(tmp_path, four, 36, 12, rank, 2) == [
            [(n, 18, 24 * n, 24 * n + 17) for n in (2 * rank, 2 * rank + 1)],
            [(n, 6, 24 * n + 18, 24 * n + 23) for n in (2 * rank, 2 * rank + 1)],
        ]


def test_long_steps_have_the_threads_of_both_pools() -> None:
    def together(own: list[tuple[int, int, list[int]]], others: list[tuple[int, int, list[int]]]) -> object:
        teams = engine.together([module.Team(*a) for a in own], [module.Team(*a) for a in others], 4)
        return [(team.memory, team.threads, team.cpus) for team in teams]

    assert together([(0, 2, [0, 1]), (1, 2, [4])], [(0, 1, [2]), (1, 1, [5])]) == [(0, 3, [0, 1, 2]), (1, 2, [4, 5])]
    assert together([(0, 2, [0, 1]), (1, 2, [4])], [(0, 1, [2])]) == []  # on other nodes
    assert together([(-1, 3, [])], [(-1, 2, [])]) == [(-1, 4, [])]
    assert together([(-1, 4, [])], [(-1, 2, [])]) == []


def test_the_engine_leaves_cores_to_the_shadow_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`threads: 0` takes what shadows leave; with as many the shadow pool gets just those, and a copier may use all."""
    nodes = module.read_nodes(str(make_tree(tmp_path, {0: "0-7", 1: "8-15"})), list(range(16)))
    monkeypatch.setattr(engine, "own_nodes", lambda: nodes)
    engine.start(0, "auto", rank=1, ranks=2, shadow=3)
    (device,), (shadow,) = module.teams(), engine.shadow_teams(3)
    assert (device.memory, device.threads, device.cpus) == (1, 5, [8, 9, 10, 11, 12])
    assert (shadow.memory, shadow.threads, shadow.cpus) == (1, 3, [13, 14, 15])
    assert engine.own_cpus() == list(range(8, 16))


def initramfs(program: bytes) -> bytes:
    """A cpio archive ("newc") with one executable file, `init`."""

    def entry(name: bytes, mode: int, data: bytes) -> bytes:
        fields = [0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name + b"\0"
        return b"".join(part + bytes(-len(part) % 4) for part in (head, data))

    return entry(b"init", 0o100755, program) + entry(b"TRAILER!!!", 0, b"")


@pytest.mark.thorough  # four virtual CPUs wait for each other without sleeping, which takes minutes beside others
def test_pages_and_threads_on_a_machine_of_four_nodes(tmp_path: Path) -> None:
    """Real placement by a real kernel, every page looked up: see native/numa_init.cpp. Says nothing about speed."""
    kernels = sorted((ROOT / ".venv" / "umbra-kernel").glob("vmlinuz-*"))
    if platform.machine() != "x86_64" or not kernels or not shutil.which("qemu-system-x86_64"):
        pytest.skip(
            "needs an x86-64 machine, qemu-system-x86_64 and a kernel image: bash test.sh fetches them on Debian"
        )
    parts = ["runtime/topology", *PRODUCTS, "shadow/copier"]
    sources = [TESTS / "numa_init.cpp", *(SOURCES / f"{part}.cpp" for part in parts)]
    print("compiling", flush=True)
    init = Path(program("numa_init", "g++", ["-O2", "-pthread"], sources, ["-static"]))
    (tmp_path / "initrd").write_bytes(initramfs(init.read_bytes()))
    nodes: list[Any] = []
    for n in range(4):
        nodes += ["-object", f"memory-backend-ram,id=m{n},size=128M"]
        nodes += ["-numa", f"node,nodeid={n},cpus={2 * n}-{2 * n + 1},memdev=m{n}"]
    print("booting", flush=True)
    done = subprocess.run(
        # Intel's way of telling hyperthreads is the one that qemu knows without hardware.
        [
            "qemu-system-x86_64",
            "-accel",
            "tcg,thread=multi",
            "-machine",
            "q35",
            "-cpu",
            "max,vendor=GenuineIntel",
            "-m",
            "512",
            "-smp",
            "8,sockets=4,cores=1,threads=2",
            "-nographic",
            "-no-reboot",
            "-nodefaults",
            "-serial",
            "stdio",
            *nodes,
            "-kernel",
            str(kernels[-1]),
            "-initrd",
            str(tmp_path / "initrd"),
            "-append",
            "console=ttyS0 quiet panic=-1 mitigations=off nokaslr",
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    print(done.stdout)
    assert "RESULT PASS" in done.stdout, done.stdout + done.stderr
