"""A platform is a device with its memory, collectives, graphs and ops. Its libraries are imported when it is used."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from umbra.executor.config.platforms import PLATFORMS
from umbra.models.registry import load

if TYPE_CHECKING:
    from umbra.executor.platform.base import Platform
    from umbra.executor.platform.settings import PlatformSettings


def load_platform(name: str) -> "type[Platform]":
    """The class of the platform `name`."""
    platform: type[Platform] = load(PLATFORMS[name].name)
    return platform


def start_environment(name: str, settings: "PlatformSettings", given: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that ranks on platform `name` need in addition to those `given`."""
    environment = PLATFORMS[name].environment
    added: dict[str, str] = load(environment)(settings, given) if environment else {}
    return added
