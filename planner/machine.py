"""The machines of a cluster: what a device, its links and its host can do, read from a YAML file of constants.

A constant that a prediction needs and the file leaves out is asked for by its name. Rates are in thousand millions of
bytes a second, one direction.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from umbra.base.errors import UserError
from umbra.base.files import ROOT
from umbra.executor.config.load import read_yaml
from umbra.executor.config.platforms import PLATFORMS
from umbra.executor.config.schema import key, read, section

FOLDER = ROOT / "planner" / "hardware"


@dataclass(frozen=True)
class DeviceRates:
    memory_gb: float | None = key(None, "memory of a device, in units of 2^30 bytes", minimum=0.001)
    reserved_gb: float = key(0.0, "memory that the system, operators and graphs take of it", minimum=0)
    read_gbps: float | None = key(None, "peak rate of its memory", minimum=0.001)
    read_fraction: float | None = key(None, "part of it that kernels reach", minimum=0.01, maximum=1)
    attention_fraction: float | None = key(None, "the same of attention over cached tokens", minimum=0.01, maximum=1)
    tflops: float | None = key(None, "peak of its matrix units with 16-bit floats", minimum=1e-6)
    multiply_fraction: float | None = key(None, "part of it that kernels reach", minimum=0.01, maximum=1)
    quantised_tflops: float | None = key(
        None, "rate of products that kernels for few rows reach with quantised weights", minimum=1e-6
    )
    unpack_gbps: float | None = key(None, "rate at which kernels for many rows read quantised weights", minimum=1e-6)
    launch_us: float | None = key(None, "time of a kernel in a graph that has next to nothing to do", minimum=0)
    attention_us: float | None = key(None, "the same of attention", minimum=0)
    step_us: float = key(0.0, "time of the host between two steps that the device does not hide", minimum=0)


@dataclass(frozen=True)
class Links:
    devices: int | None = key(None, "devices that these links join; beyond them the next level is used", minimum=1)
    gbps: float | None = key(None, "rate of a device", minimum=1e-6)
    collective_us: float | None = key(None, "time of a collective of a few bytes between two devices", minimum=0)
    peer_us: float | None = key(None, "what each further device adds to it", minimum=0)
    exchange_us: float | None = key(None, "what a dispatch or combine of experts' rows takes beyond it", minimum=0)


@dataclass(frozen=True)
class HostRates:
    devices: int | None = key(None, "devices of a host", minimum=1)
    memory_gb: float | None = key(None, "memory of a host", minimum=0.001)
    memory_gbps: float | None = key(None, "rate of its memory, which kernels and copies share", minimum=1e-6)
    read_gbps: float | None = key(None, "rate at which its kernels read the weights of experts", minimum=1e-6)
    tflops: float | None = key(None, "rate of its kernels' products", minimum=1e-6)
    copy_gbps: float | None = key(None, "rate at which experts are copied to a device", minimum=1e-6)
    handover_us: float | None = key(None, "time to hand a layer's rows to it and to take the sums back", minimum=0)


@dataclass(frozen=True)
class Hardware:
    description: str = key("", "one line")
    platform: str = key("ascend", "of the cases that run on it", choices=tuple(PLATFORMS))
    node: Links = section(Links)
    pod: Links = section(Links)
    network: Links = section(Links)
    device: DeviceRates = section(DeviceRates)
    host: HostRates = section(HostRates)
    name: str = ""

    def need(self, path: str) -> float:
        """The constant at `path`, such as device.read_gbps."""
        part, _, name = path.partition(".")
        value: float | None = getattr(getattr(self, part), name)
        if value is None:
            raise UserError(f"hardware {self.name}: {path} is missing, which this prediction needs: add it to the file")
        return value

    def with_link(self, gbps: float) -> "Hardware":
        """The same with another rate of copies from the host."""
        return dataclasses.replace(self, host=dataclasses.replace(self.host, copy_gbps=gbps))

    def links(self, span: int) -> str:
        """The level of links that joins `span` neighbouring devices: node, pod or network."""
        for level in ("node", "pod"):
            devices = getattr(self, level).devices
            if devices is not None and span <= devices:
                return level
        return "network"


def read_hardware(name: str) -> Hardware:
    """The hardware of a file in planner/hardware/, or of a path ending in .yaml."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.yaml")))
        raise UserError(f"hardware: {name}: no such file; there are {known}, or give a path ending in .yaml")
    hardware = read(Hardware, read_yaml(path, "hardware"), path.name, "docs/cluster_keys.md")
    return dataclasses.replace(hardware, name=path.stem)
