"""Compares the model of one device with experts in host memory with published figures, and sets Umbra beside a rival.

    .venv/bin/umbra bench card_validation [--json FILE]

Nothing is fitted. The rival is cann-recipes-infer's DeepSeek-V4-Flash on one NPU (commits 1a7fbd3 and 822a7ee, which
has GLM-5.3-Flash as well): its documents have the constants of planner/models/. Where a publication does not say what
a machine can do, some of its own figures are inputs, as `note` says, and the rows between them are predicted.

A row, of the first table and of `rows` in the JSON file:
  what        model, engine and machine
  predicted, published   in `unit`; ratio: predicted / published
  complete    whether all that the prediction needs is published
  note        inputs and source

The second table, `beside` in the JSON file, has for each side a figure and its kind: published, model, or simulated:
by a run's own ring with a clock.
"""

import dataclasses
from collections.abc import Iterator

from umbra.base.errors import run_main
from umbra.cpu_offload.planner.hits import CURVES, hit_rate
from umbra.planner.card import decoded, prefill, resident_share
from umbra.planner.cluster import Load
from umbra.planner.machine import Hardware, read_hardware
from umbra.planner.served import NumberedModel, named
from umbra.planner.times import GIGA, TERA
from umbra.tools.benchmarks.output import Row, flags, printed, write_rows

COLUMNS = (
    ("what", "what", 52, ""),
    ("unit", "unit", 7, ""),
    ("predicted", "predicted", 11, ".2f"),
    ("published", "published", 11, ".2f"),
    ("ratio", "ratio", 7, ".2f"),
    ("complete", "complete", 10, ""),
    ("note", "  note", 4, ""),
)
BESIDE = (
    ("what", "DeepSeek-V4-Flash, one A3 die, 40 Kunpeng cores", 52, ""),
    ("rival", "rival", 20, ""),
    ("umbra", "Umbra", 24, ""),
    ("note", "  note", 4, ""),
)
LEFT_OUT = (
    "Left out: V4-Flash by KTransformers on 8 x 5090 with and without MTP, whose host and residents are not published",
    "(a step grew 1.54 times; the model allows 1, if the GPUs decide, to 1.98, if the experts do); the rival's other",
    "lengths, for which no hit rate is published; growth with rows on machines whose rates are not published.",
)
RECIPE = "cann-recipes-infer, dsv4_flash_single_card_design.md"
STAGED_GBPS = 15  # page cache to pinned memory with 32 threads, a layer ahead: RECIPE
SENT_GBPS = 21.4  # 428 MB in 20 ms from pinned memory: the same
CONVERTED_S = 0.082  # a layer, MXFP4 to int8: the same
PREFILLS = {118: 15.4, 801: 15.6, 7_800: 16.5, 15_600: 17.6, 31_500: 20.3}  # tokens: seconds, warm
LENGTHS = {118: 21.6, 801: 22.6, 7_800: 19.8, 15_600: 19.3, 31_500: 19.2}  # tokens: tokens a second after them
NEWER = "cann-recipes-infer, glm53_flash_single_card_design.md"
GLM_PREFILLS = {630: 18.73, 13_933: 25.54, 15_800: 26.58}
KT = "FP8, 4 x 4090, 6454S; 0 and 100 % are inputs"
SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)
KT_SPEEDS = {
    "even": ("static counts", (58.6, 61.9, 72.8, 82.3, 100.7)),
    "qwen3_8_moved": ("residents that move", (70.2, 74.7, 81.0, 82.3, 92.3)),
}


def rival_prefill(model: NumberedModel, hardware: Hardware, tokens: int) -> float:
    """Seconds of the recipe's prefill: all experts of a layer are staged one layer ahead, then sent and converted on
    the stream that computes."""
    m, active = model.mixtures, model.numbers.active_billions * 1e9
    staged = m.experts * m.expert_bytes / (STAGED_GBPS * GIGA)
    rate = hardware.need("device.tflops") * hardware.need("device.multiply_fraction") * TERA
    sent = (
        m.experts * m.expert_bytes / (SENT_GBPS * GIGA)
        + CONVERTED_S * m.experts / 256
        + 2 * active * tokens / rate / m.layers
    )
    return staged + m.layers * max(staged, sent)


def row(what: str, unit: str, predicted: float, published: float, note: str, complete: bool = True) -> Row:
    ratio = predicted / published
    return {
        "what": what,
        "unit": unit,
        "predicted": predicted,
        "published": published,
        "ratio": ratio,
        "complete": "yes" if complete else "no",
        "note": "  " + note,
    }


def rows(flash: NumberedModel, hardware: Hardware) -> Iterator[Row]:
    m, read = flash.mixtures, hardware.need("host.read_gbps") * GIGA
    name = "V4-Flash, cann-recipes-infer, A3"
    at_16k = 1 / flash.decode(1, 15_600, 0.262, 0)
    note = f"36.4 and 4.8 ms of the device and the hit rate .262 are its own: {RECIPE}"
    yield row(f"{name}: decode after 15,600", "tok/s", at_16k, LENGTHS[15_600], note)
    alone = m.layers * m.top_k * m.expert_bytes / read
    yield row(
        f"{name}: prefill on the CPU", "ms/tok", alone * 1e3, 33.0, "an expert is read again for each token: the same"
    )
    for tokens, seconds in PREFILLS.items():
        predicted = rival_prefill(flash, hardware, tokens)
        yield row(
            f"{name}: prefill of {tokens:,}", "s", predicted, seconds, "staged, sent, converted, computed: the same"
        )
    newer = dataclasses.replace(hardware, host=dataclasses.replace(hardware.host, read_gbps=150.0))
    glm = named("glm_5_3_flash", newer)
    for hit, published in ((0.109, 19.0), (0.34, 23.1)):
        note = f"33.3 and 6.0 ms of the device, the hit rate, 150 GB/s are its own: {NEWER}"
        predicted = 1 / glm.decode(1, 15_800, hit, 0)
        yield row(
            f"GLM-5.3-Flash, the same: decode, hit rate {hit}", "tok/s", predicted, published, note, complete=False
        )
    for tokens, seconds in GLM_PREFILLS.items():
        note = f"rates of {RECIPE}; {NEWER}"
        predicted = rival_prefill(glm, newer, tokens)
        yield row(f"GLM-5.3-Flash, the same: prefill of {tokens:,}", "s", predicted, seconds, note, complete=False)
    on_a5 = dataclasses.replace(flash.numbers, decode_ms=14.72, beside_ms=0.65)
    server = dataclasses.replace(hardware, host=dataclasses.replace(hardware.host, read_gbps=431.0))
    predicted = 1 / NumberedModel("", on_a5, server).decode(1, 15_600, 0.625, 0)
    note = f"14.72 ms of the device, 10 % of 6.5 ms beside it, 431 GB/s, 62.5 % resident: {NEWER}"
    yield row("V4-Flash, the same, 950PR: decode", "tok/s", predicted, 48.6, note)
    resident, one = 0.15, 1 / 25.7
    missed = m.layers * (1 - hit_rate(CURVES["v4_flash_moved"], resident)) * m.expert_bytes / (110 * GIGA)
    predicted = 8 / (one + missed * (m.used(8) - m.used(1)))
    note = "1 request, 24.5 to 26.9 tok/s, is an input, 15 % resident assumed; arXiv 2608.16157"
    yield row("V4-Flash, FreeToken, 5090 + EPYC: 8 requests", "tok/s", predicted, 65.6, note, complete=False)
    none, all_of_them = 1 / 53, 1 / 112
    for curve, (how, speeds) in KT_SPEEDS.items():
        for share, published in zip(SHARES, speeds, strict=True):
            seconds = all_of_them + (none - all_of_them) * (1 - hit_rate(CURVES[curve], share))
            what = f"Qwen3-Next, KTransformers: {share:.0%}, {how}"
            yield row(what, "tok/s", 1 / seconds, published, f"{KT}; curve {curve}", complete=False)


def beside(flash: NumberedModel, hardware: Hardware) -> Iterator[Row]:
    """Umbra's rows are of the model, with the device's part of a token that the rival has measured of its own."""
    load, curve = Load(prompt_tokens=15_600, output_tokens=1000), "v4_flash_moved"
    share = resident_share(flash, hardware, 1, 16_600)
    yield {
        "what": "residents",
        "rival": "12.5 % published",
        "umbra": f"{share:.1%} model",
        "note": "  int8 beside a slot for a layer; 4 bits beside a ring, in the same memory",
    }
    for sequences, accepted in ((1, None), (1, 0.7), (1, 0.85), (4, None), (8, None)):
        step = decoded(flash, load, hardware, curve, sequences, accepted)
        if step:
            what = f"tok/s after 15,600, {sequences} at once" + (f", a guess right {accepted:.0%}" if accepted else "")
            alone = sequences == 1 and not accepted
            yield {
                "what": what,
                "rival": "19.3 published" if alone else "-",
                "umbra": f"{step.rate:.1f} model",
                "note": f"  hit rate .262; {step.hit:.2f} by {curve}",
            }
    for tokens, seconds in PREFILLS.items():
        rates = [
            prefill(flash, linked, tokens, 1 << 16, resident_share(flash, linked, 1, tokens) or 0.0).seconds
            for gbps in (27.0, 110.0)
            for linked in (hardware.with_link(gbps),)
        ]
        yield {
            "what": f"s to the first token of {tokens:,}",
            "rival": f"{seconds} published",
            "umbra": f"{rates[0]:.1f} / {rates[1]:.1f} simulated",
            "note": "  link of 27 / 110 GB/s",
        }


def main(argv: list[str]) -> None:
    args = flags(__doc__).parse_args(argv)
    hardware = read_hardware("single_card_a3")
    flash = named("deepseek_v4_flash", hardware)
    printed_rows = printed(rows(flash, hardware), COLUMNS)
    print("\n".join(("", *LEFT_OUT, "")))
    write_rows(args.json, printed_rows, beside=printed(beside(flash, hardware), BESIDE))


if __name__ == "__main__":
    run_main(main)
