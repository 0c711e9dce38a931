"""The names of a layer for multi-token prediction. Importing them needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MtpNames:
    """The path of the layer, in which `{}` is its number behind those of the decoder's layers; and below it the names
    of its modules. Without these a model ignores such layers and makes none."""

    path: str = "model.layers.{}"
    embedding: str = ""  # the norm of the next token's embedding
    hidden: str = ""  # the norm of the hidden state
    projection: str = ""  # of both, or of the hidden state alone
    layer: str = ""  # the decoder layer; empty: its parts stand beside the others
    norm: str = ""  # the last norm
    head: str = ""  # an output head of its own, which is a copy of the model's
    embedding_projection: str = ""  # of the next token's embedding, where that of the hidden state is another
