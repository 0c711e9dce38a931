"""What is said about ranks that end: the signal's name, and the rank at the other end of a connection."""

import signal

import pytest

from ops.parallel.connections import clear_losses
from serving.ranks.processes import signal_name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [10.0.0.7]:5512",
         "the connection to a rank at 10.0.0.7 is lost: its node says why it has ended"),
        ("gloo: timed out", "another rank does not answer: its node says why it has ended"),
    ],
)  # fmt: skip
def test_a_lost_rank_is_named_by_its_address(text: str, said: str) -> None:
    with pytest.raises(ConnectionError) as raised, clear_losses():
        raise RuntimeError(text)
    assert str(raised.value) == said


def test_other_errors_are_kept() -> None:
    with pytest.raises(RuntimeError, match=r"^out of memory at \[10\.0\.0\.7\]:5512$"), clear_losses():
        raise RuntimeError("out of memory at [10.0.0.7]:5512")


def test_signals_have_names() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(200) == "signal 200"
