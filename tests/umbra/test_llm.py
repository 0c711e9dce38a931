"""`import umbra`, as a script or a notebook uses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from umbra import LLM, Reply, SamplingParams
from umbra.base.errors import UserError
from umbra.base.files import ROOT

pytestmark = pytest.mark.slow

PROMPTS = ["Emma was", "It is a truth", "She"]
DRAWN = SamplingParams(max_tokens=20, temperature=0.8, seed=1)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", max_new_tokens=40, keep_packed=False)


def test_generate_answers_in_order_and_again_the_same(llm: LLM) -> None:
    outs = llm.generate(PROMPTS, DRAWN)
    assert [out.prompt for out in outs] == PROMPTS
    assert all(isinstance(out, Reply) and 0 < len(out.tokens) <= 20 for out in outs)
    assert [llm.generate([prompt], DRAWN)[0] for prompt in PROMPTS] == outs  # alone as together
    many = llm.generate(PROMPTS * 3, DRAWN)  # more than run at once
    assert many == outs * 3
    assert len({out.text for out in llm.generate(PROMPTS[:1] * 3, SamplingParams(temperature=1.0))}) == 3  # own seeds
    assert llm.generate([], DRAWN) == []


def test_a_stream_is_the_same_text_in_pieces(llm: LLM) -> None:
    for prompt in PROMPTS:
        pieces = list(llm.stream(prompt, DRAWN))
        assert "".join(pieces) == llm.generate([prompt], DRAWN)[0].text
        assert len(pieces) > 3
        assert all(pieces)


def test_streams_run_together_and_end_when_closed(llm: LLM) -> None:
    expected = [llm.generate([prompt], DRAWN)[0].text for prompt in PROMPTS]
    streams = [llm.stream(prompt, DRAWN) for prompt in PROMPTS]
    texts = ["", "", ""]
    for _ in range(4):
        for i, stream in enumerate(streams):
            texts[i] += next(stream)
    assert len(llm.loop.scheduler.running) == 3
    streams[0].close()
    assert len(llm.loop.scheduler.running) == 2
    assert [text + "".join(rest) for text, rest in zip(texts[1:], streams[1:], strict=True)] == expected[1:]
    assert expected[0].startswith(texts[0])
    llm.loop.step()  # returns the event of the abort
    assert llm.loop.idle


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[:1], DRAWN)
    words = whole.text.split()
    stop = " ".join(words[2:4])  # of several tokens
    before = whole.text[: whole.text.index(stop)]
    first, second = llm.generate([PROMPTS[0], PROMPTS[1]], DRAWN, stop=["no such words", stop])
    assert (first.text, first.finish_reason) == (before, "stop")
    assert whole.tokens[: len(first.tokens)] == first.tokens != whole.tokens
    assert second == llm.generate([PROMPTS[1]], DRAWN)[0]
    assert "".join(llm.stream(PROMPTS[0], DRAWN, stop)) == before
    assert "".join(part.text for part in llm.parts(PROMPTS[0], DRAWN, [stop])) == before
    llm.loop.step()  # returns the events of the aborts
    assert llm.loop.idle
    for wrong in ("", [""], [3]):
        with pytest.raises(UserError, match="must be a string or several"):
            llm.generate(PROMPTS[:1], DRAWN, wrong)  # type: ignore[arg-type]


def test_prompts_may_be_ids_or_a_chat(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0], chat=False)
    assert llm.generate([ids], DRAWN)[0].tokens == llm.generate(PROMPTS[:1], DRAWN)[0].tokens
    messages = [{"role": "user", "content": "Who is Emma?"}]
    (chat,) = llm.generate([messages], DRAWN)
    assert chat.tokens == llm.generate([llm.encode(messages)], DRAWN)[0].tokens
    assert chat.tokens != llm.generate(["Who is Emma?"], DRAWN)[0].tokens


def test_a_prompt_that_cannot_run_stops_all_of_its_call_and_nothing_else(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], DRAWN)
    first = next(stream)
    with pytest.raises(UserError, match=r"prompt \d+: token 100000 is outside the vocabulary"):
        llm.generate([PROMPTS[1], [100000]])
    with pytest.raises(UserError, match="has no tokens"):
        llm.generate([""])
    with pytest.raises(UserError, match="are more than the"):
        llm.generate([[1] * 3000])
    with pytest.raises(UserError, match="is one text: give a list"):
        llm.generate("Emma")
    with pytest.raises(UserError, match="2 settings for 1 prompts"):
        llm.generate(["Emma"], [DRAWN, DRAWN])
    with pytest.raises(UserError, match="temperature: -1"):
        SamplingParams(temperature=-1)
    assert first + "".join(stream) == llm.generate(PROMPTS[:1], DRAWN)[0].text


def test_a_request_ends_where_the_context_does(llm: LLM) -> None:
    most = llm.case.max_sequence_length
    (out,) = llm.generate([[5] * (most - 3)], SamplingParams(max_tokens=1000, ignore_eos=True))
    assert (len(out.tokens), out.finish_reason) == (3, "length")


def test_a_checkpoint_without_a_case_gets_settings_and_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(ROOT / "checkpoints" / "austen_moe", batch_size=2, **{"quantization.method": "none"})
    out = capsys.readouterr().out
    assert "chosen for this machine: 2 sequences" in out
    assert out.count("umbra init") == 1
    assert llm.case.data_config.batch_size == 2
    assert llm.case.name == "austen_moe"
    assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4))[0].text


@pytest.mark.parametrize(
    ("model", "settings", "complaint"),
    [
        ("demo", {"gpu_memory_utilization": 0.9}, "^gpu_memory_utilization: memory is counted"),
        ("demo", {"max_model_len": 1}, "data_config.max_model_len: 1 must be at least 2"),
        ("demo", {"batchsize": 3}, "^batchsize: unknown key, did you mean 'batch_size'"),
        ("demo_tp8", {}, "world_size: 8: this runs on one rank"),
        ("dmo", {}, "no case 'dmo'"),
        ("tests", {}, "config.json does not exist"),
    ],
)
def test_what_cannot_be_opened_is_one_line(model: str, settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as raised:
        LLM(model, **settings)
    assert "\n" not in str(raised.value)


def test_the_documented_lines_work_in_a_script_of_another_folder(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
from umbra import LLM, SamplingParams
llm = LLM("demo")
for out in llm.generate(["Emma was"], SamplingParams(max_tokens=20, temperature=0.8, seed=1)): print(out.text)
for piece in llm.stream("Emma was"): print(piece, end="")
""")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
