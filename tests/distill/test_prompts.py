"""Prompts: conversations as they are, documents cut, instructions invented; what makes none is refused by name."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from draftstill.corpus import Document
from draftstill.distill import cut_prompts, encode
from draftstill.distill.chats import real_prompts
from draftstill.distill.prompts import _BORDER, Prompt, Refusals, _starts, seed_of
from draftstill.distill.responses import split_counts
from draftstill.distill.synthetic import instruction, synthetic_prompts
from draftstill.errors import DraftstillError
from draftstill.recipe import Respond
from tests.pipeline import make_tokenizer, words

WORDS = words()[6:]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{% if m.role == 'user' %}<user>{% elif m.role == 'assistant' %}<assistant>{% else %};{% endif %} {{ m.content }} "
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}{{ v }} {% endfor %}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% if add_generation_prompt %}<assistant> . {% endif %}"
)


def chat(name: str, *turns: Any, tools: list[dict[str, Any]] | None = None) -> Document:
    """A conversation of (role, content) pairs, or whole messages."""
    messages = [t if isinstance(t, dict) else {"role": t[0], "content": t[1]} for t in turns]
    return Document(name, "train", name, " ".join(str(m.get("content")) for m in messages), messages, tools)


def tokenizer() -> Any:
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return made


def real(*documents: Document, count: int = 100, context: int | None = None, **settings: Any) -> tuple[list[Prompt], dict[str, str]]:
    refusals = Refusals()
    found = real_prompts(documents, count, Respond(**settings), tokenizer(), 0, context, refusals)
    return found, {r["id"]: r["reason"] for r in refusals.rows}


def read(prompt: Prompt) -> str:
    return tokenizer().decode(prompt.ids)


# --- conversations ----------------------------------------------------------------------------------------------------------------


def test_a_conversation_ends_before_its_last_assistant_turn() -> None:
    a, b, c, d = WORDS[:4]
    (found,), refused = real(chat("x", ("system", d), ("user", a), ("assistant", b), ("user", c), ("assistant", "never seen")))
    assert read(found) == f"; {d} <user> {a} <assistant> {b} <user> {c} <assistant> ." and not refused
    assert found.supervised_from == len(found.ids) - 1 and found.kind == "real" and found.id == "x"
    (alone,), _ = real(chat("y", ("user", a)))
    assert read(alone) == f"<user> {a} <assistant> .", "one that nobody answered yet"
    (behind,), _ = real(chat("z", ("user", a), ("assistant", b), ("user", c)))
    assert read(behind) == f"<user> {a} <assistant> ."


def test_tools_and_tool_calls_reach_the_template_as_objects() -> None:
    a, b, c, d = WORDS[:4]
    call = {
        "role": "assistant",
        "content": None,
        "name": None,
        "tool_calls": [{"function": {"name": "f", "arguments": f'{{"x": "{b}", "y": "{c}"}}'}}],
    }
    (found,), refused = real(
        chat("x", ("user", a), call, ("tool", d), ("assistant", "z"), tools=[{"type": "function", "function": {"name": a}}])
    )
    assert read(found) == f"<user> {a} <assistant> {b} {c} ; {d} {a} <assistant> ." and not refused
    assert found.tools[0]["function"]["name"] == a and "name" not in found.messages[1]


def test_parts_of_text_are_joined_and_other_parts_refused() -> None:
    a, b = WORDS[:2]
    parts = [{"type": "text", "text": a + " "}, {"type": "text", "text": b}]
    found, refused = real(
        chat("x", ("user", parts)), chat("y", ("user", [{"type": "image_url", "image_url": {"url": "u"}}])), chat("z", ("user", {"a": 1}))
    )
    assert [read(p) for p in found] == [f"<user> {a} {b} <assistant> ."]
    assert refused == {"y": "content that is not text", "z": "content that is not text"}


@pytest.mark.parametrize(("turns", "reason"), [
    ([("narrator", "once"), ("user", "x")], "refused by the chat template"),
    ([("user", "a\ud800b")], "refused by the chat template"),
    ([("user", "   ")], "nothing is asked"),
    ([("user", None)], "nothing is asked"),
    ([("system", "be kind")], "nothing is asked"),
    ([("assistant", "first"), ("user", "x")], "nothing is asked"),
    ([{"content": "x"}], "a turn without a role"),
])  # fmt: skip
def test_a_conversation_that_makes_no_prompt_is_refused_and_the_others_go_on(turns: list[Any], reason: str) -> None:
    found, refused = real(chat("bad", *turns), chat("good", ("user", WORDS[0])))
    assert [p.id for p in found] == ["good"] and refused == {"bad": reason}


def test_a_conversation_without_any_turn() -> None:
    found, refused = real(Document("empty", "train", "empty", "", []))
    assert not found and refused == {"empty": "nothing is asked"}


def test_of_a_long_conversation_the_oldest_turns_go_and_the_system_stays() -> None:
    a, b, c, d, e = WORDS[:5]
    long = chat("x", ("system", d), ("user", " ".join([a] * 30)), ("assistant", b), ("user", c), ("assistant", e), ("user", a))
    (found,), _ = real(long, chat_tokens=20)
    assert read(found) == f"; {d} <user> {c} <assistant> ."
    (whole,), _ = real(long, chat_tokens=100)
    assert len(whole.ids) == 2 + 31 + 2 + 2 + 2
    (held,), _ = real(long, chat_tokens=100, context=21)
    assert held.ids == found.ids, "the target's context is a limit, too"
    nothing, refused = real(chat("y", ("user", " ".join([a] * 30))), chat_tokens=20)
    assert not nothing and refused == {"y": "longer than a prompt may be"}


def test_a_row_of_10_mb_is_refused_at_once() -> None:
    started = time.perf_counter()
    found, refused = real(chat("big", ("user", f"{WORDS[0]} " * 2_000_000)), chat("good", ("user", WORDS[0])))
    assert [p.id for p in found] == ["good"] and list(refused) == ["big"] and time.perf_counter() - started < 2


def test_asking_for_more_only_adds_and_a_base_model_is_told() -> None:
    many = [chat(f"c{n}", ("user", WORDS[n])) for n in range(30)]
    assert real(*many, count=7)[0] == real(*many)[0][:7]
    base = make_tokenizer()
    base.chat_template = None
    with pytest.raises(DraftstillError, match="no chat template") as caught:
        real_prompts(many, 1, Respond(), base, 0, None, Refusals())
    assert caught.value.key == "target.source"


def test_a_corpus_of_both_kinds_gives_both() -> None:
    text = ". ".join(" ".join(WORDS[n : n + 9]) for n in range(40))
    documents = [chat(f"c{n}", ("user", WORDS[n])) for n in range(6)] + [Document(f"d{n}", "train", f"d{n}", text) for n in range(2)]
    found = cut_prompts(documents, 8, Respond(prompt_tokens=8), tokenizer(), 0)
    assert [p.kind for p in found] == ["real"] * 6 + ["cut"] * 2


# --- documents --------------------------------------------------------------------------------------------------------------------


def test_passages_stand_where_a_plain_search_puts_them() -> None:
    rng = random.Random(3)
    for n in range(30):
        text = "".join(rng.choice(["word ", "it is. ", "\n\n", "so: "]) for _ in range(rng.randint(0, 800)))
        document = Document(f"d{n}", "train", "g", text)
        borders = [m.end() for m in _BORDER.finditer(text)]
        random.Random(seed_of(5, "borders", document.id)).shuffle(borders)
        chosen = [0]
        for at in borders:
            if all(abs(at - other) >= 2 * 8 * 4 for other in chosen):
                chosen.append(at)
        assert _starts(document, 4, 5) == chosen


def test_a_large_document_is_cut_in_seconds() -> None:
    started = time.perf_counter()
    found = cut_prompts(
        [Document("big", "train", "big", "It is so. And so it was. " * 40_000)], 20, Respond(prompt_tokens=8), make_tokenizer(), 0
    )
    assert len(found) == 20 and time.perf_counter() - started < 8, "each border looks at its neighbours only"


# --- instructions -----------------------------------------------------------------------------------------------------------------

PASSAGE = "The licensee shall not sublicense the software to any third party without consent."


@pytest.mark.parametrize(("reply", "text"), [
    ("What does the licence forbid?", "What does the licence forbid?"),
    ("1. What does the licence forbid?\n2. Who consents?", "What does the licence forbid?"),
    ("Sure! Here is a question:\n\n- **What does the licence forbid?**", "What does the licence forbid?"),
    ('Question: "What does the licence forbid?"\n\nAnswer: nothing', "What does the licence forbid?"),
    ("**Task 1:** Explain to me what consent means.", "Explain to me what consent means."),
    ("# Question\n", "Question"),
    ("“Wer stimmt hier zu?”", "Wer stimmt hier zu?"),
])  # fmt: skip
def test_an_instruction_is_taken_out_of_its_wrapping(reply: str, text: str) -> None:
    assert instruction(reply, PASSAGE, Respond().synthetic.ask, "eos")[0] == text


@pytest.mark.parametrize(("reply", "finish", "reason"), [
    ("", "eos", "empty instruction"), ("  \n \n", "eos", "empty instruction"), ("Yes.", "eos", "empty instruction"),
    ("What does the licence say about the", "length", "instruction cut off"),
    ("What does it say about consent?\nAnd what about the", "length", None),
    (PASSAGE, "eos", "echo of the passage"),
    ("Shall the licensee sublicense the software to any third party without consent?", "eos", "echo of the passage"),
    ("Write one question or task that can be understood without the passage.", "eos", "echo of the request"),
    ("Who may allow others to use a program?", "eos", None),
])  # fmt: skip
def test_what_is_no_instruction_is_refused_by_name(reply: str, finish: str, reason: str | None) -> None:
    assert instruction(reply, PASSAGE, Respond().synthetic.ask, finish)[1] == reason


def test_instructions_become_prompts_and_none_is_used_twice() -> None:
    reader, documents = make_tokenizer(), [Document(f"d{n}", "train", f"d{n}", " ".join(WORDS[n : n + 40])) for n in range(60)]
    asked: list[str] = []

    def write(stem: str, prompts: list[Prompt], length: int) -> list[dict[str, Any]]:
        asked.append(stem)
        assert length == 9 and all("<user>" in reader.decode(p.ids) for p in prompts)
        replies = [" ".join(WORDS[100 + seed_of(p.id) % 20 :][:4]) for p in prompts]  # twenty instructions in all
        return [{"response": [*encode(reader, text), 1], "finish": "eos"} for text in replies]

    refusals = Refusals()
    settings = Respond.model_validate({"synthetic": {"passage_tokens": 12, "instruction_tokens": 9, "ask": "bon {passage} bar"}})
    found = synthetic_prompts(documents, 12, settings, reader, 0, write, "s", refusals)
    texts = [reader.decode(p.ids) for p in found]
    assert len(found) == len(set(texts)) == 12 and all(t.startswith("<user> ") and t.endswith("<assistant> .") for t in texts)
    assert all(p.kind == "synthetic" and p.supervised_from == len(p.ids) - 1 for p in found)
    assert asked[0] == "s-0" and len(asked) > 1 and set(refusals.counts()) == {"instruction given before"}
    assert len(synthetic_prompts(documents, 1000, settings, reader, 0, write, "s", Refusals())) <= 20, "passages run out"


def test_the_request_must_name_the_passage_once() -> None:
    for ask in ("no place", "{passage} and {passage}"):
        with pytest.raises(ValueError, match="exactly once"):
            Respond.model_validate({"synthetic": {"ask": ask}})


# --- shares -----------------------------------------------------------------------------------------------------------------------


def test_shares_become_whole_numbers_that_add_up() -> None:
    assert split_counts(10, {"real": 2.0, "synthetic": 1.0}) == {"real": 7, "synthetic": 3}
    assert split_counts(7, {"real": 1.0, "cut": 1.0, "synthetic": 1.0}) == {"real": 3, "cut": 2, "synthetic": 2}
    assert split_counts(0, {"cut": 5.0}) == {"cut": 0}
    for count in range(40):
        assert sum(split_counts(count, {"real": 0.31, "cut": 0.22, "synthetic": 0.47}).values()) == count
