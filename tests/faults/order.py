"""Checks a log of calls for what a loss of power could make visible that is not whole."""

from pathlib import Path


def unsynced(log: str) -> list[str]:
    """The renames of a log of calls by which a loss of power could make something visible that is not whole: of a file
    that was changed since it was last forced to the disk, or of a folder with such a file or such names."""
    dirty: set[str] = set()
    wrong = []
    for line in log.splitlines():
        call, path, to = line.split("\t")
        if call in ("create", "mkdir"):
            dirty |= {path, str(Path(path).parent)}
        elif call == "write":
            dirty.add(path)
        elif call == "fsync":
            dirty.discard(path)
        elif call == "rename":
            changed = {name for name in dirty if name == path or name.startswith(f"{path}/")}
            if changed:
                wrong.append(f"{path} -> {to}: {sorted(changed)}")
            dirty -= changed
            dirty |= {str(Path(path).parent), str(Path(to).parent)}
    return wrong
