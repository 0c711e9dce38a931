"""Versions that were tested together, and reading them from an installation; no Ascend software is needed."""

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from umbra.base.errors import UserError
from umbra.executor.platform.ascend.versions import Versions, check_versions, read_versions

TESTED = Versions("2.13.0+cpu", "2.13.0", None, None)
CLAIMED = Versions("2.10.0", "2.10.0.post4", "9.1.0", "25.5.2")


@pytest.mark.parametrize(
    ("installed", "complaint"),
    [
        (replace(TESTED, torch="2.12.0"), "torch 2.12.0 and torch_npu 2.13.0 do not belong together: this torch_npu"),
        (replace(CLAIMED, torch_npu="2.5.1.post1"), "torch_npu 2.5.1.post1 is not supported: supported are 2.14.0"),
        (replace(CLAIMED, cann="8.1.RC1"), "CANN 8.1.RC1 is not supported with torch_npu 2.10.0: install CANN 9.1 or"),
        (replace(CLAIMED, driver="25.0.rc1.1"), "driver 25.0.rc1.1 is too old for CANN 9.1.0: install 25.2 or later"),
        (replace(TESTED, cann="8.5.0", driver="24.1.0"), "driver 24.1.0 is too old for CANN 8.5.0: install 25.0"),
    ],
)
def test_what_does_not_belong_together_is_refused(installed: Versions, complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        check_versions(installed, strict=False)
    assert complaint in str(raised.value)


def test_an_untested_pair_is_a_warning_and_strictly_an_error() -> None:
    (warning,) = check_versions(CLAIMED, strict=False)
    assert warning.startswith("torch_npu 2.10.0.post4 with torch 2.10.0 is untested: tested is 2.13.0 with 2.13.0")
    with pytest.raises(UserError, match=r"2\.10\.0 is untested: .*; install that, or set strict: false"):
        check_versions(CLAIMED, strict=True)


def test_what_could_not_be_read_is_named_and_never_an_error() -> None:
    warnings = check_versions(Versions(None, None, None, None), strict=True)
    assert [w.split()[3] for w in warnings] == ["torch", "torch_npu", "cann", "driver"]
    assert all("could not be read" in w for w in warnings)
    assert len(check_versions(TESTED, strict=True)) == 2


def install(home: Path, **files: str) -> Path:
    names = {"cfg": "version.cfg", "info": f"{platform.machine()}-linux/ascend_toolkit_install.info"}
    for name, text in files.items():
        path = home / names[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return home


@pytest.mark.parametrize(
    ("files", "runtime", "cann"),
    [
        ({"info": "package_name=Ascend-cann-toolkit\nversion=8.5.0\ninnerversion=V100\n"}, None, "8.5.0"),
        (
            {
                "cfg": "# version: 1.0\nruntime_running_version=[7.0:7.0.0]\n"
                "toolkit_running_version=[7.7.T9.0.B057:8.1.T6][7.7.T20.0.B210:8.1.RC1]\n"
                "toolkit_installed_version=[7.7.T9.0.B057:8.1.T6]\n"
            },
            None,
            "8.1.RC1",
        ),
        ({"cfg": "nothing here\n"}, "8.3.RC1", "8.3.RC1"),
        ({}, None, None),
    ],
)
def test_cann_is_read_from_its_files_or_its_runtime(
    tmp_path: Path, files: dict[str, str], runtime: str | None, cann: str | None
) -> None:
    assert read_versions(install(tmp_path, **files), runtime).cann == cann
