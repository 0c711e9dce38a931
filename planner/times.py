"""Predicts the time of a step from what it does and what the hardware can do.

    kernel      launch + max(bytes / rate of memory, products / rate of products)
    collective  time of a few bytes between so many devices + bytes over the links of a device / their rate
    step        the sum, since a graph runs its kernels one after another, + what the host adds

Bytes over the links, for n bytes of input on each of r ranks, as algorithms for meshes send them:

    all_reduce      the less of (r - 1) n, in one shot, and 2 (r - 1) / r n, in two, which costs the fixed time twice
    all_gather      (r - 1) n
    reduce_scatter  (r - 1) / r n
    dispatch        (r - 1) / r n to the ranks of the experts, and combine as many back

Experts are used evenly, and every rank is as fast as every other.
"""

from dataclasses import dataclass

from umbra.executor.config.platforms import PLATFORMS
from umbra.ops.counted import Collective, Done
from umbra.planner.machine import Hardware
from umbra.planner.work import RankWork

PARTS = ("weights", "KV", "activations", "products", "collectives", "launches", "shadow experts", "host")
US, GIGA, TERA = 1e-6, 1e9, 1e12


@dataclass(frozen=True)
class Times:
    """Seconds of a step, by PARTS. "products" is what reading does not hide."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def over(self, tokens: float) -> "Times":
        """The part that one of so many tokens takes."""
        return Times({part: seconds / tokens for part, seconds in self.parts.items()})


def collective_seconds(message: Collective, span: int, hardware: Hardware) -> tuple[float, str]:
    """The time of one collective, and its algorithm. `span` neighbouring devices have its ranks."""
    level, r, n = hardware.links(span), message.ranks, message.nbytes
    rate = hardware.need(f"{level}.gbps") * GIGA
    fixed = US * (hardware.need(f"{level}.collective_us") + (r - 2) * hardware.need(f"{level}.peer_us"))
    if message.kind == "all_reduce":
        once, twice = fixed + (r - 1) * n / rate, 2 * fixed + 2 * (r - 1) / r * n / rate
        return (once, "one shot") if once <= twice else (twice, "two shots")
    if message.kind == "all_gather":
        return fixed + (r - 1) * n / rate, "mesh"
    seconds = fixed + (r - 1) / r * n / rate
    if message.kind == "reduce_scatter":
        return seconds, "mesh"
    return seconds + US * hardware.need(f"{level}.exchange_us"), "pairwise"


@dataclass(frozen=True)
class Placing:
    """The placement of a layout's ranks and experts. spans[group]: how many neighbouring devices hold the ranks of that
    rank group. `resident`: the share of the experts that the devices hold; hosts compute the others, each for `sharing`
    ranks."""

    spans: dict[str, int]
    resident: float = 1.0
    sharing: int = 1


def step_times(work: RankWork, placing: Placing, hardware: Hardware) -> Times:
    read = hardware.need("device.read_gbps") * hardware.need("device.read_fraction") * GIGA
    attending = hardware.need("device.read_gbps") * hardware.need("device.attention_fraction") * GIGA
    rate = hardware.need("device.tflops") * hardware.need("device.multiply_fraction") * TERA
    launch, on_host = hardware.need("device.launch_us") * US, not PLATFORMS[hardware.platform].own_memory
    parts = dict.fromkeys(PARTS, 0.0)
    for done in work.done:
        here = placing.resident if done.mixture else 1.0
        weights, activations = here * done.weights / read, here * done.rows / read
        cached = done.cached / attending
        product = 2 * here * done.macs / rate
        if not done.plain:
            few = 2 * here * done.macs / (hardware.need("device.quantised_tflops") * TERA)
            if on_host:  # whose kernels are the same for few rows and for many
                product = few
            else:  # by kernels for few rows or by those that unpack, whichever is quicker
                unpacked = here * done.weights / (hardware.need("device.unpack_gbps") * GIGA)
                if done.few and max(few, weights) <= max(product, unpacked):
                    product = few
                else:
                    weights = unpacked
        reading = weights + activations + cached
        parts["weights"] += done.times * weights
        parts["KV"] += done.times * cached
        parts["activations"] += done.times * activations
        parts["products"] += done.times * max(0.0, product - reading)
        first = hardware.need("device.attention_us") * US if done.name.endswith("attention") else launch
        parts["launches"] += done.times * (first + (done.kernels - 1) * launch)
        if here < 1:  # the host computes the others, or they are streamed to the device, whichever is quicker
            own, whole = max(reading, product), max(reading, product) / here if here else 0.0
            streamed = (1 - here) * done.weights / (hardware.need("host.copy_gbps") * GIGA)
            exposed = min(
                max(0.0, _shadow(done, 1 - here, placing.sharing, hardware) - own), max(whole, streamed) - own
            )
            parts["shadow experts"] += done.times * exposed
    for message in work.messages:
        seconds, _ = collective_seconds(message, placing.spans[message.group], hardware)
        parts["collectives"] += message.times * seconds
    parts["host"] = hardware.device.step_us * US
    return Times(parts)


def _shadow(done: Done, share: float, ranks: int, hardware: Hardware) -> float:
    """Seconds that a host needs for the share of a mixture's experts that the devices of its `ranks` ranks do not
    hold."""
    reading = ranks * share * done.weights / (hardware.need("host.read_gbps") * GIGA)
    product = ranks * share * 2 * done.macs / (hardware.need("host.tflops") * TERA)
    return US * hardware.need("host.handover_us") + max(reading, product)
