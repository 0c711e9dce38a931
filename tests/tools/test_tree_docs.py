"""docs/tree.md says what is in the tree."""

from pathlib import Path

from files import ROOT
from tools.tree_docs import summary, tree_docs


def test_the_tree_is_fresh() -> None:
    assert (ROOT / "docs" / "tree.md").read_text() == tree_docs(), "run .venv/bin/python -m tools.tree_docs"


def test_the_first_sentence_stands_for_a_file(tmp_path: Path) -> None:
    texts = {
        "a.py": ('"""What a file\nis for. More of it."""\n', "What a file is for."),
        "b.py": ("x = 1\n", ""),
        "c.sh": ("#!/usr/bin/env bash\n# Sets up:  bash c.sh\n# More.\nset -e\n", "Sets up"),
        "d.h": ("// One thing: another.\n//\n// Layout\n#pragma once\n", "One thing: another."),
        "e.yaml": ("description: a case\n", "a case"),
        "f.png": ("", None),
    }
    for name, (text, expected) in texts.items():
        (tmp_path / name).write_text(text)
        assert summary(tmp_path / name) == expected, name
