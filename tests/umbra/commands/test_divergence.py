"""How the logits of two passes are written and compared, to the value."""

import errno
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from umbra.commands import divergence, evaluate
from umbra.commands.divergence import Divergence, LogitsWriter
from umbra.commands.evaluate import read_windows
from umbra.errors import UserError


class Parts:
    """A file that takes a few bytes at a time, and then no more."""

    def __init__(self, most: int):
        self.most, self.data = most, b""

    def write(self, data: memoryview) -> int:
        if len(self.data) >= self.most:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += bytes(data[:5])
        return len(data[:5])


def test_a_window_is_written_in_parts(tmp_path: Path) -> None:
    writer: Any = LogitsWriter(tmp_path / "logits")
    writer.file.close()
    logits = torch.arange(6.0).view(2, 3)
    writer.file = Parts(100)
    writer(logits)
    writer(logits + 1)
    assert np.frombuffer(writer.file.data, np.float32).tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]
    writer.file = Parts(10)
    with pytest.raises(UserError) as caught:
        writer(logits)
    assert str(caught.value) == (
        f"{tmp_path}/logits: cannot be written: No space left on device: shorten --text, or set TMPDIR"
    )


def test_a_comparison_of_windows_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three positions, one is the same, one has other chances, and one prefers another token."""
    monkeypatch.setattr(divergence, "ROWS", 2)
    writer = LogitsWriter(tmp_path / "logits")
    first = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]))
    writer(first[:2])
    writer(first[2:])
    compared = Divergence(tmp_path / "logits")
    second = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125], [0.6, 0.2, 0.2]])) + 3
    compared(second)
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2) + 0.4 * math.log(3)
    figures = compared.figures()
    assert figures["positions"] == 3
    assert figures["kl_divergence"] == pytest.approx(kl / 3, rel=1e-5)
    assert figures["top1_agreement"] == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("tokens", "size", "windows"),
    [
        (2, 9, [[0, 1]]),
        (3, 2, [[0, 1]]),
        (4, 2, [[0, 1], [2, 3]]),
        (5, 3, [[0, 1, 2], [3, 4]]),
        (5, 4, [[0, 1, 2, 3]]),
        (6, 6, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_windows_have_two_tokens_or_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, size: int, windows: list[list[int]]
) -> None:
    (tmp_path / "text").write_text("é", encoding="utf-8")
    made: Any = []

    def tokenizer(*given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(encode=lambda text, chat: (made.append((text, chat)), list(range(tokens)))[1])

    monkeypatch.setattr(evaluate, "Tokenizer", tokenizer)
    monkeypatch.setattr(evaluate, "model_folder", lambda case: "folder")
    monkeypatch.setattr(evaluate, "load_model_config", lambda case: SimpleNamespace(vocab_size=7))
    case: Any = None
    assert read_windows(case, tmp_path / "text", size) == windows
    assert made == [("folder", 7), ("é", False)]
    monkeypatch.setattr(evaluate, "Tokenizer", lambda *given: SimpleNamespace(encode=lambda text, chat: [1]))
    with pytest.raises(UserError, match=r"fewer than two tokens$"):
        read_windows(case, tmp_path / "text", size)
