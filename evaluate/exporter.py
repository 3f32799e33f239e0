"""The safetensors folder: allow-listed files, a vocabulary of the size that servers compare, padding that draws nothing, and GGUF beside it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.evaluate.gguf_tokens import TokenTable, tokens_of_folder, tokens_of_gguf
from draftstill.evaluate.ggufs import KINDS, gguf_fault, read_header, write_gguf
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import atomic_write, read_json, share_weights, write_json
from draftstill.sources import load_config, load_tokenizer, resolve_model, wheel_files
from draftstill.stages import served_target
from draftstill.vocabulary import real_size

COPIED = re.compile(
    r"config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|tokenizer\.json|tokenizer_config\.json"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|tokenizer\.model|spiece\.model|chat_template\.jinja"
)
"""What may come from the draft stage. Everything else there (optimizer states, logs, pickles) stays."""
WRITTEN = re.compile(r"README\.md|draft_report\.json|generation_config\.json|provenance\.json|draft-(f16|q8_0)\.gguf")
"""What publishing writes itself."""
_TRAINING = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|random_states|training_args|trainer_state)|.*\.(bin|pt|pth|pkl|pickle|ckpt)$"
)
TOLERANCE = 1e-4
"""Largest difference of float32 logits after loading back, relative to the largest logit. Equal weights differ only by how the matrix
product is cut into blocks, which a padded head can change: 1e-6 and less was seen."""
_PROBES, _PROBE_TOKENS = 4, 64


@dataclass(frozen=True)
class TargetFacts:
    """What of the target the export and the checks need; its weights are not loaded."""

    config: Any
    tokenizer: Any
    folder: Path | None
    """Where its config and tokenizer files lie; None for a Hub id."""
    gguf: Path | None
    """The file it was converted from, or ``publish.target_gguf``."""
    tuned: bool = False
    """Whether ``gguf`` is what the target was tuned from: it has the same tokenizer, but other weights."""

    @property
    def rows(self) -> int:
        """Configured vocabulary size: what servers compare."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def languages(self) -> list[str]:
        """As the target's GGUF states them."""
        return list(read_header(self.gguf).get("general.languages") or []) if self.gguf else []

    @property
    def context(self) -> int | None:
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)


def target_facts(recipe: Recipe) -> TargetFacts:
    """Config, tokenizer and GGUF of the recipe's target.

    Raises:
        DraftstillError: it cannot be found, or ``publish.target_gguf`` is no file.
    """
    source = resolve_model(served_target(recipe), "target.source")
    start = source if recipe.adapt is None else resolve_model(recipe.target, "target.source")
    file: Path | None = None
    if recipe.publish.target_gguf:
        file = Path(recipe.publish.target_gguf).expanduser()
        if not file.is_file():
            raise DraftstillError("there is no such file", key="publish.target_gguf", value=recipe.publish.target_gguf,
                                  mend="name the GGUF that serves the target")  # fmt: skip
    elif name := start.origin.get("gguf"):
        text = recipe.target.source
        root = wheel_files(text, recipe.target.sha256, "target.source") if text.startswith("wheel:") else Path(text).expanduser()
        file = root if root.is_file() else next(iter(sorted(root.rglob(name))), None)
    folder = Path(source.path_or_id)
    tuned = recipe.adapt is not None and file is not None and not recipe.publish.target_gguf
    return TargetFacts(load_config(source), load_tokenizer(source), folder if folder.is_dir() else None, file, tuned)


def export_folder(source: Path, folder: Path, recipe: Recipe, target: TargetFacts, *, name: str, licence: str | None) -> dict[str, Any]:
    """Write the folder that others load, and load it back.

    Args:
        source: the draft stage's ``model``.
        folder: new; flat.

    Returns:
        notes (sentences without numbers), vocabulary, real_vocabulary, padded_rows, padded_mass (largest probability of all padding at a
        position), context, tied, dtype, load_back_max_difference and load_back_equal, gguf (a list of files).

    Raises:
        DraftstillError: something missing, a link, weights that load back as others, a GGUF that cannot be written.
    """
    left_out = _copy(source, folder)
    _neutral_generation_config(source, folder)
    facts = _fit_vocabulary(source, folder, target, recipe.publish.vocabulary)
    _clean_json(folder)
    if left_out:
        say(f"  left out: {', '.join(left_out)}")
    files, note = _write_ggufs(folder, recipe, target, name, licence)
    return {**facts, "notes": [*facts["notes"], *note], "gguf": files}


def _copy(source: Path, folder: Path) -> list[str]:
    """Copy the allow-listed files; returns the names left behind."""
    if not source.is_dir():
        raise DraftstillError("the draft stage holds no model", value=str(source), mend="train it again with --set-aside")
    folder.mkdir(parents=True)
    left = []
    for path in sorted(source.iterdir()):
        if path.is_symlink() or not path.is_file():
            if COPIED.fullmatch(path.name) or path.is_symlink():
                # A link could pull any file of this machine into a public folder.
                raise DraftstillError(f"{path.name} is {'a link' if path.is_symlink() else 'not a file'}, and only plain files are published",
                                      value=str(path), mend="put the file itself in its place, or take the link away")  # fmt: skip
            left.append(path.name)
        elif COPIED.fullmatch(path.name):
            shutil.copyfile(path, folder / path.name)
        elif not WRITTEN.fullmatch(path.name):
            left.append(path.name)
    names = {p.name for p in folder.iterdir()}
    missing = [n for n, there in (("config.json", "config.json" in names), ("*.safetensors", any(n.endswith(".safetensors") for n in names)),
                                  ("a tokenizer", bool(names & {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json"}))) if not there]  # fmt: skip
    if missing:
        raise DraftstillError(f"the draft lacks {', '.join(missing)}", value=str(source), mend="train it again with --set-aside")
    return left


def refuse_strays(folder: Path) -> None:
    """Refuse a published folder that holds what the allow-list does not: someone put it there after publishing.

    Raises:
        DraftstillError: naming the files.
    """
    strays = [
        p
        for p in sorted(folder.iterdir())
        if p.is_symlink() or not p.is_file() or not (COPIED.fullmatch(p.name) or WRITTEN.fullmatch(p.name))
    ]
    if strays:
        told = ", ".join(
            f"{p.name} ({'a link' if p.is_symlink() else 'a training state' if _TRAINING.match(p.name) else 'not on the list'})"
            for p in strays
        )
        raise DraftstillError(f"the folder holds what is never published: {told}", value=str(folder), mend="take it away and publish again")


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
            kept = {
                k: v
                for k, v in content.items()
                if k not in ("_name_or_path", "_model_name_or_path", "name_or_path", "tokenizer_file", "vocab_file")
            }
            if kept != content:
                write_json(folder / name, kept)


def _fit_vocabulary(source: Path, folder: Path, target: TargetFacts, wish: str) -> dict[str, Any]:
    """Give the draft the rows that ``publish.vocabulary`` asks for, make padding inert, load the folder back, compare logits with the draft."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    real = real_size(target.tokenizer)
    model = load_model_folder(source, "auto")
    have = model.get_input_embeddings().weight.shape[0]
    if not len(tokenizer) or real_size(tokenizer) > have or real > have:
        raise DraftstillError(
            "the tokenizer has ids that the draft's vocabulary lacks", value=str(folder), mend="train the draft again with --set-aside"
        )
    rows = real if wish == "real" else max(target.rows, real)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(real, (_PROBES, _PROBE_TOKENS), generator=generator)
    before = logits_of(source, ids)[..., :real]
    notes = []
    padded = rows - real
    if rows != have or padded:
        _resize(model, real, rows, int(before.log_softmax(-1).amax((0, 1)).argmin()))
        keep = (folder / "generation_config.json").read_bytes()
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        model.save_pretrained(folder)
        share_weights(folder)
        atomic_write(folder / "generation_config.json", keep)
    if rows > have:
        notes.append("the vocabulary was padded to the target's configured size, which servers compare; the added rows are inert "
                     "(copies of the least likely row), and no tokenizer id points at them")  # fmt: skip
    elif padded:
        notes.append("rows that no tokenizer id points at are inert: copies of the least likely row")
    if rows < have:
        notes.append("vocabulary rows that no tokenizer id points at were cut off")
    if wish == "real" and rows != target.rows:
        notes.append("the vocabulary holds the real tokens only; servers that compare configured sizes refuse the pair")
    del model
    after = logits_of(folder, ids)
    difference = float((before - after[..., :real]).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(before.abs().max())):
        raise DraftstillError(f"loaded back, the published weights give other logits than the draft (largest difference {difference:.3g})",
                              value=str(folder), mend="keep the run folder and report this: it is a fault of the export")  # fmt: skip
    config = read_json(folder / "config.json")
    say(
        f"  loaded back: largest difference of logits {difference:.2g}"
        + (f"; {rows - have:,} vocabulary rows added" if rows > have else "")
    )
    return {"notes": notes, "load_back_max_difference": difference, "load_back_equal": True, "vocabulary": after.shape[-1],
            "real_vocabulary": real, "padded_rows": padded,
            "padded_mass": float(after.softmax(-1)[..., real:].sum(-1).max()) if padded else 0.0, "tied": bool(config.get("tie_word_embeddings")),
            "context": config.get("max_position_embeddings"), "dtype": config.get("dtype")}  # fmt: skip


def load_model_folder(path: Path, dtype: Any) -> Any:
    """The causal model of a local folder, safetensors only."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True, use_safetensors=True).eval()


def logits_of(path: Path, ids: Any) -> Any:
    """Float32 logits of the model in a folder at each position of ``ids``."""
    import torch

    with torch.no_grad():
        return load_model_folder(path, torch.float32)(ids).logits


def _resize(model: Any, real: int, rows: int, least_likely: int) -> None:
    """Give the model ``rows`` rows; all from ``real`` on draw no probability.

    Zero rows would not do: they give logit 0, which can lie above most real ones. A copy of a real row is never likelier than that
    row, whatever the text, so greedy drafting proposes it only where it would propose the least likely token. With tied weights the
    copy is the input's row, too, which nothing looks up. On a SmolLM2-135M and contract text, 192 zero rows drew up to 2.5% of the
    probability of a position, 192 copies 0.001%. A head's bias makes padding exactly inert.
    """
    import torch

    if rows != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    with torch.no_grad():
        embedding.weight[real:] = 0
        head.weight[real:] = head.weight[least_likely]
        if getattr(head, "bias", None) is not None:
            head.bias[real:] = -1e4


def _write_ggufs(
    folder: Path, recipe: Recipe, target: TargetFacts, name: str, licence: str | None
) -> tuple[list[dict[str, Any]], list[str]]:
    asked = recipe.publish.gguf
    kinds: Sequence[str] = KINDS if asked == "auto" else asked
    if not kinds:
        return [], []
    try:
        if fault := gguf_fault(folder):
            raise DraftstillError(f"no GGUF of this draft can be written: {fault}", key="publish.gguf", mend="set publish.gguf: []")
        tokens: TokenTable = tokens_of_gguf(target.gguf) if target.gguf else tokens_of_folder(folder)
        files = [write_gguf(folder, folder / f"draft-{kind}.gguf", kind, tokens, name=name, licence=licence) for kind in kinds]
    except DraftstillError as error:
        if asked != "auto":
            raise
        say(f"  no GGUF written: {error.problem}" + (f"; {error.mend}" if error.mend else ""))
        return [], [f"no GGUF file was written: {error.problem}"]
    for file in files:
        say(f"  {file['file']}: {file['tensors']} tensors, tokenizer from {file['tokens_from']}")
    return files, []
