"""ik_llama.cpp for benchmarks, from a build of it that the variable IK_LLAMA names:

git clone https://github.com/ikawrakow/ik_llama.cpp && cd ik_llama.cpp
cmake -B build -DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF && cmake --build build -j --target llama
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from umbra.base.errors import UserError
from umbra.tools.benchmarks.peer_engine import GROWTH, Peer, Token

SHIM = Path(__file__).with_name("ik_llama.cpp")


class IkLlama(Peer):
    state_start = 0

    def __init__(self, folder: Path, path: Path, threads: int):
        """Loads the GGUF file `path` with the build in `folder`."""
        self.api = _compiled(folder)
        why = ctypes.create_string_buffer(256)
        self.engine = ctypes.c_void_p(self.api.ik_open(str(path).encode(), threads, why))
        if not self.engine:
            raise UserError(f"ik_llama.cpp cannot load {path}: {why.value.decode(errors='replace').strip()}")
        self.vocabulary = self.api.ik_vocabulary(self.engine)
        self.recurrent = bool(self.api.ik_recurrent(self.engine))

    def reserve(self, sequences: int, longest: int, at_once: int) -> None:
        longest += GROWTH if self.recurrent else 0
        if self.api.ik_reserve(self.engine, sequences, longest, at_once):
            raise UserError(f"ik_llama.cpp: no memory for {sequences} sequences of {longest} tokens")

    def clear(self) -> None:
        self.api.ik_clear(self.engine)

    def remove(self, sequence: int, start: int) -> None:
        self.api.ik_remove(self.engine, sequence, start)

    def decode(self, tokens: list[Token]) -> Tensor:
        rows = np.array(tokens, dtype=np.int32)
        status = self.api.ik_decode(self.engine, len(tokens), rows.ctypes.data_as(ctypes.c_void_p))
        if status:
            raise RuntimeError(f"ik_llama.cpp: llama_decode: status {status}")
        wanted = int(rows[:, 3].sum())
        logits = np.ctypeslib.as_array(self.api.ik_logits(self.engine), shape=(max(wanted, 1), self.vocabulary))
        return torch.from_numpy(logits)[:wanted]

    def state(self, sequence: int) -> bytes:
        kept = ctypes.create_string_buffer(self.api.ik_state_size(self.engine, sequence))
        self.api.ik_state(self.engine, sequence, kept, ctypes.c_size_t(len(kept)))
        return kept.raw

    def restore(self, sequence: int, state: bytes) -> None:
        if self.api.ik_restore(self.engine, sequence, state, ctypes.c_size_t(len(state))):
            raise RuntimeError("ik_llama.cpp does not take a sequence's state: has its form changed?")

    def close(self) -> None:
        self.api.ik_close(self.engine)


def _compiled(folder: Path) -> ctypes.CDLL:
    built = {path.name: path.parent for path in folder.glob("build/**/lib*.so")}
    if "libllama.so" not in built:
        raise UserError(f"IK_LLAMA: {folder} has no build/**/libllama.so: build ik_llama.cpp there, see {__name__}")
    libraries = [flag for room in sorted(set(built.values())) for flag in (f"-L{room}", f"-Wl,-rpath,{room}")]
    includes = [f"-I{folder / 'include'}", f"-I{folder / 'ggml' / 'include'}"]
    with tempfile.TemporaryDirectory() as temporary:
        out = str(Path(temporary) / "ik.so")
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", *includes, str(SHIM), "-o", out, *libraries]
        done = subprocess.run([*command, "-lllama", "-lggml"], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"IK_LLAMA: {SHIM.name} does not compile with {folder}: {done.stderr.splitlines()[0]}")
        try:
            api = ctypes.CDLL(out)
        except OSError as error:
            raise UserError(f"IK_LLAMA: {error}") from None
    api.ik_open.restype = ctypes.c_void_p
    api.ik_state_size.restype = ctypes.c_size_t
    api.ik_logits.restype = ctypes.POINTER(ctypes.c_float)
    return api
