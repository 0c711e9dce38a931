"""Turns gloo's and the store's messages about lost connections into one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistError

PEER = re.compile(r"\[([\da-fA-F.:]+)\]:\d+")  # the other end's address in gloo's text


@contextmanager
def readable_connection_errors() -> Iterator[None]:
    """In this context a rank that does not find the others, or finds another one gone, raises a ConnectionError that
    says so."""
    try:
        yield
    except DistError as error:
        where = "the connection to the launcher of node 0 is lost"
        raise ConnectionError(f"{where}: {str(error).splitlines()[0]:.200}") from None
    except RuntimeError as error:
        text = str(error)
        if "gloo" not in text:
            raise
        peer = PEER.search(text)
        where = f"the connection to a rank at {peer[1]} is lost" if peer else "another rank does not answer"
        raise ConnectionError(f"{where}: its node says why it has ended") from None
