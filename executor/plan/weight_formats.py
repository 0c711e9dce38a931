"""The weight formats of a case, and the `Build` of one rank's model."""

import dataclasses
from typing import Any

import torch

from umbra.base.errors import UserError
from umbra.executor.checkpoint.formats.detect import read_scheme
from umbra.executor.checkpoint.formats.scheme import Scheme
from umbra.executor.checkpoint.index import names_in
from umbra.executor.checkpoint.packed import sources_of
from umbra.executor.config.case import Case
from umbra.executor.config.load import draft_folder, load_draft_config, load_model_config, model_folder
from umbra.executor.config.platforms import PLATFORMS
from umbra.models.build import Build, DraftParts, Formats, Shadows, StoredModules
from umbra.models.eagle3_config import ALIASES, Eagle3Config
from umbra.models.layers.eagle3 import TOKENS
from umbra.ops.cpu.engine import native
from umbra.ops.formats import FORMATS, Format
from umbra.ops.interface import Exchange, Ops
from umbra.ops.parallel.groups import Parallel


def formats_of(case: Case, scheme: Scheme, quantised_head: bool) -> Formats:
    """The formats of the case's weights. If the case quantises, all linear layers and experts are quantised; the head
    is quantised to 8 bits if `quantised_head` and the checkpoint has it in floats, and the router is not quantised.
    Beside a checkpoint's own quantisation of experts alone, the head has the format of the other linear layers."""
    plain, wanted = FORMATS[case.model_config.dtype], case.quantization
    rest = FORMATS.get(wanted.rest)
    tiled = dataclasses.replace(plain, tiled=True)
    head = FORMATS["q8"] if quantised_head else tiled
    kinds = PLATFORMS[case.platform].quantised

    def own(module: str) -> Format | None:
        kept = scheme.kept(module)
        return kept if kept and kept.kind in kinds else None

    formats = [e.format for e in scheme.encodings if e.format and e.format.kind in kinds]
    if formats and wanted.method in ("auto", *(f.spec.method or f.kind for f in formats)):
        mixed, names = PLATFORMS[case.platform].mixes, scheme.names or {}
        table = scheme.table("model.embed_tokens") if mixed else None
        if names and quantised_head:  # a tied head is the table once more
            head = own("lm_head") or (None if "lm_head.weight" in names else table) or head
        return Formats(
            plain, formats[0], (rest or tiled) if scheme.only_experts else head, own, rest, table=table, mixed=mixed
        )
    if rest:
        raise UserError(
            f"quantization.rest: {wanted.rest} is for what a checkpoint's own quantisation leaves in floats, but here "
            f"is none that is kept (checkpoint: {scheme.title}; quantization.method: {wanted.method}): leave it out"
        )
    if wanted.method in ("auto", "none"):
        return Formats(plain, tiled, tiled)
    return Formats(plain, Format(wanted.method, wanted.group_size, wanted.zero_points), head)


def build_of(
    case: Case,
    ops: Ops,
    parallel: Parallel,
    device: torch.device,
    quantised_head: bool,
    shadows: Shadows | None = None,
    exchange: Exchange | None = None,
) -> Build:
    scheme = read_scheme(model_folder(case))
    return Build(
        ops=ops,
        parallel=parallel,
        formats=formats_of(case, scheme, quantised_head),
        dtype=getattr(torch, case.model_config.dtype),
        device=device,
        max_positions=case.max_sequence_length,
        drafts=DraftParts(case.draft_config.most, case.draft_config.method == "mtp", _head_of(case)),
        shadows=shadows,
        exchange=exchange,
        stored=StoredModules(scheme.biased, scheme.holds, scheme.lacks),
    )


def _head_of(case: Case) -> Eagle3Config | None:
    """The config of the case's head for drafts, with what its files hold."""
    if case.draft_config.method != "eagle3" or (config := load_draft_config(case, load_model_config(case))) is None:
        return None
    names = names_in(draft_folder(case), ALIASES) or {}
    own = "embed_tokens.weight" in names or config.hidden_size != config.target_hidden_size
    mapped = TOKENS in names or config.draft_vocab_size < config.vocab_size
    return dataclasses.replace(config, own_embedding=own, mapped=mapped)


def packed_facts(case: Case) -> dict[str, Any]:
    """All facts that decide how this rank's weights are packed, except the checkpoint and the rank."""
    return {
        "dtype": case.model_config.dtype,
        "parallel": dataclasses.asdict(case.parallel_sizes),
        "quantization": dataclasses.asdict(case.quantization),
        "mtp": case.draft_config.method == "mtp",
        "head": sources_of(draft_folder(case)) if case.draft_config.method == "eagle3" else None,
        "shadows": case.offload_config.start_layer if case.offload_config.mode != "none" else None,
        "order": native.order(),  # each of ARM's instruction sets has its own
    }
