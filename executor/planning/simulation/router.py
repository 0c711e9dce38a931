"""Decides which replica gets a request."""

import hashlib
from array import array

from executor.planning.simulation.replica import Replica

MORE = 1.25  # a replica that has a request's beginning may have so many times the load of the least loaded one
KNOWN = 1 << 20  # beginnings that a router remembers


class Router:
    def __init__(self, kind: str, page_size: int):
        """`kind`: least_loaded, or prefix_aware, which prefers the replica that had the same first page last."""
        self.kind, self.page_size = kind, page_size
        self.homes: dict[bytes, Replica] = {}

    def choose(self, prompt: "array[int]", alive: list[Replica]) -> Replica:
        least = min(alive, key=lambda replica: replica.load)
        if self.kind == "least_loaded" or len(prompt) < self.page_size:
            return least
        key = hashlib.blake2b(prompt[: self.page_size].tobytes(), digest_size=16).digest()
        home = self.homes.pop(key, None)
        chosen = home if home in alive and home.load <= MORE * least.load + 1 else least
        self.homes[key] = chosen
        if len(self.homes) > KNOWN:
            del self.homes[next(iter(self.homes))]  # the one that was asked for longest ago
        return chosen
