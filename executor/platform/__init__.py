"""A platform is a device with its memory, collectives, graphs and ops."""

from typing import TYPE_CHECKING

from executor.config.platforms import PLATFORMS
from models.registry import load

if TYPE_CHECKING:
    from executor.platform.base import Platform


def load_platform(name: str) -> "type[Platform]":
    """The class of the platform `name`; its libraries are imported only now."""
    platform: type[Platform] = load(PLATFORMS[name].place)
    return platform
