"""Publishing a tiny random Llama: what is in the folder, and what stops it by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftstill.errors import DraftstillError
from draftstill.evaluate.publishing import publish
from draftstill.runfolder import RunFolder, write_json
from draftstill.stages import stages
from tests.evaluate.published import SENTENCE, Run


def test_the_folder_loads_and_holds_the_allow_list_only(run: Run, tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = run.make()
    model = made.path / "draft" / "model"
    for name in ("optimizer.bin", "training_args.bin", "rollouts.jsonl", "notes.txt", "run.py"):
        (model / name).write_text("private")
    folder = run.publish()
    assert {p.name for p in folder.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "draft_report.json", "generation_config.json", "model.safetensors", "provenance.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    ids = torch.tensor([[1, 5, 9]])
    before, after = (AutoModelForCausalLM.from_pretrained(p)(ids).logits for p in (tiny, folder))
    assert torch.equal(before, after)
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes(), "nothing to pad: the scored bytes"
    assert AutoTokenizer.from_pretrained(folder)("w3 w4")["input_ids"] == [3, 4]
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 2}
    assert run.publish() == folder  # a second time: reused


def test_nothing_of_this_machine_or_the_corpus_leaves(run: Run) -> None:
    made = run.make()
    config = made.path / "draft" / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "name_or_path": "/home/jo/models/target"}))
    folder = run.publish()
    for path in folder.iterdir():
        content = path.read_bytes().decode("utf-8", "replace")
        for word in ("home-of-a-person", "/home/", "my.yaml", "sublicense", "doc-000", "Termination", "TERMINATION"):
            assert word not in content, f"{word} in {path.name}"
    report = json.loads((folder / "draft_report.json").read_text())
    assert "examples" not in report and report["corpus"]["source"] == "a private corpus"
    assert report["conditions"]["command"] == "draftstill evaluate"
    assert report["arms"][1]["per_prompt"][3]["prompt"] == 3
    assert "run_dir" not in json.loads((folder / "provenance.json").read_text())["recipe"]


def test_a_dry_run_leaves_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    made = run.make()
    before = sorted(made.path.rglob("*"))
    assert run.publish(dry_run=True) == made.path / "published" / "model"
    assert sorted(made.path.rglob("*")) == before
    assert "model.safetensors" in capsys.readouterr().out


def test_an_interrupted_copy_is_made_anew(run: Run) -> None:
    made = run.make()
    half = stages(run.recipe(), made)["published"].begin() / "model"
    half.mkdir()
    (half / "left-over.bin").write_text("x")
    assert "left-over.bin" not in {p.name for p in run.publish().iterdir()}


def test_a_missing_stage_names_the_command(run: Run) -> None:
    with pytest.raises(DraftstillError, match="draftstill train"):
        publish(run.recipe(), RunFolder(run.recipe().run_dir))


# --- what stops it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "finding"),
    [
        ("chat_template.jinja", "{# hf_" + "abcDEF1234" * 3 + " #}", "chat_template.jinja: a Hugging Face token"),
        ("chat_template.jinja", "{# write to jo.doe@example.org #}", r"chat_template.jinja: an e-mail address \(jo.doe@example.org\)"),
        ("chat_template.jinja", "{# /home/jo/data #}", r"chat_template.jinja: a home path \(/home/jo\)"),
        ("chat_template.jinja", "{# " + SENTENCE + " #}", "chat_template.jinja: text of the corpus document acme-7"),
        # Upper case, other punctuation and JSON escapes do not hide it.
        ("special_tokens_map.json", json.dumps({"x": SENTENCE.upper().replace(" ", "\n").replace(",", ";")}), "special_tokens_map.json: text of the corpus"),
        ("vocab.json", json.dumps({"AKIA" + "ABCDEFGH12345678": 1}), "vocab.json: an AWS access key"),
        ("merges.txt", "-----BEGIN RSA PRIVATE KEY-----", "merges.txt: a private key"),
    ],
)  # fmt: skip
def test_a_planted_leak_stops_it_by_name(run: Run, name: str, content: str, finding: str) -> None:
    made = run.make()
    (made.path / "draft" / "model" / name).write_text(content)
    with pytest.raises(DraftstillError, match=finding) as caught:
        run.publish()
    assert "abcDEF1234abc" not in str(caught.value), "the error repeats the secret"
    assert not (made.path / "published").exists()


def test_a_leak_in_the_weights_header_is_found(run: Run) -> None:
    from safetensors.torch import load_file, save_file

    file = run.make().path / "draft" / "model" / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "from": "/home/jo/train"})
    run.score["draft"]["weights_sha256"] = None
    write_json(file.parents[2] / "score" / "score.json", run.score)
    with pytest.raises(DraftstillError, match="model.safetensors: a home path"):
        run.publish()


def test_a_leak_in_a_gguf_header_is_found(byte_run: Run) -> None:
    template = byte_run.make().path / "draft" / "model" / "chat_template.jinja"
    template.write_text("{# see /home/jo/data #}")
    with pytest.raises(DraftstillError, match=r"draft-f16.gguf: a home path \(/home/jo\)"):
        byte_run.publish()


def test_shorter_runs_of_common_words_pass(run: Run) -> None:
    (run.make().path / "draft" / "model" / "chat_template.jinja").write_text(" ".join(SENTENCE.split()[:12]))
    run.publish()


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_refused(run: Run, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    file = run.make().path / "draft" / "model" / name
    file.unlink()
    file.symlink_to(outside)
    with pytest.raises(DraftstillError, match=f"{name} is a link"):
        run.publish()


def test_weights_that_were_not_scored_are_refused(run: Run) -> None:
    run.score["draft"]["weights_sha256"] = "0" * 64
    with pytest.raises(DraftstillError, match="not those that were scored"):
        run.publish()


def test_without_the_corpus_nothing_can_be_searched(run: Run) -> None:
    (run.make().path / "corpus" / "documents.jsonl").unlink()
    with pytest.raises(DraftstillError, match="documents.jsonl is missing"):
        run.publish()


def test_what_was_put_into_a_published_folder_later_stops_the_push(run: Run, tmp_path: Path) -> None:
    folder = run.publish()
    (folder / "optimizer.pt").write_text("x")
    outside = tmp_path / "outside"
    outside.write_text("secret")
    (folder / "notes.txt").symlink_to(outside)
    with pytest.raises(DraftstillError, match=r"notes.txt \(a link\), optimizer.pt \(a training state\)"):
        run.publish()


def test_an_optimizer_file_of_the_draft_stage_is_left_behind_and_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.make().path / "draft" / "model" / "optimizer.pt").write_text("x")
    folder = run.publish()
    assert "left out: optimizer.pt" in capsys.readouterr().out and not (folder / "optimizer.pt").exists()
    assert "optimizer.pt" not in (folder / "draft_report.json").read_text()


def test_a_link_under_any_name_is_refused(run: Run, tmp_path: Path) -> None:
    (run.make().path / "draft" / "model" / "extra.txt").symlink_to(tmp_path)
    with pytest.raises(DraftstillError, match="extra.txt is a link"):
        run.publish()
