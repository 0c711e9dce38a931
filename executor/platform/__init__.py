"""The platforms: a lazily importing registry, so that naming one does not import another's libraries."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor.platform.base import Platform


@dataclass(frozen=True)
class PlatformEntry:
    module: str
    class_name: str
    exe_modes: tuple[str, ...]


PLATFORMS = {
    "cpu": PlatformEntry("executor.platform.cpu", "CpuPlatform", ("eager",)),
}


def load_platform(name: str) -> "type[Platform]":
    entry = PLATFORMS[name]  # the configuration has refused unknown names
    platform: type[Platform] = getattr(importlib.import_module(entry.module), entry.class_name)
    return platform
