"""From a scored draft to a folder that others load: exported, checked against what servers want, documented, searched for leaks, sent.

``--push`` runs on huggingface_hub and was tested against a loopback stand-in of the Hub's HTTP API; it has not been run against the real Hub.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.evaluate.card import card, corpus_name, gamma_table, hub_id
from draftstill.evaluate.exporter import COPIED, WRITTEN, TargetFacts, export_folder, refuse_strays, target_facts
from draftstill.evaluate.licences import licence, refuse_licence
from draftstill.evaluate.proving import published_alpha, served_beside_ours
from draftstill.evaluate.pushing import push_folder
from draftstill.evaluate.scan import scan
from draftstill.evaluate.sentences import verdict
from draftstill.evaluate.snippets import snippets_text
from draftstill.evaluate.validator import failures, matrix_json, matrix_text, validate
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, Stage, atomic_write, hash_file, hash_weights, read_json, write_json
from draftstill.sources import quiet_transformers
from draftstill.stages import kind_of, published_draft, stages
from draftstill.vocabulary import tokenizer_hash


def publish(recipe: Recipe, run: RunFolder, *, push: bool = False, dry_run: bool = False) -> Path:
    """Make the folder (or reuse it), and with ``push`` send it to ``publish.repo_id`` under the Hub's own login.

    Args:
        push: upload after all checks; private unless ``publish.private`` is false.
        dry_run: check and list only. Leaves the run folder as it is and sends nothing.

    Returns:
        The folder to load: ``published/model`` in the run folder (with ``dry_run``, where it would lie).

    Raises:
        DraftstillError: a stage is missing, a file is not what it should be, something must not leave, or the Hub refused.
    """
    found, score, own = _scored(recipe, run)
    if push:
        _may_push(recipe, score)
    stage = found["published"]
    documents = found["corpus"].folder / "documents.jsonl"
    private = (str(run.path.resolve()), *([str(Path.home())] if len(str(Path.home())) > len("/root") else []))
    if _reused(stage, dry_run):
        folder = stage.folder / "model"
        refuse_strays(folder)
        if not dry_run:  # The card names the repository, which may have been chosen since.
            atomic_write(folder / "README.md", card(score, own, export=read_json(folder / "draft_report.json").get("export")))
        scan(folder, documents, private_paths=private)
    elif dry_run:
        run.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="published.dry-run.", dir=run.path) as temporary:
            _build(Path(temporary) / "model", recipe, own, run, score, found)
            scan(Path(temporary) / "model", documents, private_paths=private)
            _say_files(Path(temporary) / "model")
        say(f"dry run: nothing was kept or sent{_destination(recipe)}")
        return stage.folder / "model"
    else:
        folder = stage.begin() / "model"
        shutil.rmtree(folder, ignore_errors=True)  # half a copy of an earlier attempt
        facts = _build(folder, recipe, own, run, score, found)
        scan(folder, documents, private_paths=private)
        folder = stage.finish(**facts) / "model"
    _say_files(folder)
    if licence(score, own) is None:
        say("  the licence is unknown: the card says so; set publish.license before giving the folder away")
    if dry_run:
        say(f"dry run: nothing was sent{_destination(recipe)}")
        return folder
    sent = push_folder(folder, _names(folder), recipe.publish) if push else None
    say("\n" + snippets_text(hub_id(score["target"]["source"]), sent["repo"] if sent else None, folder, score["conditions"]["gamma"]))
    if sent is None:
        say(f"published locally: {folder}; to send it to the Hub set publish.repo_id and add --push")
    return folder


def _reused(stage: Stage, dry_run: bool) -> bool:
    """Whether the folder that lies there is the one to send. With --set-aside ``Stage.done`` moves another recipe's away, which no dry run does."""
    record = stage.folder / "provenance.json"
    if dry_run and stage.run.set_aside:
        return record.exists() and read_json(record)["fingerprint"] == stage.fingerprint
    return stage.done


def check_published(recipe: Recipe, run: RunFolder, *, served: bool = False) -> bool:
    """Check the published folder anew and print the matrix of servers; False where a check failed.

    Args:
        served: also measure the GGUF's acceptance in a real llama.cpp server (minutes), and keep the figure in ``draft_report.json``.

    Raises:
        DraftstillError: nothing was published yet, or the server cannot run.
    """
    found, score, own = _scored(recipe, run)
    stage = found["published"]
    if not stage.done:
        raise DraftstillError("there is no published folder in this run folder", key="run_dir", value=str(run.path),
                              mend="run `draftstill publish RECIPE` first")  # fmt: skip
    folder = stage.folder / "model"
    report = read_json(folder / "draft_report.json")
    with quiet_transformers():
        target = target_facts(recipe)
        if served:
            report["export"]["served"] = served_beside_ours(recipe, run, folder, target, score["conditions"]["gamma"])
        checks = validate(folder, target, report["export"])
    report["export"]["checks"] = matrix_json(checks)
    write_json(folder / "draft_report.json", report)
    atomic_write(folder / "README.md", card(score, own, export=report["export"]))
    say(matrix_text(checks))
    return not failures(checks)


def _scored(recipe: Recipe, run: RunFolder) -> tuple[dict[str, Stage], dict[str, Any], Recipe]:
    """Stages, score, and the whole recipe of the draft that is published: of several candidates, the winner's."""
    found = stages(recipe, run)
    drafts = any(stage.done for name, stage in found.items() if kind_of(name) == "draft")
    for name, verb, there in (("draft", "train", drafts), ("score", "evaluate", found["score"].done)):
        if not there:
            raise DraftstillError(f"there is no finished {name} in this run folder", key="run_dir", value=str(run.path),
                                  mend=f"run `draftstill {verb} RECIPE` first")  # fmt: skip
    _, own, draft = published_draft(recipe, run)
    others = {name for name, stage in found.items() if kind_of(name) == "draft" and name != draft.name}
    return {name: s for name, s in found.items() if name not in others}, read_json(found["score"].folder / "score.json"), own


def _destination(recipe: Recipe) -> str:
    kind = "private" if recipe.publish.private else "PUBLIC"
    return f"; --push would send these files to {recipe.publish.repo_id} ({kind})" if recipe.publish.repo_id else ""


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if COPIED.fullmatch(p.name) or WRITTEN.fullmatch(p.name))


def _say_files(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        say(f"  {path.name:<32}{path.stat().st_size:>14,} bytes")


def _build(
    folder: Path, recipe: Recipe, own: Recipe, run: RunFolder, score: Mapping[str, Any], found: Mapping[str, Stage]
) -> dict[str, Any]:
    """Make the folder; ``own`` is the whole recipe of the one draft whose stage is among ``found``."""
    source = next(stage for name, stage in found.items() if kind_of(name) == "draft").folder / "model"
    expected = score["draft"].get("weights_sha256")
    if expected and source.is_dir() and hash_weights(source) != expected:
        raise DraftstillError("the draft's weights are not those that were scored", value=str(source),
                              mend="score again: `draftstill evaluate RECIPE --set-aside`")  # fmt: skip
    with quiet_transformers():
        target: TargetFacts = target_facts(recipe)
        facts = export_folder(source, folder, own, target, name=f"Draft for {score['target']['name']}", licence=licence(score, own))
        facts["alpha"] = published_alpha(recipe, run, found, folder)
        checks = validate(folder, target, facts)
    say(matrix_text(checks))
    facts |= {"checks": matrix_json(checks), "gammas": gamma_table(score), "target_context": target.context, "languages": target.languages,
              "tokenizer_sha256": tokenizer_hash(target.tokenizer), "head_cost": _head_cost(score, facts["vocabulary"]),
              "adapted": _adapted(found)}  # fmt: skip
    atomic_write(folder / "README.md", card(score, own, export=facts))
    write_json(folder / "draft_report.json", {**public_score(score), "export": facts})
    write_json(folder / "provenance.json", {
        "made_by": "draftstill", "recipe": public_recipe(own, score), "stages": {n: s.fingerprint for n, s in found.items() if n != "published"},
        "weights": {p.name: hash_file(p) for p in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])},
        "scored_weights": expected, "versions": score["conditions"]["versions"], "git": score["conditions"].get("git"),
        "date": score["conditions"]["date"],
    })  # fmt: skip
    return facts


def _adapted(found: Mapping[str, Stage]) -> dict[str, Any] | None:
    """What the target was tuned from and how far, and the hashes that tell it from any other; None for a target taken as it is."""
    if "adapted" not in found:
        return None
    facts = found["adapted"].facts()
    kept = ("name", "revision", "r", "tokens", "heldout_tokens", "perplexity", "weights_sha256")
    return {"source": _public_source(facts["source"]), **{k: facts[k] for k in kept}}


def _head_cost(score: Mapping[str, Any], rows: int) -> dict[str, int] | None:
    """Weights that one draft step multiplies with the whole head and with the trimmed one; None where the head was not trimmed."""
    kept, width, draft = score["draft"]["head_tokens"], score["target"].get("hidden_size"), score["draft"]["parameters"]
    if not kept or not width:
        return None
    whole = draft + (rows - score["target"]["vocab_size"]) * width
    return {"whole": whole, "trimmed": whole - (rows - kept) * width}


def public_score(score: Mapping[str, Any]) -> dict[str, Any]:
    """The score without text: no examples or passages, prompts by number, no paths."""
    out = {k: v for k, v in score.items() if k != "examples"}
    nameless = lambda arms: [{**a, "per_prompt": [{**p, "prompt": n} for n, p in enumerate(a.get("per_prompt") or [])]} for a in arms]  # noqa: E731
    if "diagnosis" in score:
        out["diagnosis"] = {name: {k: v for k, v in d.items() if k != "worst"} for name, d in score["diagnosis"].items()}
    if "domains" in score:
        out["domains"] = {
            name: {**{k: v for k, v in d.items() if k != "source"}, "arms": nameless(d["arms"])} for name, d in score["domains"].items()
        }
    out["corpus"] = {**score["corpus"], "source": corpus_name(score)}
    if "stock" in score:
        out["stock"] = {name: {**d, "source": _public_source(d["source"])} for name, d in score["stock"].items()}
    out["target"] = {**score["target"], "source": _public_source(score["target"]["source"])}
    # Arguments can hold paths and names of clients; the settings themselves stand in provenance.json.
    out["conditions"] = {**score["conditions"], "command": " ".join(str(score["conditions"]["command"]).split()[:2])}
    out["arms"] = nameless(score["arms"])
    out["verdict"] = verdict(score)
    return out


def public_recipe(recipe: Recipe, score: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved recipe without places on this machine or elsewhere."""
    out = json.loads(recipe.model_dump_json(exclude={"run_dir"}))
    _hide_places(out)
    out["corpus"]["source"] = corpus_name(score)
    return out


def _hide_places(value: dict[str, Any]) -> None:
    for key, inner in value.items():
        if isinstance(inner, dict):
            _hide_places(inner)
        elif inner and key in ("source", "target_gguf", "init_from"):
            value[key] = _public_source(str(inner))
        elif inner and key in ("mirror", "url"):
            value[key] = "private"


def _public_source(source: str) -> str:
    known = source in ("prune", "fresh") or source.startswith("wheel:") or hub_id(source)
    return source if known else re.split(r"[/\\]", source.rstrip("/\\"))[-1]


def _may_push(recipe: Recipe, score: Mapping[str, Any]) -> None:
    if not recipe.publish.repo_id:
        raise DraftstillError("--push needs a repository", key="publish.repo_id", mend="set publish.repo_id: your-name/your-draft")
    refuse_licence(score, recipe)
