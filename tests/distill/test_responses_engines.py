"""Windows, a draft, a server: whoever writes the responses, their files are the same wherever an attempt stopped."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftstill.distill import read_responses, respond, seed_of, writing
from draftstill.distill.prompts import Prompt
from draftstill.distill.ranks import Ranks
from draftstill.errors import DraftstillError
from draftstill.recipe import Respond
from draftstill.runfolder import read_json
from tests.distill.fake_server import Fake, Reply, fake
from tests.pipeline import hashes, make_home, make_target, make_tokenizer, opened

FILES = "*-0*.json"


def rows(folder: Path, side: str = "train") -> list[dict[str, Any]]:
    return list(read_responses(folder, side))


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / "provenance.json")["facts"]
    return found


def many(count: int) -> list[Prompt]:
    return [Prompt(f"p{n}", [n], 0) for n in range(count)]


# --- windows ----------------------------------------------------------------------------------------------------------------------


def test_a_side_has_sixteen_files_before_windows_grow(tmp_path: Path) -> None:
    sizes = lambda count, **s: [len(p) for _, p in writing.windows(tmp_path, "train", many(count), Respond(**s))]  # noqa: E731
    assert sizes(256, batch_size=32) == [32] * 8
    assert sizes(10_000, batch_size=10) == [80] * 125
    assert sizes(330, batch_size=10) == [20] * 16 + [10]
    assert sizes(330, batch_size=10, window=1) == [10] * 33
    assert sizes(0) == []


def test_a_row_does_not_depend_on_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FILES", 2)
    every = []
    for name, settings in (
        ("wide", {"batch_size": 1, "window": 8}),
        ("narrow", {"batch_size": 1, "window": 1}),
        ("batch", {"batch_size": 40}),
    ):
        home = make_home(tmp_path / name, respond={"prompts": 8, "heldout_prompts": 1, "prompt_tokens": 8, "max_new_tokens": 5, **settings})
        folder = respond(*opened(home))
        every.append(rows(folder))
        assert len(list(folder.glob("train-*.json"))) == {"wide": 2, "narrow": 8, "batch": 1}[name]
    assert every[0] == every[1] == every[2]


def test_a_file_of_other_prompts_is_written_anew(tmp_path: Path) -> None:
    found = writing.windows(tmp_path, "train", many(4), Respond(batch_size=2))

    class Engine:
        asked: list[str]

        def write(self, windows: Any, length: int, salt: str, tell: Callable[[int], None]) -> None:
            self.asked = [path.name for path, _ in windows]

    found[0][0].write_text(json.dumps([{"prompt_id": "p0", "response": [1]}, {"prompt_id": "p1", "response": []}]))
    found[1][0].write_text(json.dumps([{"prompt_id": "p3", "response": [1]}, {"prompt_id": "p2", "response": []}]))
    engine, told = Engine(), list[int]()
    writing.written(engine, found, Ranks(), 5, "respond", told.append)
    assert engine.asked == ["train-00001.json"] and told == [1]


@pytest.mark.parametrize("shares", [{}, {"cut": 1.0, "synthetic": 1.0}])
def test_stopped_ten_times_it_ends_with_the_same_bytes(shares: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"prompts": 12, "heldout_prompts": 4, "prompt_tokens": 8, "max_new_tokens": 5, "batch_size": 3, "shares": shares}
    synthetic = {"synthetic": {"passage_tokens": 8, "instruction_tokens": 12, "ask": "{passage}"}}
    one, two = (make_home(tmp_path / name, respond={**settings, **synthetic}) for name in ("one", "two"))
    quiet = respond(*opened(one))
    left, rng, stops = 0, random.Random(1), 0
    real = writing.write_json

    def counted(path: Path, value: Any) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        real(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_json", counted)
        for _ in range(10 if not shares else 5):
            left = rng.randint(0, 1)
            try:
                respond(*opened(two))
            except KeyboardInterrupt:
                stops += 1
    assert stops >= (5 if not shares else 3)
    again = respond(*opened(two))
    assert hashes(again, FILES) == hashes(quiet, FILES) and facts(again)["finish"] == facts(quiet)["finish"]
    if shares:
        told, whole = facts(again), facts(quiet)
        assert (told["kinds"], told["refused"]) == (whole["kinds"], whole["refused"]) and told["kinds"]["cut"] == 8
        invented, refused = told["kinds"]["synthetic"], sum(told["refused"].values())
        assert 0 < invented <= 8 and (invented == 8 or refused > 0), "instructions that were refused are counted"


# --- ends -------------------------------------------------------------------------------------------------------------------------


def test_truncated_rows_are_counted_and_dropped_where_asked(tmp_path: Path) -> None:
    settings = {"prompts": 24, "heldout_prompts": 12, "prompt_tokens": 8, "max_new_tokens": 100, "batch_size": 16}
    kept = respond(*opened(make_home(tmp_path / "a", respond=settings)))
    dropped = respond(*opened(make_home(tmp_path / "b", respond={**settings, "truncated": "drop"})))
    assert facts(kept)["finish"] == facts(dropped)["finish"] and facts(dropped)["dropped"] == facts(kept)["finish"]["length"] > 0
    assert rows(dropped) == [r for r in rows(kept) if r["finish"] == "eos"]
    short = make_home(tmp_path / "c", respond={**settings, "max_new_tokens": 1, "truncated": "drop"})
    with pytest.raises(DraftstillError, match="no response of the side") as caught:
        respond(*opened(short))
    assert caught.value.key == "respond.max_new_tokens"


# --- a draft ----------------------------------------------------------------------------------------------------------------------


def test_with_a_draft_greedy_texts_are_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "prompts": 8,
        "heldout_prompts": 2,
        "prompt_tokens": 8,
        "max_new_tokens": 12,
        "sampler": {"temperature": 0.0},
    }
    evaluate = {"temperatures": [0.0]}
    plain = respond(*opened(make_home(tmp_path / "a", respond=settings, evaluate=evaluate)))
    draft = make_target(tmp_path / "draft", seed=0, layers=2)
    home = make_home(tmp_path / "b", respond={**settings, "draft": {"source": str(draft)}, "draft_gamma": 2}, evaluate=evaluate)
    folder = respond(*opened(home))
    assert rows(folder) == rows(plain) and facts(folder)["draft"] == str(draft)
    foreign = make_target(tmp_path / "foreign", vocabulary=[f"other{n}" for n in range(200)])
    other = make_home(tmp_path / "c", respond={**settings, "draft": {"source": str(foreign)}}, evaluate=evaluate)
    with pytest.raises(DraftstillError) as caught:
        respond(*opened(other))
    assert caught.value.key == "respond.draft.source"


# --- a server ---------------------------------------------------------------------------------------------------------------------


def continuation(ids: list[int]) -> tuple[list[int], str]:
    """What the fake server writes behind ids: always the same, ended by EOS or by the limit."""
    rng = random.Random(seed_of(*ids))
    end = rng.random() < 0.5
    return [rng.randrange(6, 190) for _ in range(rng.randint(1, 6))] + ([1] if end else []), "stop" if end else "length"


def served(dead_after: int | None = None) -> Callable[[str, Any], Reply]:
    """A vLLM that answers by ``continuation``; from ``dead_after`` completions on it drops every connection."""
    count, lock = [0], threading.Lock()

    def answer(path: str, body: Any) -> Reply:
        if path != "/v1/completions":
            return 0, None
        with lock:
            count[0] += 1
            if dead_after is not None and count[0] > dead_after:
                return None
        tokens, finish = continuation(body["prompt"])
        text = make_tokenizer().decode([t for t in tokens if t != 1])
        return 200, {"choices": [{"text": text, "token_ids": tokens, "finish_reason": finish}]}

    return answer


def home_for(folder: Path, server: Fake, /, **respond_keys: Any) -> Path:
    """A recipe that asks a server; made once, its address can be changed."""
    keys = {"prompts": 16, "heldout_prompts": 4, "prompt_tokens": 8, "max_new_tokens": 8, "batch_size": 3,
            "server": {"url": server.url, "retries": 0, "concurrency": 3}, **respond_keys}  # fmt: skip
    if not folder.exists():
        return make_home(folder, respond=keys)
    value = yaml.safe_load((folder / "recipe.yaml").read_text())
    value["respond"]["server"]["url"] = server.url
    (folder / "recipe.yaml").write_text(yaml.safe_dump(value, sort_keys=False))
    return folder / "recipe.yaml"


def test_a_server_that_dies_half_way_leaves_every_finished_row(tmp_path: Path) -> None:
    with fake(served()) as server:
        whole = respond(*opened(home_for(tmp_path / "a", server)))
        got = {r["prompt_id"]: (r["response"], r["finish"]) for r in rows(whole)}
        assert len(got) == 16 and all((r[1] == "eos") == (r[0][-1] == 1) for r in got.values())
        assert facts(whole)["finish"] == dict(Counter(r["finish"] for side in ("train", "heldout") for r in rows(whole, side)))
        assert facts(whole)["server"]["kind"] == "vllm" and not list(whole.glob("journal*"))
    with fake(served(dead_after=8)) as server:
        path = home_for(tmp_path / "b", server)
        with pytest.raises(DraftstillError, match="answers of this attempt are kept") as caught:
            respond(*opened(path))
        assert caught.value.key == "respond.server.url" and "goes on from there" in str(caught.value)
        kept = (tmp_path / "b" / "run" / "responses.partial" / "journal-0.jsonl").read_text().splitlines()
        assert len(kept) == 1 + 7, "who wrote, and 8 answers, one of them to the probe"
        # A kill may cut the journal's last line.
        (tmp_path / "b" / "run" / "responses.partial" / "journal-0.jsonl").write_text("\n".join(kept[:7]) + "\n" + kept[7][:20])
    with fake(served()) as server:  # at another address
        again = respond(*opened(home_for(tmp_path / "b", server)))
        assert len(server.asked("/v1/completions")) == 20 - 6 + 1
    assert hashes(again, FILES) == hashes(whole, FILES)


def test_how_a_server_is_asked_does_not_make_another_stage(tmp_path: Path) -> None:
    with fake(served()) as server:
        path = home_for(tmp_path / "a", server)
        respond(*opened(path))
        asked = len(server.calls)
        respond(*opened(path, "respond.server.concurrency=7", "respond.server.retries=3", "respond.server.timeout_s=9"))
        assert len(server.calls) == asked


def test_a_server_of_another_tokenizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name, ids in (("other words", [50, 51]), ("more ids", [5, 999])):
        told = {"choices": [{"text": "ban bar", "token_ids": ids, "finish_reason": "length"}]}
        with (
            fake(lambda path, _, told=told: (200, told) if path == "/v1/completions" else (0, None)) as server,  # type: ignore[misc]
            pytest.raises(DraftstillError, match="token ids are not the target's") as caught,
        ):
            respond(*opened(home_for(tmp_path / name, server)))
        assert caught.value.key == "respond.server.url"
        assert not list((tmp_path / name / "run" / "responses.partial").glob("train-*"))


def test_text_is_tokenised_again_and_what_does_not_read_back_is_dropped_and_counted(tmp_path: Path) -> None:
    words = make_tokenizer().convert_ids_to_tokens(list(range(6, 12)))

    def answer(path: str, body: Any) -> Reply:
        if path != "/v1/completions":
            return 0, None
        assert isinstance(body["prompt"], str)
        pick = seed_of(body["prompt"]) % 4
        text, finish = [
            (" ".join(words[:3]), "stop"),
            ("neverheard words", "stop"),
            ("", "content_filter"),
            (" ".join(words[3:]), "length"),
        ][pick]
        return 200, {"choices": [{"text": text, "finish_reason": finish}]}

    with fake(answer, "openai") as server:
        folder = respond(*opened(home_for(tmp_path / "a", server)))
    found, told = rows(folder) + rows(folder, "heldout"), facts(folder)
    assert {tuple(r["response"]) for r in found} == {(6, 7, 8, 1), (9, 10, 11)}, "what ended by itself ends with EOS"
    finish = told["finish"]
    assert (
        finish["text that the target's tokenizer does not give back"] + finish["content_filter"] == told["dropped"] == 20 - len(found) > 0
    )
    assert told["server"]["retokenised"] == 20 and set(finish) >= {"eos", "length"}


def test_no_server_there_and_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with fake(served()) as server:
        path = home_for(tmp_path / "a", server)
        with pytest.raises(DraftstillError) as caught:
            respond(*opened(path, "respond.server.api_key_env=NO_SUCH_KEY"))
        assert caught.value.key == "respond.server.api_key_env"
    with pytest.raises(DraftstillError) as caught:
        respond(*opened(path))
    assert caught.value.key == "respond.server.url" and "did not answer" in str(caught.value)
