"""The bar that shows how far a load is."""

from typing import NoReturn

from tqdm import tqdm


def loading_bar(nbytes: int, shown: bool) -> "tqdm[NoReturn]":
    """Bytes done of all, bytes a second, and the time left, on a terminal."""
    return tqdm(total=nbytes, desc="loading", unit="B", unit_scale=True, disable=None if shown else True, leave=False)
