"""The devices: one row each, which names the device's folder. Its `facts.py` says where everything else of it is."""

from umbra.executor.config.device import DeviceFacts
from umbra.models.registry import load

ROWS = {
    "cpu": "umbra.executor.platform.cpu",
    "ascend": "umbra.executor.platform.ascend",
    "cuda": "umbra.executor.platform.cuda",
}
PLATFORMS: dict[str, DeviceFacts] = {name: load(f"{folder}.facts:FACTS") for name, folder in ROWS.items()}
