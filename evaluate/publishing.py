"""From a scored draft to a folder that others load: allow-listed files, checked by loading them back, documented, searched for leaks.

``--push`` is implemented on huggingface_hub and tested against a stand-in; it has not been run against the real Hub.
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
from draftstill.evaluate.card import card, corpus_name, hub_id, licence, name_fault
from draftstill.evaluate.report import verdict
from draftstill.evaluate.scan import scan
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, Stage, atomic_write, hash_file, read_json, write_json
from draftstill.sources import quiet_transformers
from draftstill.stages import stages

_COPIED = re.compile(
    r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|tokenizer\.json|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|tokenizer\.model|spiece\.model|chat_template\.jinja"
)
_WRITTEN = ("README.md", "draft_report.json", "generation_config.json", "provenance.json")
_TOLERANCE = 1e-4
"""Largest difference of float32 logits after loading back, relative to the largest logit. Equal weights differ only by how the matrix
product is cut into blocks, which a padded head can change: 1e-6 and less was seen."""


def publish(recipe: Recipe, run: RunFolder, *, push: bool = False, dry_run: bool = False) -> Path:
    """Make the folder (or reuse it), and with ``push`` send it to ``publish.repo_id`` under the Hub's own login.

    Args:
        push: upload after all checks; private unless ``publish.private`` is false.
        dry_run: check and list only. Leaves nothing behind and sends nothing.

    Returns:
        The folder to load: ``published/model`` in the run folder (with ``dry_run``, where it would lie).

    Raises:
        DraftstillError: a stage is missing, a file is not what it should be, something must not leave, or the Hub refused.
    """
    found = stages(recipe, run)
    for name, verb in (("draft", "train"), ("score", "evaluate")):
        if not found[name].done:
            raise DraftstillError(f"there is no finished {name} in this run folder", key="run_dir", value=str(run.path),
                                  mend=f"run `draftstill {verb} RECIPE` first")  # fmt: skip
    score = read_json(found["score"].folder / "score.json")
    if push:
        _may_push(recipe, score)
    stage = found["published"]
    documents = found["corpus"].folder / "documents.jsonl"
    private = (str(run.path.resolve()), *([str(Path.home())] if len(str(Path.home())) > len("/root") else []))
    if stage.done:
        folder = stage.folder / "model"
        # The card names the repository, which may have been chosen since.
        atomic_write(folder / "README.md", card(score, recipe, notes=stage.facts()["notes"]))
        scan(folder, documents, private_paths=private)
    elif dry_run:
        run.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="published.dry-run.", dir=run.path) as temporary:
            _build(Path(temporary) / "model", recipe, score, found)
            scan(Path(temporary) / "model", documents, private_paths=private)
            _say_files(Path(temporary) / "model")
        say(f"dry run: nothing was kept or sent{_destination(recipe)}")
        return stage.folder / "model"
    else:
        folder = stage.begin() / "model"
        shutil.rmtree(folder, ignore_errors=True)  # half a copy of an earlier attempt
        facts = _build(folder, recipe, score, found)
        scan(folder, documents, private_paths=private)
        folder = stage.finish(**facts) / "model"
    _say_files(folder)
    if licence(score, recipe) is None:
        say("  the licence is unknown: the card says so; set publish.license before giving the folder away")
    if dry_run:
        say(f"dry run: nothing was sent{_destination(recipe)}")
    elif push:
        _push(recipe, folder)
    else:
        say(f"published locally: {folder}; to send it to the Hub set publish.repo_id and add --push")
    return folder


def _destination(recipe: Recipe) -> str:
    kind = "private" if recipe.publish.private else "PUBLIC"
    return f"; --push would send these files to {recipe.publish.repo_id} ({kind})" if recipe.publish.repo_id else ""


def _say_files(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        say(f"  {path.name:<32}{path.stat().st_size:>14,} bytes")


def _build(folder: Path, recipe: Recipe, score: Mapping[str, Any], found: Mapping[str, Stage]) -> dict[str, Any]:
    source = found["draft"].folder / "model"
    left_out = _copy(source, folder)
    expected, weights = score["draft"].get("weights_sha256"), source / "model.safetensors"
    if expected and weights.exists() and hash_file(weights) != expected:
        raise DraftstillError("the draft's weights are not those that were scored", value=str(weights),
                              mend="score again: `draftstill evaluate RECIPE --set-aside`")  # fmt: skip
    _neutral_generation_config(source, folder)
    with quiet_transformers():
        facts = _pad_and_check(source, folder, score["target"]["vocab_size"])
    _clean_json(folder)
    notes = facts["notes"]
    if left_out:
        say(f"  left out: {', '.join(left_out)}")
    atomic_write(folder / "README.md", card(score, recipe, notes=notes))
    write_json(folder / "draft_report.json", public_score(score))
    write_json(folder / "provenance.json", {
        "made_by": "draftstill", "recipe": public_recipe(recipe, score), "stages": {n: s.fingerprint for n, s in found.items() if n != "published"},
        "export": facts, "weights": {p.name: hash_file(p) for p in sorted(folder.glob("*.safetensors"))},
        "scored_weights": expected, "versions": score["conditions"]["versions"], "git": score["conditions"].get("git"),
        "date": score["conditions"]["date"],
    })  # fmt: skip
    return facts


def _copy(source: Path, folder: Path) -> list[str]:
    """Copy the allow-listed files; returns the names left behind."""
    if not source.is_dir():
        raise DraftstillError("the draft stage holds no model", value=str(source), mend="train it again with --set-aside")
    folder.mkdir(parents=True)
    left = []
    for path in sorted(source.iterdir()):
        if not _COPIED.fullmatch(path.name):
            left += [path.name] if path.name not in _WRITTEN else []
        elif path.is_symlink() or not path.is_file():
            # A link could pull any file of this machine into a public folder.
            raise DraftstillError(f"{path.name} is {'a link' if path.is_symlink() else 'not a file'}, and only plain files are published",
                                  value=str(path), mend="put the file itself in its place")  # fmt: skip
        else:
            shutil.copyfile(path, folder / path.name)
    names = {p.name for p in folder.iterdir()}
    missing = [n for n, there in (("config.json", "config.json" in names), ("*.safetensors", any(n.endswith(".safetensors") for n in names)),
                                  ("a tokenizer", bool(names & {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json"}))) if not there]  # fmt: skip
    if missing:
        raise DraftstillError(f"the draft lacks {', '.join(missing)}", value=str(source), mend="train it again with --set-aside")
    return left


def _neutral_generation_config(source: Path, folder: Path) -> None:
    """Only the special ids: a repetition penalty or temperature left in a draft would silently change what it proposes."""
    known: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        if (source / name).exists():
            known.update({k: v for k, v in read_json(source / name).items() if k.endswith("_token_id") and v is not None})
    write_json(folder / "generation_config.json", {k: known[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in known})


def _clean_json(folder: Path) -> None:
    """Take out where the files lay when they were saved."""
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists():
            content = read_json(folder / name)
            kept = {k: v for k, v in content.items() if k not in ("_name_or_path", "name_or_path", "tokenizer_file", "vocab_file")}
            if kept != content:
                write_json(folder / name, kept)


def _pad_and_check(source: Path, folder: Path, size: int) -> dict[str, Any]:
    """Pad the vocabulary to the target's configured size, load the folder back, compare logits with the draft that was scored."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load(path: Path, dtype: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, use_safetensors=True).eval()

    @torch.no_grad()
    def logits_of(path: Path) -> torch.Tensor:
        return load(path, torch.float32)(ids).logits[0]

    model = load(source, "auto")
    have = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(32) * 7919 + 1).remainder(have)[None]  # spread over the vocabulary
    before = logits_of(source)
    notes, padded = [], max(0, size - have)
    if padded:
        _pad(model, size, int(before.log_softmax(-1).amax(0).argmin()))
        keep = (folder / "generation_config.json").read_bytes()
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        model.save_pretrained(folder)
        atomic_write(folder / "generation_config.json", keep)
        notes.append("the vocabulary was padded to the target's configured size, which servers compare; the added rows are inert "
                     "(copies of the least likely row), and no tokenizer id points at them")  # fmt: skip
    elif have > size:
        notes.append("the vocabulary is larger than the target's configured size; servers that compare sizes will refuse the pair")
    after = logits_of(folder)
    difference = float((before - after[:, :have]).abs().max())
    if not difference <= _TOLERANCE * max(1.0, float(before.abs().max())):
        raise DraftstillError(f"loaded back, the published weights give other logits than the draft (largest difference {difference:.3g})",
                              value=str(folder), mend="keep the run folder and report this: it is a fault of the export")  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not len(tokenizer) or max(tokenizer.get_vocab().values()) >= after.shape[1]:
        raise DraftstillError(
            "the tokenizer has ids that the draft's vocabulary lacks", value=str(folder), mend="train the draft again with --set-aside"
        )
    say(f"  loaded back: largest difference of logits {difference:.2g}" + (f"; {padded:,} vocabulary rows added" if padded else ""))
    return {"notes": notes, "load_back_max_difference": difference, "vocabulary": after.shape[1], "padded_rows": padded,
            "padded_mass": float(after.softmax(-1)[:, have:].sum(-1).max()) if padded else 0.0}  # fmt: skip


def _pad(model: Any, size: int, least_likely: int) -> None:
    """Add rows that draw no probability.

    Zero rows would not do: they give logit 0, which can lie above most real ones. A copy of the row that was least likely wherever
    the check looked stays out of the way. On a SmolLM2-135M and contract text, 192 zero rows drew up to 2.5% of the probability of a
    position, 192 copies 0.001%.
    """
    import torch

    old = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(size, mean_resizing=False)
    head = model.get_output_embeddings()
    with torch.no_grad():
        model.get_input_embeddings().weight[old:] = 0
        head.weight[old:] = head.weight[least_likely]  # with tied weights this is the input's row too, which nothing looks up
        if getattr(head, "bias", None) is not None:
            head.bias[old:] = head.bias[least_likely]


def public_score(score: Mapping[str, Any]) -> dict[str, Any]:
    """The score without text: no examples, prompts by number, no paths."""
    out = {k: v for k, v in score.items() if k != "examples"}
    out["corpus"] = {**score["corpus"], "source": corpus_name(score)}
    out["target"] = {**score["target"], "source": _public_source(score["target"]["source"])}
    # Arguments can hold paths and names of clients; the settings themselves stand in provenance.json.
    out["conditions"] = {**score["conditions"], "command": " ".join(str(score["conditions"]["command"]).split()[:2])}
    out["arms"] = [{**a, "per_prompt": [{**p, "prompt": n} for n, p in enumerate(a.get("per_prompt") or [])]} for a in score["arms"]]
    out["verdict"] = verdict(score)
    return out


def public_recipe(recipe: Recipe, score: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved recipe without places on this machine."""
    out = json.loads(recipe.model_dump_json(exclude={"run_dir"}))
    out["corpus"]["source"] = corpus_name(score)
    for section in ("target", "draft"):
        out[section]["source"] = _public_source(out[section]["source"])
    return out


def _public_source(source: str) -> str:
    known = source == "prune" or source.startswith("wheel:") or hub_id(source)
    return source if known else re.split(r"[/\\]", source.rstrip("/\\"))[-1]


def _may_push(recipe: Recipe, score: Mapping[str, Any]) -> None:
    if not recipe.publish.repo_id:
        raise DraftstillError("--push needs a repository", key="publish.repo_id", mend="set publish.repo_id: your-name/your-draft")
    if licence(score, recipe) is None:
        raise DraftstillError("the licence of the target or of the draft's start is unknown, so the draft's cannot be derived", key="publish.license",
                              mend="read their terms and set publish.license, for example apache-2.0")  # fmt: skip
    if fault := name_fault(score, recipe.publish.repo_id):
        raise DraftstillError(fault, key="publish.repo_id", value=recipe.publish.repo_id, mend="rename the repository")


def _push(recipe: Recipe, folder: Path) -> None:
    import huggingface_hub

    repo, api = str(recipe.publish.repo_id), huggingface_hub.HfApi()
    names = sorted(p.name for p in folder.iterdir() if _COPIED.fullmatch(p.name) or p.name in _WRITTEN)
    try:
        api.create_repo(repo, private=recipe.publish.private, exist_ok=True)
        # exist_ok leaves an existing repository as visible as it was.
        if recipe.publish.private and not api.model_info(repo).private:
            raise DraftstillError("this repository exists and is public, and publish.private asks for a private one", key="publish.repo_id", value=repo,
                                  mend="give another repository, or set publish.private: false")  # fmt: skip
        api.upload_folder(repo_id=repo, folder_path=str(folder), allow_patterns=names, commit_message="Draft model made with Draftstill")
    except DraftstillError:
        raise
    except Exception as error:  # noqa: BLE001 - the hub library's HTTP errors have another base in each major version
        raise DraftstillError(f"the Hub refused: {str(error).splitlines()[0] if str(error) else type(error).__name__}", key="publish.repo_id", value=repo,
                              mend="log in with `hf auth login` (a token that may write), check the name and the connection") from error  # fmt: skip
    say(f"sent {len(names)} files to {repo} ({'private' if recipe.publish.private else 'public'})")
