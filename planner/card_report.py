"""`umbra plan --cluster FILE` with `card.models`: what one device and its host do with each model."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError
from umbra.base.files import write_json
from umbra.executor.config.units import GB
from umbra.planner.card import Decoded, decoded, prefill, resident_share
from umbra.planner.cluster import Cluster
from umbra.planner.machine import Hardware, read_hardware
from umbra.planner.served import Served, served
from umbra.planner.streams import CPU, DEVICE, LINK_IN

SIDES = {"device": DEVICE, "link": LINK_IN, "host": CPU}
ASSUMED = (
    "Assumed: hit rates by the named curve (cpu_offload/planner/hits.py), prompts use experts evenly, one copy of the",
    "experts on the host, whose kernels get what copies leave of its memory's rate. Nothing here was measured.",
)


def show_card_plan(cluster: Cluster, json: Path | None, plot: Path | None) -> None:
    if plot:
        raise UserError("--plot: with card.models nothing is drawn: leave it out")
    hardware, card = read_hardware(cluster.hardware), cluster.card
    load = cluster.load
    print(f"one device of {hardware.name}, sequences of {load.prompt_tokens} + {load.output_tokens} tokens")
    print("\n".join(ASSUMED))
    rows = []
    for name in card.models:
        row = row_of(served(name, cluster, hardware), cluster, hardware)
        print("\n".join(["", *lines_of(row, cluster, hardware)]))
        rows.append(row)
    if json:
        write_json(json, {"rows": rows})


def row_of(model: Served, cluster: Cluster, hardware: Hardware) -> dict[str, Any]:
    card, load = cluster.card, cluster.load

    def decode(curve: str, sequences: int, accepted: float | None) -> Decoded | None:
        return decoded(model, load, hardware, curve, sequences, accepted)

    tried: tuple[float | None, ...] = (None, *card.accepted * model.guesses)
    steps = [
        {"curve": curve, "accepted": accepted, **dataclasses.asdict(speed)}
        for curve in card.curves
        for accepted in tried
        for sequences in card.sequences
        if (speed := decode(curve, sequences, accepted))
    ]
    prompts = []
    for link in card.links or (hardware.need("host.copy_gbps"),):
        linked = hardware.with_link(link)
        for prompt in card.prompts:
            resident = resident_share(model, linked, 1, prompt + load.output_tokens)
            if resident is not None:
                trace = prefill(model, linked, prompt, cluster.search.chunk, resident)
                busy = {name: trace.busy(what) for name, what in SIDES.items()}
                longest = max(busy, key=lambda name: busy[name])
                row = {"gbps": link, "prompt": prompt, "resident": resident, "longest": longest, "total": trace.seconds}
                prompts.append({**row, **busy})
    m, some_missing = model.mixtures, any(one["resident"] < 1 for one in (*steps, *prompts))
    sizes = {"host_bytes": m.nbytes * some_missing, **dataclasses.asdict(m)}
    return {"model": model.name, **sizes, "decode": steps, "prefill": prompts}


def lines_of(row: dict[str, Any], cluster: Cluster, hardware: Hardware) -> list[str]:
    card = cluster.card
    needed, room = row["host_bytes"] / 1e9, hardware.need("host.memory_gb") * GB / 1e9
    held = f"the host holds {needed:.1f} GB" if needed else "all fit on the device"
    lines = [
        f"{row['model']}: {row['layers']} layers of {row['experts']} experts, {row['top_k']} a token, "
        f"{row['expert_bytes'] / 1e6:.2f} MB each; {held}" + f", more than its {room:.0f}" * (needed > room)
    ]
    steps = {(one["curve"], one["accepted"], one["sequences"]): one for one in row["decode"]}

    def line(name: str, cells: Iterable[str]) -> str:
        return f"  {name:<38}" + "".join(f"{cell:>16}" for cell in cells)

    lines.append(line("tokens a second (hit rate), sequences:", map(str, card.sequences)))
    for curve, accepted in dict.fromkeys(key[:2] for key in steps):
        speeds = [steps.get((curve, accepted, sequences)) for sequences in card.sequences]
        name = curve if accepted is None else f"{curve}, a guess right {accepted:.0%}"
        lines.append(line(name, (f"{one['rate']:.1f} ({one['hit']:.2f})" if one else "do not fit" for one in speeds)))
    times = {(one["gbps"], one["prompt"]): one for one in row["prefill"]}
    lines.append(line("first token after s (longest), prompts:", map(str, card.prompts)))
    for gbps in dict.fromkeys(key[0] for key in times):
        prefills = [times.get((gbps, prompt)) for prompt in card.prompts]
        cells = (f"{one['total']:.2f} ({one['longest']})" if one else "does not fit" for one in prefills)
        lines.append(line(f"link of {gbps:g} GB/s", cells))
    return lines
