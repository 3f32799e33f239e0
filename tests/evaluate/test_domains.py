"""Held-out text: further domains are read as the corpus itself is, conversations and all, and nobody holds a whole split in memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftstill.corpus import Document, read_documents, stored_documents
from draftstill.errors import DraftstillError
from draftstill.evaluate.domains import Domain, domains, held_out
from draftstill.recipe import OWN
from draftstill.stages import stages
from tests.pipeline import borrowed, finished, make_tokenizer, opened, words

ROOT = Path(__file__).parents[2]
TEXT = " ".join(words()[6:100])


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)], **more}


def found(tmp_path: Path, rows: list[Any], respond: dict[str, Any] | None = None, tokenizer: Any = None, **corpus: Any) -> Domain:
    """The prompts of a further domain made of these rows."""
    other = tmp_path / "other"
    other.mkdir()
    for name, shape in (("chats", "messages"), ("texts", "text")):
        (other / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if shape in row))
    evaluate = {"prompts": 3, "domains": {"other": {"source": str(other), **corpus}}}
    recipe, run = opened(borrowed(tmp_path, "corpus", evaluate=evaluate, respond=respond or {}))
    own, domain = domains(recipe, run, stages(recipe, run), tokenizer or make_tokenizer())
    assert own.name == OWN and domain.name == "other" and own.prompts
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"corpus"}, "nothing is left behind"
    return domain


def test_conversations_of_a_domain_are_asked_through_the_chat_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [chat("ban ber", "bist bin", "bir", "ban"), chat("ber bist", "ban", tools=tools), {"text": TEXT}]
    domain = found(tmp_path, rows)
    tokenizer = make_tokenizer()
    read = {p.kind: [] for p in domain.prompts}
    for prompt in domain.prompts:
        read[prompt.kind].append(tokenizer.convert_ids_to_tokens(prompt.ids))
    assert sorted(read["real"]) == [
        ["<user>", "ban", "ber", "<user>", "bist", "bin", "<user>", "bir", "<assistant>", "."],
        ["<user>", "ber", "bist", "<assistant>", "."],
    ], "all turns before the last answer, and open for the target's own"
    assert len(read["cut"]) == 1 and [p.tools for p in domain.prompts if p.tools] == [tools]
    assert domain.facts["documents"] == 3


def test_what_the_corpus_leaves_out_the_domain_leaves_out(tmp_path: Path) -> None:
    known = read_documents(finished() / "run" / "corpus", "train")[0].text
    rows = [{"text": TEXT}, {"text": TEXT}, {"text": known}, {"text": "ban"}, {"text": TEXT * 2}, {"text": TEXT + "\0"}, {"text": 3}, chat("ban", "ber"),
            chat("ban", "ber"), {"text": f"{TEXT} to someone@example.org"}]  # fmt: skip
    domain = found(tmp_path, rows, {"prompt_tokens": 99}, max_chars=len(TEXT) + 30, redact=["email"])
    assert domain.facts["documents"] == 3, "one text, one conversation, and one with an address"
    assert not any("someone" in str(p.messages) for p in domain.prompts)


def test_private_data_of_a_domain_is_redacted(tmp_path: Path) -> None:
    domain = found(tmp_path, [chat("ban someone@example.org", "ber")], redact=["email"])
    assert [m["content"] for p in domain.prompts for m in p.messages] == ["ban <EMAIL_1>"]


@pytest.mark.parametrize(("rows", "respond", "key", "says"), [
    ([chat("ban")], {"chat_tokens": 2}, "respond.chat_tokens", "conversations of evaluate.domains.other: 1 longer than a prompt may be"),
    ([{"text": "ban"}], {}, "evaluate.domains.other.source", "1 too short"),
    ([], {}, "evaluate.domains.other.source", "no document that can be scored"),
])  # fmt: skip
def test_a_domain_that_asks_nothing_is_refused_with_the_reason(
    rows: list[Any], respond: dict[str, Any], key: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(DraftstillError) as caught:
        found(tmp_path, rows, respond)
    assert caught.value.key == key and says in str(caught.value)


REFUSING = "{{ raise_exception('System role not supported') }}"


def test_what_the_template_says_is_said(tmp_path: Path) -> None:
    """A domain of conversations that the template takes none of: the text is to blame, not the length."""
    strict = make_tokenizer()
    strict.chat_template = REFUSING
    with pytest.raises(
        DraftstillError, match=r"evaluate\.domains\.other: 2 refused by the chat template; the first: .*System role not"
    ) as caught:
        found(tmp_path, [chat("ban"), chat("ber", "bin")], tokenizer=strict)
    assert caught.value.key == "evaluate.domains.other.source" and caught.value.value == str(tmp_path / "other")
    recipe, _ = opened(tmp_path / "recipe.yaml")
    own = [Document("c", "test", "c", "ban", [{"role": "user", "content": "ban"}])]
    with pytest.raises(DraftstillError, match="System role not supported") as caught:
        held_out(recipe, own, strict, 1)
    assert caught.value.key == "corpus.source" and caught.value.value == recipe.corpus.source


def test_held_out_prompts_fit_the_target_s_context(tmp_path: Path) -> None:
    """The tiny target's holds 256 tokens."""
    talk = [{"role": "user" if n % 2 == 0 else "assistant", "content": " ".join(words()[6:76])} for n in range(5)]
    recipe, _ = opened(borrowed(tmp_path, "corpus"))
    (prompt,) = held_out(recipe, [Document("c", "test", "c", "ban", talk)], make_tokenizer(), 1)
    assert 200 < len(prompt.ids) < 256 < recipe.respond.chat_tokens, "its oldest turns are left out"
    text = Document("d", "test", "d", " ".join(words()[6:] * 3))
    with pytest.raises(DraftstillError, match="holds 256") as caught:
        held_out(opened(tmp_path / "recipe.yaml", "respond.prompt_tokens=256")[0], [text], make_tokenizer(), 1)
    assert caught.value.key == "respond.prompt_tokens" and caught.value.value == 256


def test_a_domain_of_conversations_needs_a_template(tmp_path: Path) -> None:
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(DraftstillError, match="no chat template"):
        found(tmp_path, [chat("ban", "ber")], tokenizer=bare)


@pytest.mark.parametrize("damaged", ["refuse", "keep"])
def test_a_domain_s_cut_off_file_is_refused_or_said_to_be_kept(damaged: str, tmp_path: Path) -> None:
    whole = json.dumps([{"text": f"{TEXT} {words()[n]}"} for n in range(6, 12)])
    (tmp_path / "cut.json").write_text(whole[: -len(TEXT)])
    evaluate = {"prompts": 3, "domains": {"other": {"source": str(tmp_path / "cut.json"), "damaged": damaged}}}
    recipe, run = opened(borrowed(tmp_path, "corpus", evaluate=evaluate))
    if damaged == "keep":
        assert domains(recipe, run, stages(recipe, run), make_tokenizer())[1].facts["documents"] == 5
        return
    with pytest.raises(DraftstillError, match="cannot be read") as caught:
        domains(recipe, run, stages(recipe, run), make_tokenizer())
    assert caught.value.key == "evaluate.domains.other.damaged"


def test_documents_on_the_disk_make_the_same_prompts() -> None:
    recipe, run = opened(finished() / "recipe.yaml")
    whole, stored = (read(run.path / "corpus", "test") for read in (read_documents, stored_documents))
    assert held_out(recipe, whole, make_tokenizer(), 5) == held_out(recipe, stored, make_tokenizer(), 5)


def test_no_stage_holds_a_whole_split() -> None:
    """A corpus has no bound; what reads one looks at a document at a time."""
    sources = [p for folder in ("decode", "distill", "train", "evaluate") for p in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 50
    assert [str(p) for p in sources if re.search(r"\bread_documents\b", p.read_text())] == []
