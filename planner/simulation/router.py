"""Decides which replica gets a request."""

import hashlib
from array import array

import numpy as np

MORE = 1.25  # a replica that has a request's beginning may have so many times the load of the least loaded one
KNOWN = 1 << 20  # beginnings that a router remembers
GONE = 1 << 40  # is added to the load of a replica that has failed


class ReplicaRouter:
    def __init__(self, kind: str, page_size: int, replicas: int):
        """`kind`: least_loaded, or prefix_aware, which prefers the replica that had the same first page last."""
        self.kind, self.page_size, self.alive = kind, page_size, replicas
        self.loads = np.zeros(replicas, np.int64)  # requests of each replica that have not ended
        self.homes: dict[bytes, int] = {}

    def choose(self, prompt: "array[int]") -> int:
        """The number of the replica that gets the request; one must be alive."""
        least = int(self.loads.argmin())
        if self.kind == "least_loaded" or len(prompt) < self.page_size:
            return least
        key = hashlib.blake2b(prompt[: self.page_size].tobytes(), digest_size=16).digest()
        home = self.homes.pop(key, least)
        chosen = home if self.loads[home] <= MORE * self.loads[least] + 1 else least
        self.homes[key] = chosen
        if len(self.homes) > KNOWN:
            del self.homes[next(iter(self.homes))]  # the one that was asked for longest ago
        return chosen

    def lose(self, replica: int) -> None:
        """The replica has failed, and its requests are lost."""
        self.loads[replica] = GONE
        self.alive -= 1

    def regain(self, replica: int) -> None:
        self.loads[replica] = 0
        self.alive += 1
