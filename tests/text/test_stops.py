"""Stop strings, however the text is cut into pieces."""

from hypothesis import given
from hypothesis import strategies as st

from text.stops import Stops

TEXT = st.text("ab<", max_size=30)


@given(st.lists(TEXT, max_size=10), st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4))
def test_the_first_complete_stop_ends_the_text(pieces: list[str], wanted: list[str]) -> None:
    text, stops = "".join(pieces), Stops(wanted)
    ends = [(at + len(stop), at) for stop in wanted if (at := text.find(stop)) >= 0]
    said = ""
    for piece in pieces:
        before = stops.found
        said += stops.push(piece)
        assert not (before and stops.push(piece))
    assert stops.found == bool(ends)
    said += stops.finish()
    assert said == (text[: min(ends)[1]] if ends else text)


def test_only_the_beginning_of_a_stop_is_held_back() -> None:
    stops = Stops(["</think>", "END"])
    assert [stops.push(piece) for piece in ("a <b", " E", "N", "D")] == ["a <b", " ", "", ""]
    assert stops.found
    assert stops.push("more") == stops.finish() == ""
