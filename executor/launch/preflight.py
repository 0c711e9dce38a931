"""Checks that this machine has what a case needs before a rank is started; imports nothing heavy."""

from importlib.metadata import version
from importlib.util import find_spec

from umbra.base.errors import UserError
from umbra.executor.checkpoint.index import INDEX, SINGLE, weights_in
from umbra.executor.config.case import Case
from umbra.executor.config.load import model_folder
from umbra.executor.config.platforms import PLATFORMS
from umbra.models.gguf.folder import INDEX as GGUF


def check_ready(case: Case) -> None:
    """Refuse a case whose checkpoint or platform plugin is missing here."""
    folder, facts = model_folder(case), PLATFORMS[case.platform]
    plugin = facts.plugin
    if case.model_config.with_ckpt and not (weights_in(folder) or (folder / GGUF).is_file()):
        raise UserError(
            f"model_path: {folder} holds neither {SINGLE} nor {INDEX} (other formats are not read): put the "
            "checkpoint's files there, or set model_path to their folder"
        )
    if plugin and not find_spec(plugin):
        release = version("torch").partition("+")[0]
        raise UserError(
            f"platform: {case.platform} needs {plugin}, which is not installed: on a machine with {facts.runtime}, "
            f".venv/bin/python -m pip install {plugin}=={release}"
        )


def check_prompts(case: Case) -> None:
    """Refuse to run the prompts of a case that has none."""
    if not case.data_config.prompts and case.model_config.with_ckpt:
        raise UserError(
            f"case {case.name}: data_config.prompts is empty: give at least one prompt there, or by --prompt TEXT"
        )
