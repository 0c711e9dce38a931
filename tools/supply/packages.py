"""The packages that are installed here: what each says of its licence, its Pythons and what it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OWN = "umbra-infer"
# Words in a licence's free text, for packages that name no SPDX expression, and the expression that they stand for.
WORDS = [
    (r"apache", "Apache-2.0"),
    (r"mozilla public|\bmpl\b", "MPL-2.0"),
    (r"\bisc\b", "ISC"),
    (r"bsd|redistributions? (of source|in binary)|kiwi", "BSD-3-Clause"),
    (r"\bmit\b", "MIT"),
    (r"matplotlib (license|project)|license agreement for matplotlib", "PSF-2.0"),
]


@dataclass(frozen=True)
class Package:
    name: str  # canonical
    version: str
    licence: str  # an SPDX expression, or "unknown"
    pythons: str  # Requires-Python, "" for any
    needs: tuple[str, ...]  # canonical names, of what this machine needs


def installed() -> list[Package]:
    """Every package of this Python's environment but Umbra itself, by name."""
    found = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    return [package_of(name, found[name]) for name in sorted(found) if name != OWN]


def package_of(name: str, distribution: Distribution) -> Package:
    needs = (Requirement(line) for line in distribution.requires or [])
    here = {canonicalize_name(r.name) for r in needs if not r.marker or r.marker.evaluate({"extra": ""})}
    pythons = distribution.metadata["Requires-Python"] or ""
    return Package(name, distribution.version, licence_of(distribution), pythons, tuple(sorted(here)))


def licence_of(distribution: Distribution) -> str:
    metadata = distribution.metadata
    if expression := metadata["License-Expression"]:
        return expression
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    return next(spdx_of([metadata["License"] or "", *classifiers]), "unknown")


def spdx_of(texts: list[str]) -> Iterator[str]:
    for text in texts:
        yield from (spdx for words, spdx in WORDS if re.search(words, text, re.IGNORECASE))
