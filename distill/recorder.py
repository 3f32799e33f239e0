"""The recording stage: the target scores responses and corpus text, in one forward each, and keeps its laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from draftstill.corpus import prepare_corpus, read_documents
from draftstill.decode import Network, load_target
from draftstill.distill.prompts import encode, opening, seed_of
from draftstill.distill.recording import write_manifest, write_shard
from draftstill.distill.responses import SIDES, read_responses, respond
from draftstill.errors import DraftstillError
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder
from draftstill.stages import resolved_dtype, stages
from draftstill.vocabulary import template_hash, tokenizer_hash

_SHORTEST = 32
"""Tokens of a document piece worth a row of its own."""

Text = tuple[list[int], int]
"""Token ids and the first supervised position."""


def record(recipe: Recipe, run: RunFolder) -> Path:
    """Write ``recording/train`` as the recipe says and ``recording/heldout`` as hidden states; returns the stage's folder.

    The held-out side is always exact: alpha is measured on it at any temperature.
    """
    stage = stages(recipe, run)["recording"]
    responses = respond(recipe, run)
    if stage.done:
        return stage.folder
    work = stage.begin()
    target = load_target(recipe)
    corpus = prepare_corpus(recipe, run)
    texts = {"train": _interleave(_responses(responses, "train", recipe), _documents(recipe, corpus, target.tokenizer), recipe.seed),
             "heldout": _responses(responses, "heldout", recipe)}  # fmt: skip
    if not texts["train"]:
        raise DraftstillError("there is nothing to record for training", key="record.document_tokens", value=recipe.record.document_tokens,
                              mend="set respond.prompts or record.document_tokens above 0")  # fmt: skip
    about = {
        "target": asdict(target.source), "dtype": resolved_dtype(recipe), "vocab": target.vocab, "hidden_size": target.network.hidden,
        "revision": target.revision, "tokenizer_sha256": tokenizer_hash(target.tokenizer), "template_sha256": template_hash(target.tokenizer),
        "sampler": recipe.respond.sampler.model_dump(),
    }  # fmt: skip
    manifests = {}
    for side in SIDES:
        mode = recipe.record.mode if side == "train" else "hidden"
        scorer: Scorer = TopK(target.network, recipe.record.top_k, recipe.record.temperature) if mode == "topk" else Hidden(target.network)
        extra = {"top_k": min(recipe.record.top_k, target.vocab), "temperature": recipe.record.temperature} if mode == "topk" else {}
        label = "record" if side == "train" else "record held-out"
        score_texts(texts[side], scorer, work / side, recipe.record.batch_size, recipe.record.shard_sequences, label)
        manifests[side] = write_manifest(work / side, {**about, "mode": mode, **extra})
    sizes = {side: {k: m[k] for k in ("sequences", "positions", "bytes")} for side, m in manifests.items()}
    folder = stage.finish(sizes=sizes, mode=recipe.record.mode)
    train = sizes["train"]
    say(
        f"  recording: {train['positions']:,} positions, {train['bytes'] / 2**20:,.0f} MiB ({train['bytes'] / train['positions']:.0f} bytes each)"
    )
    return folder


def _responses(folder: Path, side: str, recipe: Recipe) -> list[Text]:
    """Prompt and response as one text. The held-out side is supervised on what the target wrote alone: alpha is measured there."""
    limit = recipe.record.sequence_length
    texts = []
    for row in read_responses(folder, side):
        ids = [*row["prompt"], *row["response"]]
        if row["finish"] == "eos":
            ids.pop()  # nobody asks what follows the end
        start = row["supervised_from"] if side == "train" else len(row["prompt"]) - 1
        ids = ids[:limit]
        if start < len(ids):  # else the whole response lies behind the cut
            texts.append((ids, start))
    return texts


def _documents(recipe: Recipe, corpus: Path, tokenizer: Any) -> list[Text]:
    """Pieces of training documents, in an order that takes from everywhere, until document_tokens are reached."""
    wanted, length = recipe.record.document_tokens, recipe.record.sequence_length
    if not wanted:
        return []
    first = opening(tokenizer)
    pieces: list[tuple[int, list[int]]] = []
    for document in read_documents(corpus, "train"):
        ids = encode(tokenizer, document.text)
        step = length - len(first)
        for at in range(0, len(ids), step):
            if len(piece := ids[at : at + step]) >= _SHORTEST:
                pieces.append((seed_of(recipe.seed, "piece", document.id, at), [*first, *piece]))
    pieces.sort(key=lambda p: p[0])
    texts: list[Text] = []
    taken = 0
    for _, piece in pieces:
        if taken >= wanted:
            break
        texts.append((piece[: wanted - taken], 0))
        taken += len(piece)
    if taken < wanted:
        say(f"  record.document_tokens: the training documents hold {taken:,} tokens, not {wanted:,}")
    return [t for t in texts if len(t[0]) >= 2]


def _interleave(responses: list[Text], documents: list[Text], seed: int) -> list[Text]:
    both = [*responses, *documents]
    return [both[i] for i in sorted(range(len(both)), key=lambda i: seed_of(seed, "sequence", i))]


class Scorer(Protocol):
    """From final hidden states [N, H] of ``network`` to the columns of a shard, each [N, ...]."""

    network: Network

    def __call__(self, hidden_NH: Tensor) -> dict[str, Tensor]: ...


@dataclass
class TopK:
    """K most probable ids with log-probabilities, and the exact mass of all others, at a temperature."""

    network: Network
    k: int
    temperature: float = 1.0
    rows: int = 128
    """Positions per block of logits, so that they stay in cache."""

    def __call__(self, hidden_NH: Tensor) -> dict[str, Tensor]:
        vocab = self.network.vocab
        k = min(self.k, vocab)
        parts: list[tuple[Tensor, ...]] = []
        for at in range(0, len(hidden_NH), self.rows):
            z = self.network.logits(hidden_NH[at : at + self.rows]) / self.temperature
            normaliser = z.logsumexp(-1, keepdim=True)
            top, ids = z.topk(k, -1)
            logp = top - normaliser
            # What was kept is blanked and the rest summed: 1 - sum(kept) would lose a thin tail to cancellation.
            rest = z.scatter_(1, ids, -torch.inf).logsumexp(-1) - normaliser.squeeze(1)
            tail = rest.exp() if k < vocab else torch.zeros(len(z), device=z.device)
            parts.append((ids.to(torch.int32), logp.half(), tail))
        ids, logp, tail = (torch.cat(x).cpu() for x in zip(*parts, strict=True))
        return {"ids": ids.to(torch.uint16) if vocab <= 1 << 16 else ids, "logp": logp, "tail": tail}


@dataclass
class Hidden:
    """The final hidden states themselves."""

    network: Network

    def __call__(self, hidden_NH: Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden_NH.cpu()}


@torch.inference_mode()
def score_batch(network: Network, texts: Sequence[Text]) -> Tensor:
    """Final hidden states of a batch of texts, padding dropped, [N, H] in the texts' order."""
    width = max(len(ids) for ids, _ in texts)
    padded = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in texts], device=network.device)
    cache = network.new_cache(len(texts), width)
    hidden = network.forward(padded, cache, [0] * len(texts))
    return torch.cat([h[: len(ids)] for h, (ids, _) in zip(hidden, texts, strict=True)])


def score_texts(texts: Sequence[Text], scorer: Scorer, folder: Path, batch: int, per_shard: int, label: str) -> None:
    """Score texts into shards; whole shards of an earlier attempt are kept.

    A shard's rows are batched by length among themselves, so what it holds does not depend on where an attempt stopped.
    """
    total = sum(len(ids) for ids, _ in texts)
    with Progress(label, total, "tokens") as progress:
        done = 0
        for number, first in enumerate(range(0, len(texts), per_shard)):
            group = texts[first : first + per_shard]
            path = folder / f"shard-{number:05d}.safetensors"
            size = sum(len(ids) for ids, _ in group)
            if not path.exists():
                order = sorted(range(len(group)), key=lambda i: (len(group[i][0]), i))
                columns: list[dict[str, Tensor] | None] = [None] * len(group)
                for at in range(0, len(order), batch):
                    rows = order[at : at + batch]
                    with torch.inference_mode():
                        scored = scorer(score_batch(scorer.network, [group[i] for i in rows]))
                    for i, piece in zip(rows, _split(scored, [len(group[i][0]) for i in rows]), strict=True):
                        columns[i] = piece
                    progress.update(done + sum(len(group[i][0]) for i in order[: at + batch]))
                whole = {name: torch.cat([c[name] for c in columns if c is not None]) for name in (columns[0] or {})}
                write_shard(path, [ids for ids, _ in group], [start for _, start in group], whole)
            done += size
            progress.update(done)


def _split(columns: dict[str, Tensor], lengths: list[int]) -> list[dict[str, Tensor]]:
    parts = {name: column.split(lengths) for name, column in columns.items()}
    return [{name: parts[name][i] for name in parts} for i in range(len(lengths))]
