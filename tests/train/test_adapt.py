"""Tuning the target: it learns from training documents alone, pieces do not see each other, and stopped anywhere it ends the same."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.corpus import Document, iter_documents, prepare_corpus, read_documents
from draftstill.distill import record, respond
from draftstill.errors import DraftstillError, NonFiniteLoss
from draftstill.recipe import Adapt
from draftstill.runfolder import hash_file, read_json
from draftstill.sources import load_model, load_tokenizer, resolve_model
from draftstill.stages import content_of, served_target, stages
from draftstill.train import adapt, adapting, lessons, preflight
from draftstill.train.adapting import Tuning
from draftstill.train.lessons import Piece, lesson, packed, pieces
from tests.pipeline import REAL, command, hashes, make_home, make_model, make_tokenizer, opened, process, sources

QUICK: dict[str, Any] = {"max_steps": 12, "eval_steps": 4, "save_steps": 5, "sequence_length": 48, "learning_rate": 5e-3, "warmup_steps": 2}


def tuning_of(path: Path) -> Tuning:
    recipe, run = opened(path)
    found = stages(recipe, run)
    assert recipe.adapt is not None
    return Tuning(recipe, recipe.adapt, prepare_corpus(recipe, run), found["adapted"].begin())


def reference_nll(model: Any, documents: list[Piece]) -> tuple[float, int]:
    """Each piece on its own through transformers, padded columns left out."""
    total, count = 0.0, 0
    for piece in documents:
        logits = model(torch.tensor([piece.ids])).logits.detach()[0, :-1, :REAL].double().log_softmax(-1)
        learnt = torch.tensor(piece.learnt[1:])
        total -= float(logits.gather(1, torch.tensor(piece.ids[1:])[:, None])[learnt].sum())
        count += int(learnt.sum())
    return total, count


# --- what is learnt from ------------------------------------------------------------------------------------------------------


def test_pieces_and_rows_hold_every_token_once() -> None:
    tokenizer = make_tokenizer()
    texts = [" ".join(["ban", "ber", "bist"] * n) for n in (1, 9, 40)]
    documents = [Document(str(n), "train", str(n), text) for n, text in enumerate(texts)]
    found = pieces(documents, tokenizer, 16, seed=0)  # of lengths 4, 28 and 121
    learnt = sorted(t for p in found for t, learn in zip(p.ids, p.learnt, strict=True) if learn)
    assert learnt == sorted(t for text in texts for t in [*tokenizer(text)["input_ids"], 1][1:])
    assert all(len(p.ids) <= 16 and not p.learnt[0] and all(p.learnt[1:]) for p in found)
    assert (
        [p.ids for p in found]
        == [p.ids for p in pieces(documents, tokenizer, 16, seed=0)]
        != [p.ids for p in pieces(documents, tokenizer, 16, seed=1)]
    )
    rows = packed(found, 16)
    assert [p for row in rows for p in row] == found and all(sum(len(p.ids) for p in row) <= 16 for row in rows)
    assert not any(1 in p.ids for p in pieces(documents, tokenizer, 16, seed=0, ends=False))
    limited = pieces(documents, tokenizer, 16, seed=0, limit=20)
    assert limited == found[: len(limited)] and sum(len(p.ids) for p in limited[:-1]) < 20 <= sum(len(p.ids) for p in limited)


def test_a_limit_holds_no_more_than_it_takes() -> None:
    """The chosen pieces are the first of the whole order, whatever the order of the documents, and the others are not kept meanwhile."""
    tokenizer = make_tokenizer()
    documents = [Document(str(n), "train", str(n), " ".join(["ban", "ber", "bist"] * (1 + n % 30))) for n in range(200)]
    whole = pieces(documents, tokenizer, 16, seed=0)
    alive = weakref.WeakSet[Any]()

    class Watched(Piece):
        __slots__ = ("__weakref__",)

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(self)

        __hash__ = object.__hash__

    most = 0

    def watched() -> Iterator[Document]:
        nonlocal most
        for document in documents:
            most = max(most, len(alive))
            yield document

    for limit in (1, 20, 300, 10**6):
        for given in (documents, documents[::-1]):
            limited = pieces(given, tokenizer, 16, seed=0, limit=limit)
            assert limited == whole[: len(limited)] and sum(len(p.ids) for p in limited[:-1]) < limit
            assert len(limited) == len(whole) or sum(len(p.ids) for p in limited) >= limit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lessons, "Piece", Watched)
        limited = pieces(watched(), tokenizer, 16, seed=0, limit=300)
    assert most <= len(limited) + 20 < len(whole) / 4


def test_packed_pieces_do_not_see_each_other() -> None:
    model = make_model()
    rng = torch.Generator().manual_seed(0)
    apart = [Piece(torch.randint(REAL, (n,), generator=rng).tolist(), [False, *[True] * (n - 1)]) for n in (5, 9, 3, 12)]
    batch = lesson(packed(apart, 16))
    logits = model(input_ids=batch.ids_BT, position_ids=batch.positions_BT, use_cache=False).logits[..., :REAL].double().log_softmax(-1)
    together = -float(logits.detach().flatten(0, 1)[batch.rows_N].gather(1, batch.token_N[:, None]).sum())
    total, count = reference_nll(model, apart)
    assert count == len(batch.token_N) and together == pytest.approx(total, rel=1e-5)


def test_of_a_conversation_only_the_model_s_turns_are_learnt() -> None:
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "ban ban"}, {"role": "assistant", "content": "ber"}, {"role": "user", "content": "bist"},
                {"role": "assistant", "content": "bin bir"}]  # fmt: skip
    (piece,) = pieces([Document("1", "train", "1", "", messages)], _chat(tokenizer), 64, seed=0)
    learnt = tokenizer.convert_ids_to_tokens([t for t, learn in zip(piece.ids, piece.learnt, strict=True) if learn])
    assert learnt == ["ber", "<eos>", "bin", "bir", "<eos>"]
    tokenizer.chat_template = None
    assert pieces([Document("1", "train", "1", "ban ban ber", messages)], tokenizer, 64, seed=0)[0].count == 3


def test_a_template_that_rewrites_earlier_turns_learns_all() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% if loop.last %}ban {% endif %}{{ m.content }} {% endfor %}"
    messages = [{"role": "user", "content": "ber"}, {"role": "assistant", "content": "bist"}]
    (piece,) = pieces([Document("1", "train", "1", "", messages)], tokenizer, 64, seed=0)
    assert piece.count == len(piece.ids) - 1 == 2


def test_a_conversation_that_the_template_refuses_is_left_out_by_name() -> None:
    tokenizer = _chat(make_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }} {% endfor %}"
    )
    turns = lambda role: [{"role": role, "content": "ban"}, {"role": "assistant", "content": [{"type": "text", "text": "ber bin"}]}]  # noqa: E731
    documents = [Document(role, "train", role, "", turns(role)) for role in ("tool", "user")]
    refused: list[str] = []
    (piece,) = pieces(documents, tokenizer, 64, seed=0, refused=refused)
    assert refused == ["tool"] and piece.count == 2
    with pytest.raises(Exception, match="no tools"):
        pieces(documents, tokenizer, 64, seed=0)


def _chat(tokenizer: Any) -> Any:
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} {% else %}<assistant> {{ m.content }} <eos> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    return tokenizer


def test_only_training_documents_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out text may decide which step is best, and never what a step learns."""
    asked: list[str] = []
    monkeypatch.setattr(adapting, "iter_documents", lambda folder, split: (asked.append(split), iter_documents(folder, split))[1])
    path = make_home(tmp_path, adapt=QUICK)
    tuning = tuning_of(path)
    assert sorted(asked) == ["train", "validation"]
    text = {tuple(p.ids) for row in tuning.rows for p in row}
    heldout = [tuple(p.ids) for row in tuning.heldout for p in row]
    assert heldout and not text & set(heldout)
    own = [d.text for d in read_documents(tmp_path / "run" / "corpus", "train")]
    tokenizer = make_tokenizer()
    assert sum(len(t) - 1 for t in text) == sum(len(tokenizer(t)["input_ids"]) for t in own)


# --- tuning -------------------------------------------------------------------------------------------------------------------


def test_the_target_learns_and_the_saved_model_is_what_was_measured(tmp_path: Path) -> None:
    path = make_home(tmp_path, adapt=QUICK)
    recipe, run = opened(path)
    folder = adapt(recipe, run)
    facts = read_json(folder / "provenance.json")["facts"]
    assert facts["perplexity"]["after"] < 0.8 * facts["perplexity"]["before"]
    assert [c["step"] for c in facts["curve"]] == [0, 4, 8, 12] and facts["best_step"] == min(facts["curve"], key=lambda c: c["nll"])[
        "step"
    ]
    source = resolve_model(served_target(recipe), "target.source")
    assert source.name == "target (tuned)"
    heldout = pieces(read_documents(run.path / "corpus", "validation"), load_tokenizer(source), 48, recipe.seed, ends=False)
    for model, key in ((load_model(source, "float32", "cpu"), "after"), (make_model(), "before")):
        total, count = reference_nll(model, heldout)
        assert count == facts["heldout_tokens"] and total / count == pytest.approx(facts["nll"][key], rel=1e-4)
    assert {p.name for p in (folder / "model").iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert not any("adapter" in p.name or "lora" in p.name for p in folder.rglob("*"))
    assert sorted(p.name for p in folder.iterdir()) == ["model", "provenance.json"]
    original = make_model().state_dict()
    saved = load_model(source, "float32", "cpu").state_dict()
    moved = {n for n in original if not torch.equal(original[n], saved[n])}
    assert moved == {n for n in original if "_proj" in n}, "the head, the embedding and the norms stay"


def test_a_step_does_not_depend_on_how_its_batch_is_cut(tmp_path: Path) -> None:
    found = []
    for size, accumulate in ((4, 1), (2, 2)):
        keys = {**QUICK, "max_steps": 2, "per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
        tuning = tuning_of(make_home(tmp_path / str(size), adapt=keys))
        tuning.run()
        found.append([p.detach().clone() for p in tuning.adapter])
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(*found, strict=True))


def test_stopped_after_any_step_it_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"lora_dropout": 0.1, "gradient_checkpointing": True, "target_modules": ["q_proj", "v_proj"]}
    settings = {**QUICK, **keys, "max_steps": 6, "save_steps": 2}
    quiet, stopped = (make_home(tmp_path / name, adapt=settings) for name in ("quiet", "stopped"))
    whole = adapt(*opened(quiet))
    real = Tuning._optimize
    for last in (1, 3, 5):

        def until(self: Tuning, last: int = last) -> float:
            if self.step == last:
                raise KeyboardInterrupt
            return real(self)

        monkeypatch.setattr(Tuning, "_optimize", until)
        with pytest.raises(KeyboardInterrupt):
            adapt(*opened(stopped))
    monkeypatch.setattr(Tuning, "_optimize", real)
    again = adapt(*opened(stopped))
    assert hashes(again / "model") == hashes(whole / "model")
    curves = [read_json(f / "provenance.json")["facts"]["curve"] for f in (whole, again)]
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_killed_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    settings = {**QUICK, "max_steps": 40, "save_steps": 3}
    quiet, killed = (make_home(tmp_path / name, adapt=settings) for name in ("quiet", "killed"))
    running = process("adapt", killed)
    mark = tmp_path / "killed" / "run" / "adapted.partial" / "checkpoint-0000006" / "state.json"
    while not mark.exists() and not mark.parents[1].joinpath("checkpoint-0000009").exists():
        assert running.poll() is None, running.communicate()[0]
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert (tmp_path / "killed" / "run" / "adapted.partial").is_dir()
    assert command("adapt", killed) == command("adapt", quiet) == 0
    assert hashes(tmp_path / "killed" / "run" / "adapted" / "model") == hashes(tmp_path / "quiet" / "run" / "adapted" / "model")


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path: Path) -> None:
    tuning = tuning_of(make_home(tmp_path, adapt=QUICK))
    with torch.no_grad():
        next(iter(tuning.adapter)).fill_(math.inf)
    before = [p.detach().clone() for p in tuning.adapter]
    with pytest.raises(NonFiniteLoss, match=r"adapt.learning_rate"):
        tuning._optimize()
    assert all(torch.equal(a, b) for a, b in zip(before, tuning.adapter, strict=True))


def test_where_nothing_is_gained_the_target_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rising = iter([5.0, 6.0, 7.0, 5.0])
    monkeypatch.setattr(Tuning, "nll", lambda self: next(rising))
    recipe, run = opened(make_home(tmp_path, adapt={**QUICK, "max_steps": 8}))
    adapt(recipe, run)
    model = load_model(resolve_model(served_target(recipe), "target.source"), "float32", "cpu")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), make_model().parameters(), strict=True))
    assert "the target is kept as it was" in capsys.readouterr().out


def test_a_full_disk_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**QUICK, "max_steps": 6, "save_steps": 2}
    whole = adapt(*opened(make_home(tmp_path / "quiet", adapt=settings)))
    path = make_home(tmp_path / "full", adapt=settings)
    real = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "checkpoint-0000004":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert command("adapt", path) == 1
    assert [p.name for p in (tmp_path / "full" / "run" / "adapted.partial").glob("checkpoint-*")] == ["checkpoint-0000002"]
    assert command("adapt", path) == 0
    assert hashes(tmp_path / "full" / "run" / "adapted" / "model") == hashes(whole / "model")


# --- refusals, and the stages behind it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "says"),
    [(["q_proj", "wq"], "no such layer"), (["lm_head"], "the head takes no adapter"), (["embed_tokens"], "the embedding takes no adapter"),
     (["self_attn"], "not a linear layer")],
)  # fmt: skip
def test_layers_that_take_no_adapter_are_refused_before_any_work(
    modules: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_home(tmp_path, adapt={"target_modules": modules})
    assert command("run", path) == 1
    told = capsys.readouterr().err
    assert "adapt.target_modules" in told and says in told and "q_proj" in told
    assert not (tmp_path / "run" / "corpus").exists()


def test_a_tied_head_is_named_as_such() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True
    )
    with pytest.raises(DraftstillError, match="the embedding is the same matrix"):
        from draftstill.train.adapter import preflight_adapt

        preflight_adapt(Adapt(target_modules=("lm_head",)), config)


def test_all_later_stages_belong_to_the_tuned_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_home(tmp_path, adapt={**QUICK, "max_steps": 6, "eval_steps": 6}, train={"max_steps": 4, "eval_steps": 4},
                    evaluate={"prompts": 1, "audit_prompts": 1})  # fmt: skip
    recipe, run = opened(path)
    preflight(recipe)  # the tuned target is not there yet
    assert command("plan", path) == 0
    assert "LoRA of rank 16" in capsys.readouterr().out
    assert command("run", path) == 0
    output = capsys.readouterr().out
    assert "[2/7] adapt" in output
    manifest = read_json(run.path / "recording" / "train" / "manifest.json")
    assert str(run.path / "adapted" / "model") in json.dumps(read_json(run.path / "responses" / "provenance.json")["facts"]["target"])
    assert manifest["target_sha256"] == content_of(str(run.path / "adapted" / "model"))
    published = run.path / "published" / "model"
    card, report = (published / "README.md").read_text(), read_json(published / "draft_report.json")
    digest = hash_file(run.path / "adapted" / "model" / "model.safetensors")
    assert f"`model.safetensors` {digest}" in card and "tuned by LoRA of rank 16" in card and "target (tuned)" in card
    assert str(tmp_path) not in card + json.dumps(report) + (published / "provenance.json").read_text()
    assert report["export"]["adapted"]["weights_sha256"] == {"model.safetensors": digest}
    assert (published / "draft-f16.gguf").exists() or "no GGUF" in output
    # The same command again: everything stands. A changed section: nothing is overwritten.
    assert command("run", path) == 0 and capsys.readouterr().out.count("reused (made") == 7
    assert command("run", path, "adapt.r=8") == 1
    assert "adapt.r was 16, is 8" in capsys.readouterr().err
    assert command("plan", path, "adapt.save_steps=9") == 0 and "made by another recipe" not in capsys.readouterr().out


def test_a_gguf_lends_a_tuned_target_its_tokenizer_and_not_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Served beside its draft, the file that the target was tuned from would be another target."""
    from draftstill.evaluate import exporter

    path = make_home(tmp_path, adapt={**QUICK, "max_steps": 1})
    adapt(*opened(path))
    (tmp_path / "target" / "x.gguf").write_bytes(b"GGUF")
    real = exporter.resolve_model

    def resolve(source: Any, key: str) -> Any:
        found = real(source, key)
        return replace(found, origin={**found.origin, "gguf": "x.gguf"}) if source.source == str(tmp_path / "target") else found

    monkeypatch.setattr(exporter, "resolve_model", resolve)
    facts = exporter.target_facts(opened(path)[0])
    assert facts.gguf == tmp_path / "target" / "x.gguf" and facts.tuned and facts.folder == tmp_path / "run" / "adapted" / "model"
    served = exporter.target_facts(opened(path, f"publish.target_gguf={tmp_path / 'target' / 'x.gguf'}")[0])
    assert served.gguf == facts.gguf and not served.tuned, "the user says which file serves the tuned target"
    plain = exporter.target_facts(opened(make_home(tmp_path / "plain"))[0])
    assert plain.gguf is None and not plain.tuned


def test_without_the_section_there_is_nothing_to_adapt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_home(tmp_path)
    assert command("adapt", path) == 1 and "adapt: the recipe does not ask for a tuned target" in capsys.readouterr().err
    assert "adapted" not in stages(*opened(path))


def test_what_needs_the_tuned_target_says_so(tmp_path: Path) -> None:
    from draftstill.decode import load_target

    recipe, _ = opened(make_home(tmp_path, adapt=QUICK))
    with pytest.raises(DraftstillError, match="draftstill adapt RECIPE"):
        load_target(recipe)


def test_nobody_answers_in_place_of_the_recipe_s_own_target(tmp_path: Path) -> None:
    """Responding and recording may be started by themselves, by a launch: then nothing has made the tuned target before them."""
    path = make_home(tmp_path, adapt={**QUICK, "max_steps": 1})
    for step in (respond, record):
        with pytest.raises(DraftstillError) as caught:
            step(*opened(path))
        assert caught.value.key == "adapt" and "draftstill adapt RECIPE" in str(caught.value.mend)
    folder = adapt(*opened(path))
    for step in (respond, record):
        with pytest.raises(DraftstillError, match="made by another recipe"):
            step(*opened(path, "adapt.r=8"))
    folder.joinpath("provenance.json").rename(tmp_path / "kept.json")  # a model that lies there, and nobody says what it is
    with pytest.raises(DraftstillError) as caught:
        respond(*opened(path))
    assert caught.value.key == "adapt" and not (tmp_path / "run" / "responses.partial").exists()
    (tmp_path / "kept.json").rename(folder / "provenance.json")
    assert respond(*opened(path)).exists()


def test_a_folder_is_named_by_its_card(tmp_path: Path) -> None:
    import shutil

    from draftstill.recipe import Source

    shutil.copytree(sources() / "target", tmp_path / "model")
    named = lambda: resolve_model(Source(source=str(tmp_path / "model")), "target.source").name  # noqa: E731
    assert named() == "model"
    for head, name in (("license: mit\nmodel_name: A model (tuned)\n", "A model (tuned)"), ("model_name: [1]\n", "model")):
        (tmp_path / "model" / "README.md").write_text(f"---\n{head}---\n")
        assert named() == name


@pytest.mark.parametrize("name", ["plain", "a: b", "[x]", "#3", "'"])
def test_name_and_licence_come_back_from_the_card_of_a_tuned_target(name: str, tmp_path: Path) -> None:
    import shutil

    from draftstill.recipe import Source
    from draftstill.sources import ModelSource

    shutil.copytree(sources() / "target", tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text(adapting._card(ModelSource("x", None, name, "llama3.1: own", {}), 16))
    found = resolve_model(Source(source=str(tmp_path / "model")), "target.source")
    assert (found.name, found.licence) == (f"{name} (tuned)", "llama3.1: own")
