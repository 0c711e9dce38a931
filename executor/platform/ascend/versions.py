"""The versions of torch, torch_npu, CANN and the driver that belong together, and what is installed here.

"claimed" are the pairs that the torch_npu wheels require and that the compatibility tables of torch_npu and CANN
publish; "tested" are only those that the tests of this project run against.
"""

import importlib.metadata
import platform
import re
from dataclasses import dataclass, fields
from pathlib import Path

from umbra.base.errors import UserError

DRIVER_INFO = Path("/usr/local/Ascend/driver/version.info")


@dataclass(frozen=True)
class Versions:
    """The installed versions; None: could not be read."""

    torch: str | None
    torch_npu: str | None
    cann: str | None
    driver: str | None


@dataclass(frozen=True)
class TorchNpuRelease:
    """One release of torch_npu, which needs torch of the same number. Its .postN releases count as the release."""

    release: str
    cann: tuple[str, ...]  # the series published for it; none: not published yet
    status: str


ROWS = (
    TorchNpuRelease("2.14.0", (), "claimed"),
    TorchNpuRelease("2.13.0", (), "tested"),  # the real wheels over stand-in CANN libraries; nothing here ran on an NPU
    TorchNpuRelease("2.12.0", ("9.1",), "claimed"),
    TorchNpuRelease("2.11.0", ("9.1",), "claimed"),
    TorchNpuRelease("2.10.0", ("9.1", "9.0"), "claimed"),
    TorchNpuRelease("2.9.0", ("9.1", "9.0", "8.5"), "claimed"),
    TorchNpuRelease(
        "2.8.0", ("9.0", "8.5"), "claimed"
    ),  # 8.3 is published for it as well, but refuses the routing of 30B
)
OLDEST_DRIVER = {"9.1": "25.2", "9.0": "25.0", "8.5": "25.0"}  # for a series of CANN


def read_versions(cann_home: Path | None, cann: str | None = None, driver_info: Path = DRIVER_INFO) -> Versions:
    """The versions installed here. `cann_home`: where CANN is installed; `cann`: the version that its runtime reports,
    used if no file there has it."""
    driver = _first(driver_info, r"package_version=(\S+)", r"Version=(\S+)")
    return Versions(_package("torch"), _package("torch_npu"), _read_cann(cann_home) or cann, driver)


def check_versions(installed: Versions, strict: bool) -> list[str]:
    """Warnings about versions that could not be checked or are not tested together; with `strict` the latter raise."""
    unread = [field.name for field in fields(installed) if getattr(installed, field.name) is None]
    warnings = [f"the version of {name} could not be read, so it is not checked" for name in unread]
    row = _row(installed)
    if row and installed.cann:
        warnings += _check_cann(installed.cann, row)
    if installed.cann and installed.driver:
        warnings += _check_driver(installed.cann, installed.driver)
    if row and row.status != "tested":
        tested = ", ".join(r.release for r in ROWS if r.status == "tested")
        both = f"torch_npu {installed.torch_npu} with torch {installed.torch}"
        untested = f"{both} is untested: tested is {tested} with {tested}"
        if strict:
            raise UserError(f"{untested}; install that, or set strict: false")
        warnings.append(untested)
    return warnings


def _row(installed: Versions) -> TorchNpuRelease | None:
    """The row of the torch_npu found. Refuses a torch_npu without a row, and a torch that does not belong to it."""
    if not installed.torch_npu:
        return None
    row = next((row for row in ROWS if _belongs(installed.torch_npu, row.release)), None)
    if not row:
        raise UserError(
            f"torch_npu {installed.torch_npu} is not supported: supported are "
            f"{', '.join(r.release for r in ROWS)}, each with torch of the same number"
        )
    if installed.torch and not _belongs(installed.torch, row.release):
        raise UserError(
            f"torch {installed.torch} and torch_npu {installed.torch_npu} do not belong together: this torch_npu needs "
            f"torch {row.release}: reinstall one of the two"
        )
    return row


def _check_cann(cann: str, row: TorchNpuRelease) -> list[str]:
    if not row.cann:
        return [f"no version of CANN is published for torch_npu {row.release} yet, so CANN {cann} is not checked"]
    if not any(_belongs(cann, series) for series in row.cann):
        raise UserError(
            f"CANN {cann} is not supported with torch_npu {row.release}: install CANN {' or '.join(row.cann)}"
        )
    return []


def _check_driver(cann: str, driver: str) -> list[str]:
    oldest = next((oldest for series, oldest in OLDEST_DRIVER.items() if _belongs(cann, series)), None)
    if not oldest:
        return [f"the oldest driver for CANN {cann} is not known here, so driver {driver} is not checked"]
    if _numbers(driver) < _numbers(oldest):
        raise UserError(f"driver {driver} is too old for CANN {cann}: install {oldest} or later")
    return []


def _belongs(version: str, series: str) -> bool:
    """`2.10.0.post4` and `2.10.0+cpu` belong to `2.10.0`, `9.10.0` does not to `9.1`."""
    return re.match(re.escape(series) + r"(?![0-9])", version) is not None


def _numbers(version: str) -> list[int]:
    """`25.3.rc1` -> [25, 3]"""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read_cann(home: Path | None) -> str | None:
    if not home:
        return None
    info = home / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
    of_toolkit = r"toolkit_(?:running|installed)_version=.*\[[^\]:]*:([^\]]+)\]\s*$"  # [7.6.0.1.220:8.0.0], newest last
    return _first(info, r"version=(\S+)") or _first(home / "version.cfg", of_toolkit)


def _first(path: Path, *patterns: str) -> str | None:
    """The group of the first of `patterns` that any line of the file begins with."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    matches = (re.search(f"^{pattern}", text, re.MULTILINE) for pattern in patterns)
    return next((match.group(1) for match in matches if match), None)
