"""V4-Flash's prefill by the ring of a run, on a simulated link, device and CPU."""

import pytest

from umbra.planner.machine import read_hardware
from umbra.planner.served import named
from umbra.planner.streamed_prefill import CpuRates, SimulatedPrefill, cpu_rates

A3 = read_hardware("single_card_a3")
FLASH = named("deepseek_v4_flash", A3)
NONE = CpuRates(1e6, 1e6)
RIVALS = CpuRates(0.0, 0.128e-3)  # which reads an expert again for each of its pairs


@pytest.mark.parametrize(
    ("tokens", "cpu", "seconds"),
    [
        (118, RIVALS, 2.5),
        (8000, RIVALS, 6.0),
        (8000, NONE, 6.0),
        (31_500, NONE, 5.6),
        (31_500, cpu_rates(FLASH, A3), 5.6),
    ],
)
def test_link_device_and_cpu_work_at_once(tokens: int, cpu: CpuRates, seconds: float) -> None:
    """Nothing is resident."""
    simulated = SimulatedPrefill(FLASH, A3, 0.0, cpu)
    for _ in range(2):
        trace = simulated.run(tokens, tokens)
        assert trace.seconds < seconds
        assert trace.overlap > 0.9


def test_more_residents_and_a_faster_link_help() -> None:
    times = [
        SimulatedPrefill(named("deepseek_v4_flash", hardware), hardware, share, RIVALS).run(512, 256).seconds
        for hardware in (A3, A3.with_link(110.0))
        for share in (0.0, 0.3)
    ]
    assert sorted(times, reverse=True) == times
