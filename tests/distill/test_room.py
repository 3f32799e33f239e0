"""A prompt leaves room for its answer in the target's context, or is refused with the key to lower."""

from __future__ import annotations

from typing import Any

import pytest

from draftstill.corpus import Document
from draftstill.distill import cut_prompts
from draftstill.distill.prompts import Prompt, Refusals
from draftstill.distill.synthetic import synthetic_prompts
from draftstill.errors import DraftstillError
from draftstill.recipe import Respond
from tests.distill.test_prompts import WORDS, inventing
from tests.pipeline import make_tokenizer


@pytest.mark.parametrize("template", [False, True])
def test_a_cut_prompt_leaves_room_for_an_answer(template: bool) -> None:
    documents = [Document("d", "train", "d", " ".join(WORDS))]
    settings = Respond(prompt_tokens=20, chat_template=template)
    (found,) = cut_prompts(documents, 1, settings, make_tokenizer(), 0)
    assert cut_prompts(documents, 1, settings, make_tokenizer(), 0, context=len(found.ids) + 1) == [found]
    for context in (len(found.ids), len(found.ids) - 2):
        with pytest.raises(DraftstillError, match=rf"holds {context}\b") as caught:
            cut_prompts(documents, 1, settings, make_tokenizer(), 0, context=context)
        assert caught.value.key == "respond.prompt_tokens" and caught.value.value == 20
        assert f"by at least {len(found.ids) + 1 - context}" in str(caught.value.mend)


def test_passages_that_do_not_fit_are_an_error_at_once_and_odd_ones_are_refused() -> None:
    """One whose tokens turn out a few more behind the template costs itself; where most are too long it is the setting."""
    reader, asked = make_tokenizer(), list[str]()

    def write(stem: str, prompts: list[Prompt], length: int) -> list[dict[str, Any]]:
        asked.extend(p.id for p in prompts)
        return inventing(reader, 300)(stem, prompts, length)

    settings = Respond.model_validate({"synthetic": {"passage_tokens": 12, "ask": "bon {passage} bar"}})
    whole = 12 + 2 + 3  # the request, and the template's own
    long = [Document(f"d{n}", "train", f"d{n}", " ".join(WORDS[n : n + 40])) for n in range(60)]
    assert len(synthetic_prompts(long, 5, settings, reader, 0, write, "s", Refusals(), context=whole + 1)) == 5
    asked.clear()
    with pytest.raises(DraftstillError, match=rf"holds {whole}\b") as caught:
        synthetic_prompts(long, 5, settings, reader, 0, write, "s", Refusals(), context=whole)
    assert caught.value.key == "respond.synthetic.passage_tokens" and caught.value.value == 12 and not asked
    assert "by at least 1" in str(caught.value.mend)
    short, refusals = [Document(f"s{n}", "train", f"s{n}", " ".join(WORDS[n : n + 6])) for n in range(60)], Refusals()
    found = synthetic_prompts([*short, *long[:9]], 30, settings, reader, 0, write, "s", refusals, context=whole)
    assert len(found) == 30 and all(name.startswith("s") for name in asked)
    assert refusals.counts()["longer than a prompt may be"] > 0
