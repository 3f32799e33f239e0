"""Prompts: conversations as they are, documents cut, instructions invented; what makes none is refused by name."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from draftstill.corpus import Document
from draftstill.distill import cut_prompts, encode
from draftstill.distill.chats import chat_turn, real_prompts
from draftstill.distill.prompts import _BORDER, Prompt, Refusals, _starts, seed_of
from draftstill.distill.responses import split_counts
from draftstill.distill.synthetic import instruction, synthetic_prompts
from draftstill.errors import DraftstillError
from draftstill.readers import Unusable, prompt_keys, read_rows, text_of
from draftstill.recipe import Corpus, Respond
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


def test_a_conversation_ends_before_the_answer_at_its_end() -> None:
    a, b, c, d = WORDS[:4]
    (found,), refused = real(chat("x", ("system", d), ("user", a), ("assistant", b), ("user", c), ("assistant", "never seen")))
    assert read(found) == f"; {d} <user> {a} <assistant> {b} <user> {c} <assistant> ." and not refused
    assert found.supervised_from == len(found.ids) - 1 and found.kind == "real" and found.id == "x"
    (alone,), _ = real(chat("y", ("user", a)))
    assert read(alone) == f"<user> {a} <assistant> .", "one that nobody answered yet"
    (behind,), _ = real(chat("z", ("user", a), ("assistant", b), ("user", c)))
    assert read(behind) == f"<user> {a} <assistant> {b} <user> {c} <assistant> .", "one that ends with a question"


@pytest.mark.parametrize("roles", ["uau", "uaua", "suauau", "uatu", "uat", "uata", "ua", "u", "au", "aua", "uaa", "uuaa", "suauaua"])
def test_only_the_answer_at_the_end_is_left_out(roles: str) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    (found,), refused = real(chat("x", *((names[r], WORDS[n]) for n, r in enumerate(roles))))
    kept = roles.rstrip("a")
    assert [(m["role"], m["content"]) for m in found.messages] == [(names[r], WORDS[n]) for n, r in enumerate(kept)] and not refused


def test_examples_before_a_question_stay_before_it() -> None:
    shots = [("user", WORDS[0]), ("assistant", WORDS[1]), ("user", WORDS[2]), ("assistant", WORDS[3])]
    found, _ = real(*(chat(f"c{n}", *shots, ("user", WORDS[10 + n])) for n in range(5)))
    assert len({tuple(p.ids) for p in found}) == 5 and all(WORDS[3] in read(p) for p in found)


PARTS = [("a b", "a b"), (["a", " b"], "a b"), ([{"text": "a"}, {"type": None, "text": " b"}], "a b"), ([{"type": "input_text", "text": "a b"}], "a b"),
         ([{"type": "output_text", "text": "a"}, {"type": "text", "text": "\n"}, "b"], "a\nb"), (None, ""), ([], "")]  # fmt: skip


@pytest.mark.parametrize(("content", "text"), PARTS)
def test_text_in_parts_is_the_same_text_to_reader_and_template(content: Any, text: str, tmp_path: Path) -> None:
    """What the reader takes, the template gets; and prompts are told apart by the same text."""
    turn = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert chat_turn(turn)["content"] == text == text_of(content)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "Who?"}, turn, {"role": "user", "content": "So?"}]})
    )
    (row,) = read_rows(Corpus(source=str(tmp_path)))
    assert row.reason is None and row.messages is not None and f"Assistant: {text}" in str(row.text)
    plain = [*row.messages[:1], {**turn, "content": text}, *row.messages[2:]]
    assert list(prompt_keys(row.messages)) == list(prompt_keys(plain))


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {"url": "u"}}], [{"type": "text"}], [5], {"text": "x"}, 5, [{"type": "text", "text": None}]],
)
def test_what_is_no_text_is_none_to_reader_and_template(content: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    assert [row.reason for row in read_rows(Corpus(source=str(tmp_path)))][0] in ("not only text", "bad messages", "not a string")
    with pytest.raises(Unusable) as caught:
        chat_turn({"role": "user", "content": content})
    assert caught.value.reason == "content that is not text"


def test_calls_of_the_first_form_become_tool_calls() -> None:
    asked = {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": '{"q": "rent"}'}}
    made = chat_turn(asked)
    assert "function_call" not in made and made["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": "rent"}}
    answer = chat_turn({"role": "function", "name": "find", "content": "the tenant"})
    assert answer["role"] == "tool" and answer["tool_call_id"] == made["tool_calls"][0]["id"] and answer["content"] == "the tenant"
    both = {**asked, "tool_calls": [{"id": "1", "function": {"name": "g", "arguments": "{}"}}]}
    assert [c["id"] for c in chat_turn(both)["tool_calls"]] == ["1"]
    assert chat_turn({"role": "function", "content": "x"})["role"] == "tool"
    for strange in ("x", {}, {"name": 5}, []):
        chat_turn({"role": "assistant", "content": "", "function_call": strange})
    (found,), refused = real(chat("x", ("user", WORDS[0]), {**asked, "function_call": {"name": "find", "arguments": json.dumps({"q": WORDS[1]})}},
                                  {"role": "function", "name": "find", "content": WORDS[2]}))  # fmt: skip
    assert read(found) == f"<user> {WORDS[0]} <assistant> {WORDS[1]} ; {WORDS[2]} <assistant> ." and not refused


def test_arguments_nested_as_deeply_as_they_like() -> None:
    deep = '{"a": ' * 5000 + "1" + "}" * 5000
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    assert chat_turn(call)["tool_calls"][0]["function"]["arguments"] == deep
    found, refused = real(chat("bad", ("user", "x"), call, ("user", "y")), chat("good", ("user", WORDS[0])))
    assert [p.id for p in found] == ["good"] and list(refused) == ["bad"]


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
    assert read(found) == f"; {d} <user> {c} <assistant> {e} <user> {a} <assistant> ."
    (whole,), _ = real(long, chat_tokens=100)
    assert len(whole.ids) == 2 + 31 + 2 + 2 + 2 + 2 + 2
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
    assert [p.kind for p in found] == ["real", "real", "cut", "real", "real", "real", "cut", "real"]
    assert len({p.id for p in found}) == 8


@pytest.mark.parametrize("chats", [0, 1, 3, 5, 8])
def test_kinds_are_mixed_evenly_and_asking_for_more_only_adds(chats: int) -> None:
    """Whoever takes the first few, to time or to audit them, takes the corpus's mixture."""
    text = ". ".join(" ".join(WORDS[n : n + 9]) for n in range(40))
    documents = [chat(f"c{n}", ("user", WORDS[n])) for n in range(chats)]
    documents += [Document(f"d{n}", "train", f"d{n}", text) for n in range(8 - chats)]
    cut_ = lambda count: cut_prompts(documents, count, Respond(prompt_tokens=8), tokenizer(), 0)  # noqa: E731
    whole = cut_(8)
    for count in range(9):
        found = cut_(count)
        assert found == whole[:count] and len(found) == count
        assert abs(sum(p.kind == "real" for p in found) - count * chats / 8) <= 0.5


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


def inventing(reader: Any, kinds: int) -> Any:
    """A target that invents one of so many instructions, by the passage alone."""

    def write(stem: str, prompts: list[Prompt], length: int) -> list[dict[str, Any]]:
        replies = [" ".join(WORDS[100 + seed_of(p.id) % kinds % 70 :][:4] + WORDS[seed_of(p.id) % kinds // 70 :][:1]) for p in prompts]
        return [{"response": [*encode(reader, text), 1], "finish": "eos"} for text in replies]

    return write


def texts_of(prompts: list[Prompt]) -> list[str]:
    return [read(p) for p in prompts]


@pytest.mark.parametrize("kinds", [30, 300])
def test_passages_are_asked_about_until_there_are_enough_and_more_only_adds(kinds: int) -> None:
    """Where most replies were given before, far more passages are needed than instructions."""
    reader, documents = make_tokenizer(), [Document(f"d{n}", "train", f"d{n}", " ".join(WORDS[n % 90 : n % 90 + 40])) for n in range(900)]
    settings = Respond.model_validate({"synthetic": {"passage_tokens": 12, "ask": "bon {passage} bar"}})
    found = {n: synthetic_prompts(documents, n, settings, reader, 0, inventing(reader, kinds), "s", Refusals()) for n in (5, 20, 30)}
    assert [len(found[n]) for n in (5, 20, 30)] == [5, 20, 30]
    assert texts_of(found[30])[:20] == texts_of(found[20]) and texts_of(found[20])[:5] == texts_of(found[5])


def test_an_instruction_for_training_does_not_validate() -> None:
    reader = make_tokenizer()
    sides = [
        [Document(f"{side}{n}", side, "g", " ".join(WORDS[n % 90 : n % 90 + 40])) for n in range(300)] for side in ("train", "validation")
    ]
    settings = Respond.model_validate({"synthetic": {"passage_tokens": 12, "ask": "bon {passage} bar"}})
    known: set[str] = set()
    one, two = (synthetic_prompts(docs, 25, settings, reader, 0, inventing(reader, 40), "s", Refusals(), known) for docs in sides)
    assert len(one) == 25 and 5 <= len(two) <= 15 and not set(texts_of(one)) & set(texts_of(two))


def test_a_target_that_writes_no_instruction_is_not_asked_for_ever() -> None:
    documents = [Document(f"d{n}", "train", f"d{n}", " ".join(WORDS[n % 90 : n % 90 + 40])) for n in range(3000)]
    settings, asked = Respond.model_validate({"synthetic": {"passage_tokens": 12, "ask": "bon {passage} bar"}}), list[int]()

    def write(stem: str, prompts: list[Prompt], length: int) -> list[dict[str, Any]]:
        asked.append(len(prompts))
        return [{"response": [], "finish": "eos"} for _ in prompts]

    refusals = Refusals()
    assert synthetic_prompts(documents, 10, settings, make_tokenizer(), 0, write, "s", refusals) == []
    assert 512 <= sum(asked) < 600 and refusals.counts() == {"empty instruction": sum(asked)}


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
