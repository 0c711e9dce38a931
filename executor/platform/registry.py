"""Looks up the parts of devices by the names in their facts. A device's libraries are imported when it is used."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from umbra.executor.config.platforms import PLATFORMS
from umbra.models.registry import load

if TYPE_CHECKING:
    from umbra.executor.platform.base import Platform
    from umbra.executor.platform.settings import PlatformSettings


def load_platform(name: str) -> "type[Platform]":
    """The class of the platform `name`."""
    platform: type[Platform] = load(PLATFORMS[name].platform)
    return platform


def start_environment(name: str, settings: "PlatformSettings", given: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that ranks on platform `name` need in addition to those `given`."""
    environment = PLATFORMS[name].environment
    added: dict[str, str] = load(environment)(settings, given) if environment else {}
    return added


def clear_graphs(case_name: str) -> int:
    """Removes the graphs that any device has kept of the case. -> their number"""
    return sum(load(facts.clear_graphs)(case_name) for facts in PLATFORMS.values() if facts.clear_graphs)


def lost_another_rank(stack: str) -> bool:
    """Returns whether the stack of a failed rank says that a device's collectives have lost another rank."""
    return any(facts.lost_rank and re.search(facts.lost_rank, stack) for facts in PLATFORMS.values())
