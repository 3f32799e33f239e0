"""The recording stage: the target scores texts from every source, in one forward each, and keeps its laws."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftstill.corpus import prepare_corpus
from draftstill.decode import Loaded, load_target
from draftstill.distill.prompts import encode, opening
from draftstill.distill.ranks import ranks
from draftstill.distill.refusing import Refused, list_refused
from draftstill.distill.remote import mirror, probe
from draftstill.distill.responses import SIDES, respond
from draftstill.distill.scoring import Hidden, Scorer, TopK, Written, by_length, score_texts, sharded, without_laws
from draftstill.distill.served import make_served
from draftstill.distill.shards import mark_of, write_manifest
from draftstill.distill.sources import Materials, Text, describe, gather, held_out
from draftstill.distill.targets import Described, describe_target
from draftstill.distill.writing import REFUSED
from draftstill.errors import DraftstillError
from draftstill.progress import duration, say
from draftstill.recipe import Recipe, Record
from draftstill.recording_size import recording_bytes
from draftstill.runfolder import RunFolder, read_json, write_json
from draftstill.stages import content_of, resolved_device, resolved_dtype, served_target, stages
from draftstill.vocabulary import template_hash, tokenizer_hash

_TRIED = "Before anything is written, a server is asked for its laws along this sentence."
_NOTE = "mirrored.json"
"""In the stage's folder: addresses that have a copy."""
_PILOT_BATCHES = 3
"""Forwards of the pilot: the first warms up, the others are timed."""
_WORTH_A_PILOT = 16
"""Forwards that a recording must have for a pilot that only estimates."""


def record(recipe: Recipe, run: RunFolder) -> Path:
    """Write ``recording/train`` as the recipe says and ``recording/heldout`` as hidden states; returns the stage's folder.

    The held-out side is exact wherever the target's weights are: alpha is measured on it at any temperature. Of a served target it holds what
    the server gives, of a black box the text alone. Under a launch of many processes each one makes its part of responses and shards; all of
    them return when everything is there.
    """
    here = ranks(resolved_device(recipe))
    stage = stages(recipe, run)["recording"]
    if here.main and recipe.record.mirror and not _mirrored(recipe, stage.folder):
        probe(recipe.record.mirror)
    written = respond(recipe, run)
    done = stage.done
    here.wait()  # before the main process moves anything
    if done:
        if here.main:
            _mirror(recipe, stage.folder)
        here.wait()
        return stage.folder
    if here.main:
        stage.begin()
    here.wait()
    target = load_target(recipe) if in_process(recipe.record) else describe_target(recipe)
    materials = Materials(recipe, target, prepare_corpus(recipe, run), written, stage.work, here)
    texts = {"train": gather(materials), "heldout": held_out(materials)}
    scorers = Scorers(target, recipe.record)
    pilot = _pilot(materials, texts, scorers)
    about = {
        "target": asdict(target.source), "dtype": resolved_dtype(recipe), "vocab": target.vocab, "hidden_size": scorers.hidden_size,
        "revision": target.revision, "target_sha256": content_of(served_target(recipe).source) or recipe.target.sha256,
        "tokenizer_sha256": tokenizer_hash(target.tokenizer), "template_sha256": template_hash(target.tokenizer),
        "sampler": recipe.respond.sampler.model_dump(), **scorers.about(),
    }  # fmt: skip
    sizes = {}
    refused = {side: Refused(stage.work, side, len(texts[side]), recipe.record.max_refused) for side in SIDES}
    for side in SIDES:
        mode = pilot["mode"] if side == "train" else scorers.heldout_mode
        scorer = scorers.of(mode, side)
        made_from = {**about, "mode": mode, **_settings(recipe.record, mode, target.vocab, side)}
        label = "record" if side == "train" else "record held-out"
        folder, settings = stage.work / side, recipe.record
        score_texts(texts[side], scorer, folder, scorers.batch, settings.shard_sequences, label, mark=mark_of(made_from), here=here,
                    refused=refused[side])  # fmt: skip
        here.wait()
        if here.main:
            expected = [sum(len(t.ids) for t in group) for group in sharded(texts[side], settings.shard_sequences)]
            more: dict[str, Any] = {"auto": pilot["auto"]} if side == "train" else {}
            refused[side].check()
            if rows := refused[side].rows():
                texts[side] = without_laws(texts[side], {row["shard"] * settings.shard_sequences + row["text"] for row in rows})
                more["refused"] = len(rows)
            manifest = write_manifest(folder, made_from, expected, kinds=describe(texts[side]), **more)
            sizes[side] = {k: manifest[k] for k in ("sequences", "positions", "bytes")}
    if here.main:
        lost = [row for side in SIDES for row in refused[side].rows()]
        told = {"refused": list_refused(stage.work, refused)} if scorers.served else {}
        stage.finish(sizes=sizes, mode=pilot["mode"], kinds=describe(texts["train"]), pilot=pilot, **told)
        train = sizes["train"]
        each = train["bytes"] / max(1, train["positions"])
        say(f"  recording: {train['positions']:,} positions, {train['bytes'] / 2**20:,.0f} MiB ({each:.0f} bytes each)")
        if lost:
            say(
                f"  {len(lost)} texts were {REFUSED} and teach nothing; the first: {lost[0]['detail']}; listed in {stage.folder / 'rejected.jsonl'}"
            )
        for path in stage.folder.glob("refused-*.json"):  # not before: after a kill the next attempt must still find them
            path.unlink()
        _mirror(recipe, stage.folder)
    here.wait()
    return stage.folder


def look_ahead(recipe: Recipe, run: RunFolder) -> None:
    """Try what the recording will need, for whoever begins the hours of work that lie before it: the place of its copy, and the server.

    Raises:
        DraftstillError: one of them does not do what the recipe asks of it.
    """
    stage = stages(recipe, run)["recording"]
    if recipe.record.mirror and not _mirrored(recipe, stage.folder):
        probe(recipe.record.mirror)
    if recipe.record.server and not stage.done:
        target = describe_target(recipe)
        served = make_served(recipe.record, target.vocab, target.config.vocab_size, target.tokenizer)
        served.probe([*opening(target.tokenizer), *encode(target.tokenizer, _TRIED)])


def _mirrored(recipe: Recipe, folder: Path) -> bool:
    """Whether all of it lies at record.mirror, as an earlier command found."""
    note = folder / _NOTE
    return note.exists() and recipe.record.mirror in read_json(note)


def _mirror(recipe: Recipe, folder: Path) -> None:
    """Send a whole recording to record.mirror, if there is one that does not have it."""
    address = recipe.record.mirror
    if not address or _mirrored(recipe, folder):
        return
    sent = sum(mirror(folder / side, f"{address.rstrip('/')}/{side}") for side in SIDES)
    note = folder / _NOTE
    write_json(note, [*(read_json(note) if note.exists() else []), address])
    say(f"  record.mirror: {sent} files sent to {address}")


def in_process(settings: Record) -> bool:
    """Whether the target's weights are here."""
    return settings.server is None and settings.mode != "text"


class Scorers:
    """Where laws come from: the target in process, a server, or nowhere."""

    def __init__(self, target: Loaded | Described, settings: Record) -> None:
        self.target, self.settings = target, settings
        self.served = make_served(settings, target.vocab, target.config.vocab_size, target.tokenizer) if settings.server else None
        self.hidden_size: int = target.network.hidden if isinstance(target, Loaded) else target.config.hidden_size
        self.heldout_mode = "hidden" if in_process(settings) else settings.mode
        # A server is kept busy by a whole shard's texts at once.
        self.batch = settings.shard_sequences if self.served else settings.batch_size

    def of(self, mode: str, side: str) -> Scorer:
        """What a side is recorded with."""
        if self.served:
            return self.served
        if not isinstance(self.target, Loaded):
            return Written(self.target.vocab)
        s, network = self.settings, self.target.network
        if mode == "live":
            return Written(self.target.vocab)
        if mode == "hidden":
            return Hidden(network, s.hidden_bits if side == "train" else None)
        return TopK(network, s.top_k, s.temperature, s.kept_mass, s.logp_bits)

    def about(self) -> dict[str, Any]:
        """What a manifest says beside the target."""
        return {"server": self.served.about} if self.served else {}


def _settings(settings: Record, mode: str, vocab: int, side: str) -> dict[str, Any]:
    """What a reader must know of how laws were packed."""
    if mode in ("text", "live"):
        return {}
    if mode == "hidden":
        return {"hidden_bits": settings.hidden_bits if side == "train" else None}
    return {"top_k": min(settings.top_k, vocab), "temperature": settings.temperature, "kept_mass": settings.kept_mass,
            "logp_bits": settings.logp_bits}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """What a pilot found."""

    tokens: int
    seconds_per_token: float
    kept: float
    """Mean ids kept per law."""
    tail: float
    """Mean tail mass."""


def _pilot(materials: Materials, texts: dict[str, list[Text]], scorers: Scorers) -> dict[str, Any]:
    """Decide the mode and say what is coming. Written down, so that a later attempt goes on in the same mode.

    Raises:
        DraftstillError: the disk has not the room, or a server's laws cannot be recorded.
    """
    path, here, settings = materials.work / "pilot.json", materials.here, materials.recipe.record
    if here.main and scorers.served:
        scorers.served.probe(texts["train"][0].ids)
    if here.main and not path.exists():
        found = measure(texts["train"], scorers) if in_process(settings) and _worth_it(texts["train"], settings) else None
        mode, auto = settings.mode, None
        if mode == "auto":
            assert found is not None
            mode = "topk" if found.tail < settings.auto_tail else "hidden"
            auto = {"mode": mode, "mean_tail": round(found.tail, 6), "auto_tail": settings.auto_tail, "pilot_tokens": found.tokens}
            say(f"  record.mode auto: {mode}, because the mean tail of {found.tokens:,} pilot tokens is {found.tail:.4f}, "
                f"{'under' if mode == 'topk' else 'not under'} record.auto_tail {settings.auto_tail:g}")  # fmt: skip
        size = _size(texts, scorers, resolved_dtype(materials.recipe), mode, found)
        free = shutil.disk_usage(materials.work).free
        if found is not None:
            takes = {side: sum(len(t.ids) for t in group) * found.seconds_per_token for side, group in texts.items()}
            later = takes.pop("train") if mode == "live" else None
            say(f"  record: about {size / 2**20:,.0f} MiB and {duration(sum(takes.values()) / here.world)}, by a pilot of {found.tokens:,} tokens; "
                f"the disk has {free / 2**30:,.1f} GiB free")  # fmt: skip
            if later is not None:
                say(
                    f"  record.mode live: the target's forwards will take about {duration(later)} of each pass over the training texts, on one device"
                )
        if size > free:
            problem = f"the recording needs about {size / 2**20:,.0f} MiB and the disk has {free / 2**20:,.0f} MiB free"
            raise DraftstillError(problem, key="run_dir", value=materials.recipe.run_dir,
                                  mend="free some, lower record.top_k or record.kept_mass, or give another run_dir")  # fmt: skip
        write_json(path, {"mode": mode, "auto": auto, "estimated_bytes": round(size)})
    here.wait()
    pilot: dict[str, Any] = read_json(path)
    return pilot


def _worth_it(texts: Sequence[Text], settings: Record) -> bool:
    return settings.mode == "auto" or len(texts) >= _WORTH_A_PILOT * settings.batch_size


def measure(texts: Sequence[Text], scorers: Scorers) -> Measured:
    """Score a few batches from all over the texts."""
    settings = scorers.settings
    step = max(1, len(texts) // (_PILOT_BATCHES * settings.batch_size))
    sample = list(texts[::step][: _PILOT_BATCHES * settings.batch_size])
    scorer = scorers.of("topk" if settings.mode in ("topk", "auto") else "hidden", "train")
    tails, counts, seconds, timed = [], [], 0.0, 0
    batches = by_length(sample, settings.batch_size)
    for number, rows in enumerate(batches):
        started = time.perf_counter()
        for column in scorer.columns([sample[i] for i in rows]):
            if "tail" in column:
                known = column["count"] > 0
                tails.append(column["tail"][known])
                counts.append(column["count"][known])
        if number or len(batches) == 1:
            seconds += time.perf_counter() - started
            timed += sum(len(sample[i].ids) for i in rows)
    mean = lambda parts: float(torch.cat(parts).double().mean()) if parts else 0.0  # noqa: E731
    return Measured(sum(len(t.ids) for t in sample), seconds / timed, mean(counts), mean(tails))


def _size(texts: dict[str, list[Text]], scorers: Scorers, dtype: str, mode: str, found: Measured | None) -> float:
    """Bytes of both sides."""
    sides = {side: (len(group), sum(len(t.ids) for t in group)) for side, group in texts.items()}
    return recording_bytes(scorers.settings, {"train": mode, "heldout": scorers.heldout_mode}, sides, vocab=scorers.target.vocab,
                           hidden=scorers.hidden_size, dtype_bytes=getattr(torch, dtype).itemsize,
                           kept=found.kept if found is not None and found.kept else None)  # fmt: skip
