"""The device: its platform, and its rules."""

import resource
from typing import ClassVar

import torch

from tests.executor.platform.null.facts import NullSettings
from umbra.base.errors import UserError
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv
from umbra.executor.platform.base import ModelStep, Platform
from umbra.executor.platform.settings import PlatformSettings
from umbra.models.config import ModelConfig
from umbra.ops import load_ops
from umbra.ops.interface import Ops


def layout(dtype: torch.dtype) -> Ops:
    return load_ops("reference")


def check(case: Case, where: str) -> None:
    if case.of_device(NullSettings).greeting.isupper():
        raise UserError(f"{where}: null_config.greeting: is too loud: write small letters")


class NullPlatform(Platform):
    name: ClassVar[str] = "null"
    collectives: ClassVar[str] = "gloo"

    def __init__(self, settings: PlatformSettings, ranks: RankEnv):
        self.device, self.ops = torch.device("cpu"), layout(torch.float32)
        print(settings.of_device(NullSettings).greeting)

    def compile(self, step: ModelStep, model_config: ModelConfig, calls: int = 1) -> ModelStep:
        return step

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
