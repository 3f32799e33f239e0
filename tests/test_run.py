"""The whole road through the command line, on a tiny target."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from draftstill.runfolder import hash_file, read_json
from draftstill.stages import stages
from tests.pipeline import ORDER, PADDED, REAL, borrowed, command, finished, hashes, make_home, opened


@pytest.fixture(scope="module")
def home() -> Path:
    return finished()


def test_all_stages_are_whole_and_nothing_else_is_left(home: Path) -> None:
    names = {p.name for p in (home / "run").iterdir()}
    assert names == {*ORDER, ".lock"}
    assert not [p for p in (home / "run").rglob("*") if ".tmp" in p.name or p.name == "stage.json"]


def test_each_stage_names_what_it_was_made_from(home: Path) -> None:
    recipe, run = opened(home / "recipe.yaml")
    before = None
    for name, stage in stages(recipe, run).items():
        made = read_json(stage.folder / "provenance.json")
        assert made["stage"] == name and made["fingerprint"] == stage.fingerprint
        assert before is None or before in made["inputs"].values()
        assert made["versions"]["torch"] and made["command"].startswith("draftstill run") and made["seconds"] >= 0
        before = stage.fingerprint


def test_the_screen_tells_what_was_made(home: Path) -> None:
    shown = (home / "output.txt").read_text()
    for number, name in enumerate(("prepare", "respond", "record", "train", "evaluate", "publish"), 1):
        assert f"[{number}/6] {name}: " in shown
    assert f"made  {home / 'run' / 'published'}" in shown and "report.html" in shown
    assert "draft after training" in shown and "draft before training" in shown and "prompt lookup" in shown


def test_the_same_command_again_reuses_everything(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in (home / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    start = time.perf_counter()
    assert command("run", home / "recipe.yaml") == 0
    assert time.perf_counter() - start < 3
    assert capsys.readouterr().out.count(": reused (made 20") == 6
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_the_verbs_one_by_one_end_at_the_same_bytes(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In another place, each verb in its turn: paths and attempts leave no mark on the results."""
    path = make_home(tmp_path)
    for verb, last, then in (("distill", "recording", "train"), ("train", "draft", "evaluate")):
        assert command(verb, path) == 0
        shown = capsys.readouterr().out
        assert f"made  {tmp_path / 'run' / last}" in shown and f"next  draftstill {then} {path}" in shown
        assert not (tmp_path / "run" / ORDER[ORDER.index(last) + 1]).exists()
    for pattern in ("corpus/documents.jsonl", "responses/*-0*.json", "recording/*/shard-*", "draft/model/model.safetensors"):
        assert hashes(tmp_path / "run", pattern) == hashes(home / "run", pattern) != {}


def test_plan_says_what_is_done(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("plan", home / "recipe.yaml") == 0
    shown = capsys.readouterr().out
    assert shown.count("  reused  (made") == 6
    assert command("plan", home / "recipe.yaml", "train.learning_rate=1e-4") == 0
    shown = capsys.readouterr().out
    assert shown.count("  reused  (made") == 3 and shown.count("made by another recipe") == 3 and "--set-aside" in shown
    assert command("plan", make_home(tmp_path)) == 0
    assert capsys.readouterr().out.count("will run") == 6 and not (tmp_path / "run").exists()


def test_gates_end_a_script(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("evaluate", home / "recipe.yaml", "--min-alpha", "0.2") == 0
    assert command("evaluate", home / "recipe.yaml", "--min-alpha", "0.999") == 2
    assert "gate missed: --min-alpha 0.999" in capsys.readouterr().err


def test_the_published_folder_loads_as_the_scored_draft(home: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = home / "run" / "published" / "model"
    model, draft = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (folder, home / "run" / "draft" / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("ban ber din. fost", return_tensors="pt").input_ids
    assert model.config.vocab_size == PADDED and model.config.num_hidden_layers == 2
    with torch.no_grad():
        published, scored = model(ids).logits, draft(ids).logits
    # The target's padding would win every argmax; our decoder never scores it, a server would.
    assert torch.equal(published[..., :REAL], scored[..., :REAL]) and int(scored.argmax(-1).max()) >= REAL > int(published.argmax(-1).max())
    alpha = read_json(folder / "draft_report.json")["export"]["alpha"]
    assert alpha["published"] == pytest.approx(alpha["scored"], abs=1e-6) and alpha["positions"] > 20
    score = read_json(home / "run" / "score" / "score.json")
    assert score["draft"]["weights_sha256"] == hash_file(home / "run" / "draft" / "model" / "model.safetensors")
    assert (home / "run" / "score" / "report.html").stat().st_size < 1 << 20


def test_nothing_of_this_machine_is_published(home: Path) -> None:
    documents = [p.read_text() for p in sorted((home / "texts").iterdir())]
    sentences = {s.strip() for d in documents for s in d.replace(";", ".").replace("\n", " ").split(".") if len(s.split()) >= 8}
    assert len(sentences) > 20
    for path in (home / "run" / "published" / "model").iterdir():
        if path.suffix in (".json", ".md", ".jinja"):
            text = path.read_text()
            assert str(home) not in text, path.name
            assert not [s for s in sentences if s in text], path.name


def test_a_draft_of_ones_own_and_a_jsonl_corpus(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other entrances: a named draft, chat turns, hidden states, the LK loss, a trimmed draft head."""
    import json

    from tests.pipeline import make_target, write_recipe

    make_target(tmp_path / "small", seed=5, layers=1)
    rows = [json.dumps({"body": p.read_text()}) for p in sorted((home / "texts").iterdir())]
    (tmp_path / "texts.jsonl").write_text("\n".join([*rows, rows[0], '{"body": "short"}']) + "\n")
    path = write_recipe(
        tmp_path, target={"source": str(home / "target")}, draft={"source": str(tmp_path / "small"), "head_tokens": 120},
        corpus={"source": str(tmp_path / "texts.jsonl"), "field": "body"}, respond={"chat_template": True, "prompts": 8},
        record={"mode": "hidden", "document_tokens": 400}, train={"loss": {"name": "lk"}, "max_steps": 6},
        evaluate={"candidates": ["tuned"], "temperatures": [0.7], "prompts": 2, "max_new_tokens": 6, "audit_prompts": 1},
    )  # fmt: skip
    assert command("run", path) == 0
    shown = capsys.readouterr().out
    assert "42 rows read, 40 kept; rejected: 1 exact duplicate, 1 too short" in shown
    score = read_json(tmp_path / "run" / "score" / "score.json")
    assert score["draft"]["name"] == "small" and [a["arm"] for a in score["arms"]] == ["plain", "tuned"]
    assert score["audit"]["greedy_fp32"]["identical"] == 1


def test_check_looks_at_the_published_folder_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, *ORDER)
    assert command("publish", path, "--check") == 2, "a draft in float32 is served otherwise than scored"
    told = capsys.readouterr().out
    assert "alpha as scored" in told and "TRT-LLM" in told and "mend: train with train.bf16: true" in told
    config = tmp_path / "run" / "published" / "model" / "generation_config.json"
    config.write_text('{"repetition_penalty": 1.3}')
    assert command("publish", path, "--check") == 2
    shown = capsys.readouterr()
    assert "repetition_penalty" in shown.out and "gate missed" in shown.err
    assert command("publish", path, "--served") == 1 and "--check" in capsys.readouterr().err


def test_dry_run_sends_and_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = borrowed(tmp_path, *ORDER)
    before = hashes(tmp_path / "run")
    assert command("publish", path, "--dry-run") == 0
    assert "nothing was sent" in capsys.readouterr().out
    after = hashes(tmp_path / "run")
    after.pop(".lock", None)
    assert after == before


def test_a_new_recipe_for_a_later_stage_reuses_the_earlier_ones(tmp_path: Path, home: Path) -> None:
    path = borrowed(tmp_path, *ORDER[:4])
    before: dict[str, Any] = hashes(tmp_path / "run")
    assert command("evaluate", path, "evaluate.gamma=1", "evaluate.prompts=1", "evaluate.audit_prompts=0") == 0
    after = hashes(tmp_path / "run")
    assert {k: after[k] for k in before} == before
    shutil.rmtree(tmp_path / "run" / "score")
