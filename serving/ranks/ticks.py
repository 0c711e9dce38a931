"""Shares rank 0's tick with all ranks before each step, so that all schedulers get the same calls in the same order."""

import struct
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from umbra.serving.ranks.messages import Tick

INLINE = 4096  # bytes of the broadcast that every step makes; a longer tick takes a second one
HEADER = struct.Struct("<I")


class TickBroadcast:
    """One rank's end of the tick broadcast. With several ranks it has its own gloo group on every platform, because
    ticks are made on the host."""

    def __init__(self, rank: int, world_size: int, timeout_s: int):
        self.rank, self.alone = rank, world_size == 1
        if not self.alone:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def share(self, tick: Tick | None) -> Tick:
        """Rank 0 gives its tick, other ranks None; all return that tick."""
        if self.alone and tick is not None:
            return tick
        body = msgspec.msgpack.encode(tick) if tick is not None else b""
        first = self._broadcast(HEADER.pack(len(body)) + body[: INLINE - HEADER.size], INLINE)
        (size,) = HEADER.unpack(first[: HEADER.size])
        whole = first[HEADER.size : HEADER.size + size]
        if size > len(whole):
            whole += self._broadcast(body[len(whole) :], size - len(whole))
        return msgspec.msgpack.decode(whole, type=Tick)

    def number(self, own: int) -> int:
        """Rank 0's number, on all ranks."""
        return self.share(Tick(own, 0, None, 0, []) if self.rank == 0 else None).number

    def _broadcast(self, data: bytes, size: int) -> bytes:
        """Sends rank 0's `data`, padded to `size` bytes, to all ranks. -> the bytes"""
        buffer = torch.zeros(size, dtype=torch.uint8)
        if self.rank == 0:
            buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(buffer, src=0, group=self._group)
        return buffer.numpy().tobytes()
