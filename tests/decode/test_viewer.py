"""``draftstill decode``: what a person sees is what was decoded."""

from __future__ import annotations

import json
import re

import pytest

from draftstill.decode import show
from draftstill.errors import DraftstillError
from tests import pipeline


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return pipeline.make_target(tmp_path_factory.mktemp("viewer") / "target")


def test_the_text_is_the_plain_one_and_the_marks_add_up(target, tmp_path, capsys):
    prompt = " ".join(pipeline.words()[6:14])
    plain = show(str(target), None, prompt, max_new_tokens=12)
    bare = capsys.readouterr().out
    trace = show(str(target), str(target), prompt, gamma=3, max_new_tokens=12, json_path=tmp_path / "trace.json")
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
