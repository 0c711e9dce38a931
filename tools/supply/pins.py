"""Pins: the packages that a requirement file asks for, or a lock file fixes, with the hashes of their files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from errors import UserError
from files import ROOT

LOCKS = Path(__file__).parent / "locks"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
# The requirement files that each lock file is made from. PyTorch has lock files of its own, because two builds of one
# version differ in what they need, and no marker tells them apart: that of the index loads CUDA's libraries when it is
# imported, also on a machine without a GPU; one for CPUs, where pip is set up to find it, does not.
SOURCES = {
    "main": ("requirements.txt", "requirements-dev.txt"),
    "ascend": ("requirements-ascend.txt",),
    "compare": ("requirements-compare.txt",),
    "compare-moe": ("requirements-compare-moe.txt",),
    "fuzz": ("requirements-fuzz.txt",),
    "supply": ("requirements-supply.txt",),
}
TORCH_CPU, TORCH_CUDA = "torch-cpu", "torch-cuda"
OF_TORCH = ("torch", "triton", "nvidia-", "cuda-")


@dataclass(frozen=True)
class Pin:
    name: str  # canonical
    version: str
    marker: str = ""
    hashes: tuple[str, ...] = ()  # sha256 of every file of this version
    needed_by: tuple[str, ...] = ()

    def holds(self, environment: Mapping[str, str]) -> bool:
        return not self.marker or Marker(self.marker).evaluate(dict(environment))

    @property
    def of_torch(self) -> bool:
        return self.name.startswith(OF_TORCH)


def environments() -> Iterator[dict[str, str]]:
    """What the markers see on each Python and processor that Umbra supports."""
    for python in PYTHONS:
        for machine in MACHINES:
            yield {
                "python_version": python,
                "python_full_version": f"{python}.0",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
                "platform_machine": machine,
                "platform_system": "Linux",
                "sys_platform": "linux",
                "os_name": "posix",
            }


def lock_path(name: str) -> Path:
    return LOCKS / f"{name}.lock"


def read_requirements(names: Sequence[str]) -> list[Pin]:
    return [pin for name in names for pin in read(ROOT / name)]


def read(path: Path) -> list[Pin]:
    """The pins of a requirement file or a lock file."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())  # a pin and its hashes are one line
    pins: list[Pin] = []
    for line in text.splitlines():
        about, _, comment = line.partition("#")
        via = tuple(name.strip() for name in comment.removeprefix(" via ").split(",")) if " via " in comment else ()
        if not about.strip():
            if via and pins:  # where there is one, the comment follows its pin
                pins[-1] = replace(pins[-1], needed_by=via)
            continue
        found = re.fullmatch(
            r"([\w.-]+)==([\w.+!]+)\s*(?:;\s*(.*?))?((?:\s+--hash=sha256:[0-9a-f]{64})*)", about.strip()
        )
        if not found:
            raise UserError(
                f"{path}: not a pinned package: {about.strip():.200}: write NAME==VERSION, and perhaps a marker"
            )
        name, version, marker, hashes = found.groups()
        sums = tuple(re.findall(r"[0-9a-f]{64}", hashes))
        pins.append(Pin(canonicalize_name(name), version, (marker or "").strip(), sums))
    return pins
