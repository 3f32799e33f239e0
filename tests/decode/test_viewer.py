"""``draftstill decode``: what a person sees is what was decoded."""

from __future__ import annotations

import json
import re

import pytest

from draftstill.decode import show, simulate
from draftstill.errors import DraftstillError
from tests import pipeline


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return pipeline.make_target(tmp_path_factory.mktemp("viewer") / "target")


def test_the_text_is_the_plain_one_and_the_marks_add_up(target, tmp_path, capsys):
    prompt = " ".join(pipeline.words()[6:14])
    (plain,) = show(str(target), None, prompt, max_new_tokens=12)
    bare = capsys.readouterr().out
    (trace,) = show(str(target), str(target), prompt, gamma=3, max_new_tokens=12, json_path=tmp_path / "trace.json")
    marked = capsys.readouterr().out
    assert trace.tokens == plain.tokens
    text = lambda out: re.sub(r"[~+\s]", "", out.split("\n\n")[0])  # noqa: E731
    assert text(marked) == text(bare) != ""
    assert "accepted 9 of 9 proposed (100%)" in marked and "accepted" not in bare
    stored = json.loads((tmp_path / "trace.json").read_text())
    assert stored["trace"]["tokens"] == trace.tokens and stored["metrics"]["token_acceptance"] == 1.0


def test_a_draft_with_another_tokenizer_is_refused(target, tmp_path):
    other = pipeline.make_target(tmp_path / "other", vocabulary=[*pipeline.words()[:-1], "another"])
    with pytest.raises(DraftstillError, match="differ at"):
        show(str(target), str(other), "a", gamma=2)


def test_every_option_reaches_the_decoder(target, tmp_path, capsys):
    """Lookup, adaptive gamma, confidence, processors and stop strings change how it is decoded, not what plain decoding writes."""
    prompt = " ".join(pipeline.words()[6:14])
    settings = {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "min_new_tokens": 3, "max_new_tokens": 14}
    (plain,) = show(str(target), None, prompt, **settings)
    for options in ({"lookup": True}, {"adaptive": True}, {"min_confidence": 0.2}, {"backend": "graphs"}):
        (trace,) = show(str(target), str(target), prompt, gamma=3, **options, **settings)
        assert trace.tokens == plain.tokens
    assert "ran eagerly" in capsys.readouterr().out
    assert trace.engine["asked"] == "graphs"
    several = show(str(target), str(target), [prompt, prompt + " " + pipeline.words()[3]], json_path=tmp_path / "x.json", **settings)
    stored = json.loads((tmp_path / "x.json").read_text())
    assert len(several) == len(stored) == 2 and stored[0]["trace"]["tokens"] == plain.tokens
    word = stored[0]["text"].split()[4]
    (stopped,) = show(str(target), str(target), prompt, stop=[word], **settings)
    assert stopped.finish == "stop" and stopped.tokens == plain.tokens[: len(stopped.tokens)] and len(stopped.tokens) <= 5
    with pytest.raises(DraftstillError, match="no draft"):
        show(str(target), None, prompt, adaptive=True)
    show(str(target), None, prompt, chat=True, max_new_tokens=2, json_path=tmp_path / "chat.json")
    assert len(json.loads((tmp_path / "chat.json").read_text())["prompt_ids"]) > len(stored[0]["prompt_ids"])


SMALL = "random:smollm2-135m,hidden_size=64,intermediate_size=96,num_attention_heads=4,num_key_value_heads=2,vocab_size=300"


def test_simulated_acceptance_of_named_shapes(tmp_path, capsys):
    shapes = f"{SMALL},num_hidden_layers=4", f"{SMALL},num_hidden_layers=1"
    found = simulate(*shapes, 0.7, gamma=3, rows=2, prompt_tokens=8, new_tokens=40, repeats=3, json_path=tmp_path / "s.json")
    said = capsys.readouterr().out
    assert "SIMULATED" in said and all(len(line) <= 80 for line in said.splitlines() if "random:" not in line and "/" not in line)
    stored = json.loads((tmp_path / "s.json").read_text())
    assert stored["simulated"] is True and stored["engine"]["simulated_acceptance"] == 0.7 and stored["target"] == shapes[0]
    assert 1.5 < found.tau < 3.2 and found.speedup_low <= found.speedup <= found.speedup_high


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        (("random:no-such-shape", "random:no-such-shape"), "no shape of this name"),
        ((f"{SMALL},num_hidden_layers=x", SMALL), "KEY=NUMBER"),
        ((f"{SMALL},num_hidden_layers=1", f"{SMALL},num_hidden_layers=1,vocab_size=301"), "vocab_size=300"),
        ((SMALL, None), "needs a draft"),
        ((SMALL, "somewhere"), "make no pair"),
    ],
)
def test_bad_shapes_are_refused(pair, says):
    with pytest.raises(DraftstillError, match=says):
        simulate(*pair, 0.5)
