"""The rules of `offload_config`; `config.check` calls them."""

import dataclasses
from typing import TYPE_CHECKING

from errors import UserError

if TYPE_CHECKING:
    from executor.config import Case


def check_offload(case: "Case", where: str) -> None:
    wanted = case.offload_config
    mode = f"offload_config.mode: {wanted.mode}"
    if wanted.mode == "none":
        for field in dataclasses.fields(wanted):
            if getattr(wanted, field.name) != field.default:
                raise UserError(
                    f"{where}: offload_config.{field.name}: has no meaning with offload_config.mode: none: leave it out"
                )
        return
    if case.platform != "cpu":
        raise UserError(f"{where}: {mode} runs on platform: cpu only so far, not {case.platform}")
    if wanted.slots and wanted.mode != "fixed":
        raise UserError(f"{where}: offload_config.slots: {wanted.slots} needs mode: fixed, not {wanted.mode}")
