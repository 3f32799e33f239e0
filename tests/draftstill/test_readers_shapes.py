"""What rows of a chat log are taken for, and what becomes of their turns."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from draftstill.readers import FAULTS, read_rows
from draftstill.readers.conversations import compared
from draftstill.recipe import Corpus
from tests.draftstill.test_readers_batches import request, response

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"q": "rent"}'}}
ASKED, SAID = {"role": "user", "content": "Who pays the rent?"}, {"role": "assistant", "content": "The tenant does."}


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows))
    return path


def rows_of(source, **corpus):
    return list(read_rows(Corpus(source=str(source), **corpus)))


def pairs(row):
    return [(m["role"], m["content"]) for m in row.messages]


BATCH = "OpenAI batch requests (messages: body.messages, prompt: body.prompt, tools: body.tools, functions: body.functions)"
DIALOGUE = [("user", "Who pays the rent?"), ("assistant", "The tenant does.")]
BRIEFED = [("system", "Be brief."), *DIALOGUE]
SHAPES = {
    "messages": ({"messages": [ASKED, SAID]}, "messages", DIALOGUE),
    "messages as JSON": ({"messages": json.dumps([ASKED, SAID])}, "messages", DIALOGUE),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Who pays the rent?"}]}, SAID]}, "messages", None),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Who pays the rent?"}, {"from": "gpt", "value": "The tenant does."}]},
        "ShareGPT conversations (messages: conversations)", DIALOGUE,
    ),
    "ShareGPT, system": (
        {"id": 7, "conversations": [{"from": "system", "value": "Be brief."}, {"from": "Human", "value": "Who pays the rent?"},
                                    {"from": "gpt", "value": "The tenant does."}]},
        "ShareGPT conversations (messages: conversations)", BRIEFED,
    ),
    "prompt/response": ({"prompt": "Who pays the rent?", "response": "The tenant does."}, "prompt and response", DIALOGUE),
    "prompt/completion": ({"prompt": "Who pays the rent?", "completion": "The tenant does.", "system": "Be brief."},
                          "prompt and response (response: completion)", BRIEFED),
    "question/answer": ({"question": "Who pays the rent?", "answer": "The tenant does."},
                        "prompt and response (prompt: question, response: answer)", DIALOGUE),
    "turns in prompt and completion": ({"prompt": [BRIEFED and {"role": "system", "content": "Be brief."}, ASKED], "completion": [SAID]},
                                       "prompt and response (response: completion)", BRIEFED),
    "alpaca": ({"instruction": "Who pays the rent?", "input": "", "output": "The tenant does."}, "instruction", DIALOGUE),
    "alpaca, input": ({"instruction": "Answer.", "input": "Who pays?", "output": "The tenant."}, "instruction",
                      [("user", "Answer.\n\nWho pays?"), ("assistant", "The tenant.")]),
    "prompts": ({"prompt": "Who pays the rent?"}, "prompts", DIALOGUE[:1]),
    "batch": ({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [ASKED]}},
              BATCH, DIALOGUE[:1]),
    "batch, completions": ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Who pays the rent?"}},
                           BATCH, DIALOGUE[:1]),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_guessed_and_shown(tmp_path, capsys, name):
    value, shape, wanted = SHAPES[name]
    (row,) = rows_of(write(tmp_path / "rows.jsonl", value))
    assert row.reason is None, row
    if wanted is not None:
        assert pairs(row) == wanted
    assert "Who pays" in row.text
    shown = capsys.readouterr().out
    assert f"rows.jsonl:1 read as {shape}" in shown and "user: " in shown
    assert ("overrules" in shown) != name.startswith("batch")


def test_turns_and_tools_are_kept_as_they_are(tmp_path):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "pays?"}], "name": "anna"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL, {**CALL, "id": "2", "function": {"name": "f", "arguments": {"a": None}}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": '{"rent": "2024-01-01"}'},
        {"role": "assistant", "content": "The tenant.\r\n", "reasoning_content": "Looked it up."},
    ]
    sent = [{**m, "refusal": None, "tool_calls": m.get("tool_calls")} for m in messages]
    (row,) = rows_of(write(tmp_path / "rows.jsonl", {"messages": sent, "tools": TOOLS}))
    assert row.messages == messages and row.tools == TOOLS
    assert "find(" in row.text and "2024-01-01" in row.text and "anna" not in row.text
    assert "Be brief" in row.text and "Be brief" not in compared(row.messages)


def test_arguments_of_one_call_do_not_reach_another(tmp_path):
    import pyarrow
    import pyarrow.parquet

    calls = [[{"id": str(n), "type": "function", "function": {"name": "f", "arguments": {f"only{n}": n}}}] for n in range(3)]
    rows = [{"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": c}, SAID]} for c in calls]
    write(tmp_path / "rows.jsonl", *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        read = rows_of(tmp_path / name)
        assert [row.messages[1]["tool_calls"] for row in read] == calls, name
        assert [row.messages[2] for row in read] == [SAID] * 3


def test_calls_in_other_logs(tmp_path):
    turns = [{"from": "human", "value": "Who?"}, {"from": "function_call", "value": '{"name": "find", "arguments": {"q": 1}}'},
             {"from": "observation", "value": "the tenant"}, {"from": "gpt", "value": "The tenant."}]  # fmt: skip
    (row,) = rows_of(write(tmp_path / "rows.jsonl", {"conversations": turns, "tools": json.dumps(TOOLS)}))
    assert [m["role"] for m in row.messages] == ["user", "assistant", "tool", "assistant"] and row.tools == TOOLS
    assert row.messages[1]["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": 1}}


BAD = {
    "empty conversation": ({"messages": []}, {"messages": [ASKED | {"content": [{"type": "text", "text": "x"}]}][:0]}),
    "bad messages": ({"messages": "[1]"}, {"messages": [ASKED, None]}, {"messages": {"role": "user"}}, {"messages": None},
                     {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, {"messages": [{"role": "user", "content": [5]}]},
                     {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": ["f"]}]}),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, {"messages": [{"content": "x"}]}, {"messages": [{"role": None, "content": ""}]}),
    "null content": ({"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user"}]},
                     {"messages": [ASKED, {"role": "assistant", "content": None}]}),
    "empty turn": ({"messages": [{"role": "user", "content": " \n"}, SAID]}, {"messages": [{"role": "user", "content": []}]}),
    "no user turn": ({"messages": [{"role": "system", "content": "x"}]}, {"messages": [SAID]}),
    "not a string": ({"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "user", "content": {"text": "x"}}]}),
    "not only text": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},),
    "bad tools": ({"messages": [ASKED], "tools": "{"}, {"messages": [ASKED], "tools": [1]}, {"messages": [ASKED], "tools": {"a": 1}}),
    "bad JSON": ({"messages": "[{"},),
    "missing field": ({"text": "a document"}, {"conversations": [{"from": "human", "value": "x"}]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("reason", BAD)
def test_a_conversation_that_cannot_be_used_is_named(tmp_path, reason):
    good = {"messages": [ASKED, SAID]}
    rows = rows_of(write(tmp_path / "rows.jsonl", *[good] * 12, *BAD[reason], good))
    assert [row.reason for row in rows] == [None] * 12 + [reason] * len(BAD[reason]) + [None]
    assert (reason in FAULTS) == (reason != "not only text")


@pytest.mark.parametrize(("bad", "reason"), [({"prompt": "", "response": "x"}, "empty turn"), ({"prompt": None, "response": "x"}, "null content"),
                                             ({"prompt": "x", "response": None}, "null content"), ({"prompt": 20240101, "response": "x"}, "not a string"),
                                             ({"prompt": "x"}, "missing field"), ({"prompt": [], "response": "x"}, "empty conversation")])  # fmt: skip
def test_a_pair_that_cannot_be_used_is_named(tmp_path, bad, reason):
    good = {"prompt": "Who?", "response": "Me."}
    assert [row.reason for row in rows_of(write(tmp_path / "rows.jsonl", good, good, bad))] == [None, None, reason]


def test_mixed_shapes_keep_the_commonest_and_name_the_others(tmp_path):
    chat, share = {"messages": [ASKED, SAID]}, {"conversations": [{"from": "human", "value": "x"}]}
    rows = rows_of(write(tmp_path / "rows.jsonl", share, chat, {"text": "x"}, chat))
    assert [row.reason for row in rows] == ["missing field", None, "missing field", None]
    assert "looks like ShareGPT" in rows[0].detail and "looks like documents" in rows[2].detail


def test_fields_that_few_rows_have_are_read_from_them(tmp_path):
    plain, rich = {"prompt": "Who?", "response": "Me."}, {"prompt": "Who?", "response": "Me.", "system": "Be brief.", "tools": TOOLS}
    rows = rows_of(write(tmp_path / "rows.jsonl", *[plain] * 150, rich, plain))
    assert rows[150].tools == TOOLS and pairs(rows[150])[0] == ("system", "Be brief.") and rows[151].tools is None
    chat = {"messages": [ASKED, SAID]}
    rows = rows_of(write(tmp_path / "rows.jsonl", *[chat] * 150, {**chat, "tools": TOOLS}))
    assert rows[150].tools == TOOLS


def test_each_file_has_its_own_shape(tmp_path, capsys):
    write(tmp_path / "a.jsonl", {"messages": [ASKED, SAID]})
    write(tmp_path / "b.jsonl", {"prompt": "Who?", "response": "Me."})
    write(tmp_path / "c.jsonl", {"messages": [ASKED]})
    assert [len(row.messages) for row in rows_of(tmp_path)] == [2, 2, 1]
    assert capsys.readouterr().out.count("read as") == 2


def test_the_recipe_overrules_the_guess(tmp_path, capsys):
    rows = [
        {
            "text": "not this",
            "log": {"chat": [ASKED, SAID], "fn": TOOLS},
            "who": "c7",
            "a.b": "x",
            "q": "Who?",
            "r": "Me.",
            "s": "Be brief.",
        }
    ]
    path = write(tmp_path / "rows.jsonl", *rows)
    (row,) = rows_of(path, fields={"messages": "log.chat", "tools": "log.fn", "group": "who"})
    assert pairs(row) == DIALOGUE and row.tools == TOOLS and row.family == "who=c7"
    assert pairs(rows_of(path, fields={"prompt": "q", "response": "r", "system": "s"})[0])[0] == ("system", "Be brief.")
    assert pairs(rows_of(path, fields={"prompt": "q"})[0]) == [("user", "Who?")]
    assert pairs(rows_of(path, fields={"instruction": "q", "output": "r"})[0]) == [("user", "Who?"), ("assistant", "Me.")]
    assert pairs(rows_of(path, fields={"messages": "log.chat", "answer": "r"})[0])[-1] == ("assistant", "Me.")
    assert rows_of(path, fields={"text": "log.chat.0.content"})[0].text == ASKED["content"]
    assert rows_of(path, field="a.b")[0].text == "x"
    assert rows_of(path, fields={"messages": "log.chats"})[0].reason == "missing field"
    assert "overrules" not in capsys.readouterr().out


@pytest.mark.parametrize(("keys", "says"), [
    ({"field": "a", "fields": {"text": "b"}}, "not both"),
    ({"fields": {"response": "b"}}, "exactly one of"),
    ({"fields": {"prompt": "a", "text": "b"}}, "text and prompt"),
    ({"fields": {"text": "a", "tools": "b"}}, "tools does not go with text"),
    ({"fields": {"txt": "a"}}, "text"),
])  # fmt: skip
def test_fields_that_make_no_shape(keys, says):
    with pytest.raises(ValidationError, match=says):
        Corpus(source="x", **keys)


def test_rows_of_one_conversation_are_one_family(tmp_path):
    rows = [{"messages": [ASKED], "conversation_id": c} for c in ("a", "a", 5, "", None)]
    assert [row.family for row in rows_of(write(tmp_path / "rows.jsonl", *rows))] == ["conversation_id=a"] * 2 + [
        "conversation_id=5",
        None,
        None,
    ]


STRANGE = [None, 0, -1.5, True, "", " ", "x", "[", "[]", "{}", [], [None], ["x"], [[]], [{}], {}, {"text": 1}, {"a": {"b": [1]}},
           {"role": "user"}]  # fmt: skip
PLACES = [
    "messages", "messages.0", "messages.0.role", "messages.0.content", "messages.0.content.0", "messages.1.tool_calls", "messages.1.tool_calls.0",
    "messages.1.tool_calls.0.function", "messages.1.tool_calls.0.function.arguments", "messages.1.function_call", "tools", "tools.0",
    "conversation_id", "body", "body.messages", "body.tools", "custom_id", "response", "response.body", "response.body.choices",
    "response.body.choices.0", "response.body.choices.0.message", "response.body.choices.0.message.content", "response.status_code", "error",
    "conversations", "conversations.0", "conversations.0.from", "conversations.0.value", "prompt", "completion", "system", "instruction", "input", "output",
]  # fmt: skip


def put(value, path, new):
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    for part in parents:
        value = value[part]
    value[last] = new


@pytest.mark.parametrize("place", PLACES)
def test_a_strange_value_anywhere_is_kept_or_named(tmp_path, place):
    """Any value in any place: the row is read or rejected, the ones around it are read, and what is kept is JSON."""
    wholes = [
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [CALL], "function_call": CALL["function"]}],
         "tools": TOOLS, "conversation_id": "c"},
        request("a", tools=TOOLS), response("a"), {"conversations": [{"from": "human", "value": "x"}]},
        {"prompt": "x", "completion": "y", "system": "z"}, {"instruction": "x", "input": "y", "output": "z"},
    ]  # fmt: skip
    whole = next(w for w in wholes if place.split(".")[0] in w)
    rows = [whole]
    for strange in STRANGE:
        rows.append(json.loads(json.dumps(whole)))
        try:
            put(rows[-1], place, strange)
        except (TypeError, KeyError, IndexError):
            put(rows[-1], place.rsplit(".", 1)[0], [strange])
    write(tmp_path / "rows.jsonl", *rows, whole)
    if "response" in whole and "custom_id" in whole:
        write(tmp_path / "requests.jsonl", request("a"))
    read = rows_of(tmp_path)
    json.dumps([row._asdict() for row in read], allow_nan=False)
    assert all((row.reason is None) == (row.text is not None) for row in read)
    assert not read[-1].reason or "custom_id" in whole


def test_the_row_shown_is_redacted(tmp_path, capsys):
    write(tmp_path / "rows.jsonl", {"prompt": "I am anna@example.org", "response": "Hello."})
    rows_of(tmp_path, redact=("email",))
    shown = capsys.readouterr().out
    assert "<EMAIL_1>" in shown and "anna@" not in shown


SHARED = [{"from": "human", "value": ASKED["content"]}, {"from": "gpt", "value": SAID["content"]}]


@pytest.mark.parametrize("turns", [{"messages": [ASKED, SAID]}, {"conversations": SHARED},
                                   {"prompt": ASKED["content"], "response": SAID["content"]}, {"prompt": [ASKED], "completion": [SAID]},
                                   {"instruction": ASKED["content"], "output": SAID["content"]}])  # fmt: skip
@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_a_system_prompt_beside_the_turns_comes_first(tmp_path, turns, key):
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        (row,) = rows_of(write(tmp_path / "rows.jsonl", {key: system, **turns}))
        assert pairs(row) == [("system", system), *DIALOGUE] and "Be brief." in row.text
    for nothing in ("", "  ", None, []):
        (row,) = rows_of(write(tmp_path / "rows.jsonl", {key: nothing, **turns}))
        assert pairs(row) == DIALOGUE, nothing
    other = {"system": "system_prompt", "system_prompt": "system"}[key]
    (row,) = rows_of(write(tmp_path / "rows.jsonl", {key: "Be brief.", other: " ", **turns}))
    assert pairs(row)[0] == ("system", "Be brief.")
    for strange in (5, False, {"a": 1}):
        (row,) = rows_of(write(tmp_path / "rows.jsonl", {key: strange, **turns}))
        assert row.reason == "not a string" and "system" in row.detail, strange
    rows = rows_of(write(tmp_path / "rows.jsonl", *[turns] * 101, {key: "Be brief.", **turns}, {key: {"a": 1}, **turns}))
    assert pairs(rows[-2])[0] == ("system", "Be brief.") and rows[-1].reason == "not a string", "in rows that decided nothing"


def test_turns_that_begin_with_instructions_keep_their_own(tmp_path):
    for role in ("system", "developer"):
        (row,) = rows_of(
            write(tmp_path / "rows.jsonl", {"system": "Be loud.", "messages": [{"role": role, "content": "Be brief."}, ASKED]})
        )
        assert pairs(row) == [(role, "Be brief."), *DIALOGUE[:1]]
    (row,) = rows_of(
        write(tmp_path / "rows.jsonl", {"messages": [ASKED], "rules": "Be brief."}), fields={"messages": "messages", "system": "rules"}
    )
    assert pairs(row) == [("system", "Be brief."), *DIALOGUE[:1]]
    (row,) = rows_of(write(tmp_path / "rows.jsonl", {"messages": [ASKED], "system": [{"type": "image_url", "image_url": {"url": "u"}}]}))
    assert row.reason == "not only text"


@pytest.mark.parametrize("about", [5, True, {"x": 1}, {}, [], ["x"]])
@pytest.mark.parametrize("fields", [{}, {"instruction": "instruction", "input": "input", "output": "output"}])
def test_what_stands_below_an_instruction_is_text_or_the_row_is_named(tmp_path, about, fields):
    task = {"instruction": "a", "input": about, "output": "b"}
    rows = rows_of(write(tmp_path / "rows.jsonl", {**task, "input": "c"}, task, {**task, "input": None}), fields=fields)
    assert [row.reason for row in rows] == [None, "not a string", None] and "input" in rows[1].detail


@pytest.mark.parametrize("task", [{"instruction": "c", "input": "", "output": "d"}, {"prompt": "c", "response": "d"}, {"prompt": "c"}])
@pytest.mark.parametrize("fields", [{}, {"prompt": "prompt", "response": "response", "history": "history"}])
def test_earlier_turns_in_pairs_come_before_the_prompt(tmp_path, task, fields):
    if fields and "response" not in task:
        fields = {k: v for k, v in fields.items() if k != "response"}
    if fields and "instruction" in task:
        fields = {"instruction": "instruction", "input": "input", "output": "output", "history": "history"}
    histories = [[["a", "b"]], [], None, "an unrelated column", [["a"]], [["a", None]], ["a", "b"]]
    rows = rows_of(write(tmp_path / "rows.jsonl", *({**task, "history": h} for h in histories)), fields=fields)
    assert [row.reason for row in rows] == [None] * 4 + ["not a string"] * 3
    said = [[(m["role"], m["content"]) for m in row.messages] for row in rows[:4]]
    assert said[0] == [("user", "a"), ("assistant", "b"), *said[1]] and said[1] == said[2] == said[3] and said[1][0] == ("user", "c")


FIRST_FORM = [tool["function"] for tool in TOOLS]


@pytest.mark.parametrize("functions", [FIRST_FORM, json.dumps(FIRST_FORM), TOOLS])
@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}])
def test_functions_in_openais_first_form_are_tools(tmp_path, functions, tools):
    called = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    for turns in ({"messages": [ASKED, called]}, {"prompt": "Who?", "response": "Me."}, {"prompt": [ASKED], "completion": [called]}):
        (row,) = rows_of(write(tmp_path / "rows.jsonl", {**turns, "functions": functions, **tools}))
        assert row.tools == TOOLS
        (row,) = rows_of(write(tmp_path / "rows.jsonl", {**turns, "functions": ["f"], "tools": TOOLS}))
        assert row.tools == TOOLS, "the second form comes first"
        (row,) = rows_of(write(tmp_path / "rows.jsonl", {**turns, "functions": ["f"]}))
        assert row.reason == "bad tools"
    (row,) = rows_of(write(tmp_path / "rows.jsonl", request("a", functions=functions, **tools)))
    assert row.tools == TOOLS
