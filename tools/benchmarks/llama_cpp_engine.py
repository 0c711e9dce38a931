"""llama.cpp for benchmarks, through llama-cpp-python's low-level functions: token ids to logits, no sampling.

It runs with its best settings: weights repacked when loaded (its default), one `llama_decode` a step for all sequences,
each with a cache stream of its own, prompts in one piece, with or without flash attention.
"""

import ctypes
import struct
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.tools.benchmarks.peer_engine import GROWTH, Peer, Token

INSTALL = ".venv/bin/python -m pip install --require-hashes -r tools/supply/locks/compare.lock"
NATIVE = "-DGGML_NATIVE=ON"
WITHOUT_AMX = "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON"  # its AMX code crashes
MOST_AT_ONCE = 2048  # tokens that are computed together; scores of more take gigabytes without flash attention
ERROR = 4  # llama.cpp's log level for errors


def library() -> Any:
    try:
        import llama_cpp
    except ImportError:
        flags = WITHOUT_AMX if "amx_tile" in Path("/proc/cpuinfo").read_text() else NATIVE
        raise UserError(
            f"llama-cpp-python is missing; once, for some minutes: CMAKE_ARGS='{flags}' {INSTALL}"
        ) from None
    return llama_cpp


class LlamaCpp(Peer):
    state_start = 12  # a mark, the sequence, the number of cache streams; the first stream is sequence 0's
    contexts: Mapping[bool, Any] = {}  # with and without flash attention

    def __init__(self, path: Path, threads: int):
        llama_cpp = self.api = library()
        self.threads = threads
        errors: deque[str] = deque(maxlen=3)

        def log(level: int, text: bytes, _: object) -> None:
            if level == ERROR:
                errors.append(text.decode(errors="replace").strip())

        self.log = llama_cpp.llama_log_callback(log)  # kept alive, because llama.cpp calls it until the process ends
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise UserError(f"llama.cpp cannot load {path}: {'; '.join(errors)}")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.recurrent = bool(llama_cpp.llama_model_is_hybrid(self.model))
        kind = llama_cpp.llama_model_rope_type(self.model)
        if kind in (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE):
            self.of_token = 20  # with three more positions

    def reserve(self, sequences: int, longest: int, at_once: int) -> None:
        longest += GROWTH if self.recurrent else 0
        self._free()
        self.contexts = {flash: self._context(flash, sequences, longest, at_once) for flash in (False, True)}
        self.batch = self.api.llama_batch_init(at_once, 0, 1)
        self.use(flash=True)

    def use(self, flash: bool) -> None:
        """Switch to the context with or without flash attention."""
        self.context = self.contexts[flash]
        self.memory = self.api.llama_get_memory(self.context)

    def clear(self) -> None:
        self.api.llama_memory_clear(self.memory, False)

    def remove(self, sequence: int, start: int) -> None:
        self.api.llama_memory_seq_rm(self.memory, sequence, start, -1)

    def state(self, sequence: int) -> bytes:
        size = self.api.llama_state_seq_get_size(self.context, sequence)
        kept = (ctypes.c_uint8 * size)()
        self.api.llama_state_seq_get_data(self.context, kept, size, sequence)
        return bytes(kept)

    def restore(self, sequence: int, state: bytes) -> None:
        kept = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if self.api.llama_state_seq_set_data(self.context, kept, len(state), sequence) != len(state):
            raise RuntimeError("llama.cpp does not take a sequence's state: has its form changed?")

    def behind(self, states: bytes, length: int) -> bytes:
        """After their number, 1, stands the position of the last token."""
        return states[:4] + struct.pack("<i", length - 1) + states[8:]

    def close(self) -> None:
        self._free()
        self.api.llama_model_free(self.model)

    def _free(self) -> None:
        if self.contexts:
            self.api.llama_batch_free(self.batch)
        for context in self.contexts.values():
            self.api.llama_free(context)
        self.contexts = {}

    def _context(self, flash: bool, sequences: int, longest: int, at_once: int) -> Any:
        api, params = self.api, self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = sequences * longest, sequences, False
        params.n_batch, params.n_ubatch = at_once, min(at_once, MOST_AT_ONCE)
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = api.llama_init_from_model(self.model, params)
        if not context:
            raise UserError(f"llama.cpp: no memory for {sequences} sequences of {longest} tokens")
        return context

    def decode(self, tokens: list[Token]) -> Tensor:
        batch, wanted = self.batch, 0
        batch.n_tokens = len(tokens)
        for i, (sequence, position, token, wants) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            wanted += wants
        status = self.api.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}")
        if not wanted:
            return torch.empty(0, self.vocabulary)
        logits = self.api.llama_get_logits(self.context)  # waits for the result
        return torch.from_numpy(np.ctypeslib.as_array(logits, shape=(wanted, self.vocabulary)))
