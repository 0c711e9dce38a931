"""The flags, tables, JSON files and plots that all benchmarks share."""

import argparse
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from umbra.base.files import write_json, write_whole

Row = dict[str, Any]
Columns = Sequence[tuple[str, str, int, str]]  # (key of the row, heading, width, format of the cell)
Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # label: (x, y)


def flags(description: str | None, program: str | None = None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark."""
    text = inspect.cleandoc(description or "")
    parser = argparse.ArgumentParser(program, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--json", type=_file, help="also write the rows here")
    parser.add_argument("--plot", type=_file, help="also draw them here, as PNG")
    return parser


def _file(text: str) -> Path:
    """A path whose folder exists: refused before anything is measured, not after."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is no folder")
    return path


def printed(rows: Iterable[Row], columns: Columns) -> list[Row]:
    """Print each row as soon as it is measured, a dash for what it does not have; return all of them."""
    print("".join(f"{heading:>{width}}" for _, heading, width, _ in columns))
    done = []
    for row in rows:
        done.append(row)
        cells = (f"{row[key]:>{width}{form}}" if key in row else f"{'-':>{width}}" for key, _, width, form in columns)
        print("".join(cells), flush=True)
    return done


def write_rows(path: Path | None, rows: list[Row], **settings: object) -> None:
    """Write the rows and the settings that they were measured with as JSON, if there is a path."""
    if path:
        write_json(path, {**settings, "rows": rows})


def plot(path: Path | None, panels: Mapping[str, Lines], y: str) -> None:
    """Draw one panel for each x label, side by side, if there is a path."""
    if not path:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(7 if len(panels) == 1 else 11, 4), squeeze=False)
    for axes, (x, lines) in zip(all_axes[0], panels.items(), strict=True):
        for label, (xs, ys) in lines.items():
            axes.plot(xs, ys, "o-", label=label)
            axes.set_xscale("log", base=2)
            axes.set_xticks(xs, [str(value) for value in xs])
        axes.axhline(1, color="black", linestyle=":")  # the limit, or the other engine
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(0, 1.1 * axes.dataLim.y1)
        axes.legend()
        axes.grid(alpha=0.3)
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=150, bbox_inches="tight"))
