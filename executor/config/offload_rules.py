"""The rules between `offload_config` and other keys."""

import dataclasses

from umbra.base.errors import UserError
from umbra.cpu_offload.planner.hits import curve_of
from umbra.executor.config.case import Case
from umbra.executor.config.platforms import PLATFORMS


def check_offload(case: Case, where: str) -> None:
    """Refuse settings of shadow experts that contradict each other or the rest of the case."""
    wanted = case.offload_config
    mode = f"offload_config.mode: {wanted.mode}"
    if wanted.mode == "none":
        for field in dataclasses.fields(wanted):
            if getattr(wanted, field.name) != field.default:
                raise UserError(
                    f"{where}: offload_config.{field.name}: has no meaning with offload_config.mode: none: leave it out"
                )
        return
    if not PLATFORMS[case.platform].expert_slot:
        raise UserError(f"{where}: {mode}: platform: {case.platform} has no shadow experts: leave it out")
    if wanted.stream_tokens and wanted.stream_tokens <= case.decode_rows:
        raise UserError(
            f"{where}: offload_config.stream_tokens: {wanted.stream_tokens} must be above the {case.decode_rows} "
            f"rows of a decode step (data_config.batch_size: {case.data_config.batch_size}): decode steps are "
            "captured, and have no experts streamed"
        )
    curve_of(wanted.hits, f"{where}: offload_config.hits")
    if wanted.slots is not None and wanted.mode != "fixed":
        written = wanted.slots or -1  # none at all
        raise UserError(f"{where}: offload_config.slots: {written} needs mode: fixed, not {wanted.mode}")
