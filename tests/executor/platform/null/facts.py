"""The facts of the device, and its section of a case."""

from dataclasses import dataclass

from umbra.executor.config.device import DeviceFacts
from umbra.executor.config.schema import key


@dataclass(frozen=True)
class NullSettings:
    greeting: str = key("", "printed when the device is opened")


FACTS = DeviceFacts(
    platform="tests.executor.platform.null.device:NullPlatform",
    layout="tests.executor.platform.null.device:layout",
    exe_modes=("eager", "replayed"),
    default_mode="replayed",
    page_size=24,
    page_multiple=3,
    quantised=(),
    sections={"null_config": NullSettings},
    rules="tests.executor.platform.null.device:check",
)
