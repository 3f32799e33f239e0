"""Private data gets placeholders; what only looks like it stays."""

from __future__ import annotations

import json
import random
import re
import time

import pytest

from draftstill.corpus import prepare_corpus, read_documents
from draftstill.gathering import Gathering
from draftstill.readers import Row, read_rows, redacted
from draftstill.recipe import Corpus, Recipe, Target
from draftstill.redact import PATTERNS, Redactor
from draftstill.runfolder import RunFolder

ALL = tuple(PATTERNS)
FOUND = {
    "email": ["anna.b+x@mail.example.org", "ANNA@EXAMPLE.ORG", "a_b@sub.domain.co"],
    "phone": ["+49 30 901820", "+1 (555) 010-9999", "+442079460958", "(555) 010-9999", "555-010-9999", "030 90182 050", "(030) 901820"],
    "card": ["4111 1111 1111 1111", "4111111111111111", "5500-0000-0000-0004", "3400 000000 00009"],
    "iban": ["DE89 3704 0044 0532 0130 00", "GB82WEST12345698765432"],
    "ip": ["192.168.10.254", "2001:db8:85a3:0:0:8a2e:370:7334", "2001:db8::8a2e:370:7334"],
    "key": ["hf_abcdefghijklmnopqrstuvwx", "sk-proj-abcdefghijklmnop123456", "AKIAIOSFODNN7EXAMPLE", "ghp_" + "a1B2" * 9, "xoxb-123456789012-abc",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmN", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY9",
            "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----"],
}  # fmt: skip
KEPT = [
    "2024-01-01", "2024-01-01T12:30:45Z", "12:30:45", "1.2.3", "version 10.0.19045", "Section 4.1.2.3.4", "999.1.1.1",
    "pages 100-200", "ISBN 978-3-16-148410-0",
    "4111 1111 1111 1112", "1234567890123456", "100 000 000", "1,000,000,000", "3.14159265358979", "0.000001", "an @ sign", "user@host", "@handle",
    "d41d8cd98f00b204e9800998ecf8427e", "da39a3ee5e6b4b0d3255bfef95601890afd80709", "123e4567-e89b-12d3-a456-426614174000",
    "a/path/to/some/file/that/is/long/enough/for/it", "averyveryveryveryverylongwordwithoutend", "https://example.org/a/b/c/d/e/f/g?q=1",
    "GB82WEST12345698765433", "the password is required", "secret: none", "DE PARTMENT", "AB12 CDEF", "<EMAIL_1>", "call_0123456789abcdefABCDEF12",
]  # fmt: skip


def change(text, kinds=ALL):
    return Redactor(kinds).replace(text, beside=text)[0]


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in FOUND.items() for value in values])
@pytest.mark.parametrize("around", ["{}", "Reach me ({}), please.", "to {}.", '{{"x": "{}"}}', "a\n{}\nb"])
def test_private_data_is_found(kind, value, around):
    text = around.format(value)
    assert change(text) == around.format(f"<{kind.upper()}_1>")
    others = [k for k in ALL if k != kind]
    assert f"<{kind.upper()}_" not in change(text, others) and change(text, []) == text


@pytest.mark.parametrize("text", KEPT)
def test_what_only_looks_like_it_stays(text):
    assert change(text) == text and change(f"see {text}, please") == f"see {text}, please"


@pytest.mark.parametrize(
    "text", ["password: hunter2hunter2", "API_KEY=abcd1234efgh", "Authorization: Bearer abc123def456ghi", '"client_secret": "0a1b2c3d4e"']
)
def test_a_secret_by_its_name_keeps_the_name(text):
    made = change(text)
    assert "<KEY_1>" in made and made.split("<")[0] == text[: made.index("<")] and not any(c.isdigit() for c in made.replace("<KEY_1>", ""))


def test_one_value_has_one_placeholder_and_present_ones_are_not_given_again():
    text = "a@x.org, b@x.org, a@x.org; <EMAIL_2> was here"
    redactor = Redactor(["email"])
    assert redactor.replace(text, beside=text) == ["<EMAIL_1>, <EMAIL_3>, <EMAIL_1>; <EMAIL_2> was here"]
    assert redactor.counts == {"email": 3} and redactor.rows == 1
    assert redactor.replace("c@x.org", beside="c@x.org") == ["<EMAIL_1>"]  # numbers are a document's own


def test_turns_arguments_and_tools_of_a_conversation_agree():
    call = {"id": "1", "type": "function", "function": {"name": "mail", "arguments": json.dumps({"to": "b@x.org", "cc": ["a@x.org"]})}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "I am a@x.org"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    row = Row("r", "User: I am a@x.org\n\nAssistant: mail(...b@x.org a@x.org)", messages=messages, tools=[{"description": "b@x.org"}])
    made = redacted(row, Redactor(ALL))
    assert made.messages[0]["content"] == [{"type": "text", "text": "I am <EMAIL_1>"}]
    assert json.loads(made.messages[1]["tool_calls"][0]["function"]["arguments"]) == {"to": "<EMAIL_2>", "cc": ["<EMAIL_1>"]}
    assert made.tools == [{"description": "<EMAIL_2>"}] and "@x.org" not in made.text and "<EMAIL_2>" in made.text
    assert row.messages[0]["content"][0]["text"] == "I am a@x.org"


def test_the_stage_redacts_counts_and_says_so(tmp_path, capsys):
    rows = [{"prompt": f"Mail m{n}@x.org about the number {n}", "response": f"done {n}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = Corpus(source=str(tmp_path / "rows.jsonl"), redact=("email", "card"), heldout_fraction=0.4, near_duplicates=1.0)
    recipe = Recipe(run_dir=str(tmp_path / "run"), target=Target(source="a/b"), corpus=corpus)
    folder = prepare_corpus(recipe, RunFolder(recipe.run_dir))
    facts = json.loads((folder / "provenance.json").read_text())["facts"]
    assert facts["redacted"] == {"documents": 20, "replaced": {"email": 20, "card": 0}}
    assert b"@x.org" not in b"".join(p.read_bytes() for p in folder.iterdir())
    assert all("<EMAIL_1>" in d.messages[0]["content"] for d in read_documents(folder, "train"))
    assert "redacted in 20 rows: 20 email, 0 card" in capsys.readouterr().out


PRIVATE = ("anna@x.org", "bert@x.org", "Carla Miller", "+49 30 901820")


def named_by_key(folder, values):
    (folder / "people.json").write_text(json.dumps(dict(zip(PRIVATE, values, strict=True))))


def named_by_file(folder, values):
    for name, value in zip(PRIVATE, values, strict=True):
        (folder / f"{name}.jsonl").write_text(json.dumps(value) + "\n")


def documents_named_by_file(folder, values):
    for name, value in zip(PRIVATE, values, strict=True):
        (folder / name).mkdir()
        (folder / name / "letter.txt").write_text(value["text"] if isinstance(value["text"], str) else "")


def of_unknown_fields(folder, values):
    """A row with a field that is named by an address, beside rows that can be read."""
    (folder / "odd.jsonl").write_text(json.dumps({PRIVATE[0]: 1}) + "\n")
    (folder / "rows.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))


@pytest.mark.parametrize("write", [named_by_key, named_by_file, documents_named_by_file, of_unknown_fields])
def test_names_of_rows_tell_nothing_private_and_stay_apart(write, tmp_path, capsys):
    """Ids stand in documents, in the list of rejected rows, in reports and on the screen."""
    (tmp_path / "texts").mkdir()
    values = [{"text": f"text number {n} " + " ".join(str(n * k) for k in range(80))} for n in range(len(PRIVATE) - 1)] + [{"text": 7}]
    write(tmp_path / "texts", values)
    for n in range(6):
        (tmp_path / "texts" / f"other{n}.txt").write_text(f"other number {n} " + " ".join(str(n + k * k) for k in range(80)))
    corpus = Corpus(source=str(tmp_path / "texts"), redact=ALL, heldout_fraction=0.4, near_duplicates=1.0, min_chars=1)
    recipe = Recipe(run_dir=str(tmp_path / "run"), target=Target(source="a/b"), corpus=corpus)
    folder = prepare_corpus(recipe, RunFolder(recipe.run_dir))
    told = capsys.readouterr()
    written = "".join(p.read_text() for p in folder.iterdir() if p.name != "provenance.json") + told.out + told.err
    hidden = [name for name in PRIVATE if write is named_by_key or name != "Carla Miller"]  # a name in free text has no form
    assert [name for name in hidden if name in written] == []
    ids = [json.loads(line)["id"] for line in (folder / "documents.jsonl").read_text().splitlines()]
    facts = json.loads((folder / "provenance.json").read_text())["facts"]
    assert len(ids) == len(set(ids)) == len(values) - 1 + 6 == facts["kept"], "no two names became one"
    assert facts["redacted"]["documents"] == 0, "what is counted is text"


def test_without_redaction_rows_are_named_by_their_keys(tmp_path):
    named_by_key(tmp_path, [{"text": f"text number {n}"} for n in range(len(PRIVATE))])
    assert [row.id for row in read_rows(Corpus(source=str(tmp_path / "people.json")))] == [f"people.json:{name}" for name in PRIVATE]
    private = Corpus(source=str(tmp_path / "people.json"), redact=("email",))
    assert [row.id for row in read_rows(private)] == [f"people.json:{n}" for n in range(1, len(PRIVATE) + 1)]


TEXTS = {
    "base64url": lambda n: "".join(random.Random(0).choices("abcdefghijkLMNOPQRSTUVWXYZ0123456789-_", k=n)),
    "joined words": lambda n: "ab-" * (n // 3),
    "local parts": lambda n: "+a" * (n // 2),
    "domains": lambda n: "a@" * (n // 2) + "a." * n,
    "web tokens": lambda n: "eyJabcdefgh-" * (n // 12),
    "two parts of a web token": lambda n: "eyJabcdefgh-" * (n // 24) + ".eyJ" + "a" * (n // 2),
    "space behind a name": lambda n: "password" + " " * n,
    "lines behind a name": lambda n: "bearer:" + "\n" * n,
    "headers": lambda n: "-----BEGIN A" * (n // 12),
    "header": lambda n: "-----BEGIN " + "A " * (n // 2),
    "digits": lambda n: "4" * n,
    "groups": lambda n: "4111 12" * (n // 7),
    "numbers": lambda n: "030 90182-" + "12-" * (n // 3),
    "octets": lambda n: "12." * (n // 3),
    "colons": lambda n: "fab:a" * (n // 5),
    "country codes": lambda n: "+12 (" * (n // 5),
    "letters": lambda n: "DE89 ABCD " * (n // 10),
    "many addresses": lambda n: " ".join(f"a{k}@x.org" for k in range(n // 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_it_takes_time_by_the_length_of_the_text(name):
    """Eight times the text, eight times the time; sixty-four times where each place is read from every other."""

    def seconds(size):
        text, start = TEXTS[name](size), time.process_time()
        change(text)
        return time.process_time() - start

    assert seconds(1 << 16) < 24 * seconds(1 << 13) + 0.1


LOOSE = {  # what is found, written plainly: it takes the square of the length of some texts
    "email": r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}\b",
    "key": r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",
}
PIECES = {
    "email": [*"ab.+-@_ 1é", "x.org"],
    "key": ["eyJ", "eyJabcdefgh", ".", "-", "abcdefgh", " ", "é", ".eyJ", "eyJabcdefgh.eyJabcdefgh.abcdefgh"],
}


@pytest.mark.parametrize("kind", LOOSE)
def test_what_is_found_hangs_on_no_way_of_searching(kind):
    rng = random.Random(5)
    for _ in range(3000):
        text = "".join(rng.choices(PIECES[kind], k=rng.randint(3, 14)))
        redactor = Redactor([kind])
        assert re.sub(r"<[A-Z]+_\d+>", "<>", redactor.replace(text, beside=text)[0]) == re.sub(LOOSE[kind], "<>", text), text


def test_what_is_too_long_is_not_redacted_first(tmp_path, monkeypatch):
    changed = []
    monkeypatch.setattr(Redactor, "replace", lambda self, *values, beside: changed.append(len(beside)) or list(values))
    rows = [{"text": f"{n} " + "x " * (5000 if n == 3 else 200)} for n in range(8)]
    rows += [{"prompt": "y " * 5000, "response": "z"}]
    for name, part in (("a", rows[:8]), ("b", rows[8:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    gathered = Gathering(Corpus(source=str(tmp_path), redact=("email",), max_chars=1000), tmp_path)
    changed.clear()
    gathered.gather()
    assert gathered.reasons == {"too long": 2} and len(gathered.ids) == 7
