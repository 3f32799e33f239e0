"""The teacher's forward over texts, and what is kept of each law: on the device, without the logits ever being whole in memory.

Shape suffixes: N positions, H hidden, V vocabulary, K kept ids, W ids of a column, C columns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from draftstill.decode import Network
from draftstill.distill.ranks import Ranks
from draftstill.distill.refusing import Refused, Unscored
from draftstill.distill.shards import digest, read_info, shard_name, write_shard
from draftstill.distill.sources import Text
from draftstill.errors import DraftstillError
from draftstill.progress import Progress
from draftstill.sizes import logits_rows


class Scorer(Protocol):
    """From texts to the columns of a shard."""

    @property
    def bits(self) -> dict[str, int | None]:
        """How ``write_shard`` packs them."""

    def columns(self, texts: Sequence[Text]) -> list[dict[str, Tensor]]:
        """The columns of each text, [N, ...]."""


class NetworkScorer(Scorer, Protocol):
    """A scorer that has the target: from final hidden states [N, H] of ``network`` to columns [N, ...]."""

    network: Network

    @property
    def whole(self) -> bool:
        """Whether positions that nothing is learnt from are kept, too."""

    def __call__(self, hidden_NH: Tensor) -> dict[str, Tensor]: ...


@dataclass
class Written:
    """No laws at all: the text itself is what is learnt from, or what a live target will score."""

    vocab: int

    @property
    def bits(self) -> dict[str, int | None]:
        return {"vocab": self.vocab}

    def columns(self, texts: Sequence[Text]) -> list[dict[str, Tensor]]:
        return [{} for _ in texts]


def top_k(z_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest and their ids by falling value: exactly ``torch.topk``, in a fraction of its time where V is much larger than k.

    Ids are laid out in C columns of W. The k columns with the largest maxima hold the k largest ids: each id outside of them is no
    larger than its column's maximum, and so than k others. A maximum per column is one vectorised pass; the search is left with
    C maxima and k W candidates instead of V. Of equal values at the border either may be kept.
    """
    N, V = z_NV.shape
    W = max(1, int((V / k) ** 0.5))
    C = V // W
    if W < 2 or k >= C:
        found = z_NV.topk(k, -1)
        return found.values, found.indices
    grid_NWC = z_NV[:, : W * C].unflatten(1, (W, C))
    columns_Nk = grid_NWC.amax(1).topk(k, -1, sorted=False).indices
    candidates = grid_NWC.gather(2, columns_Nk[:, None].expand(N, W, k)).flatten(1)
    if rest := V - W * C:
        candidates = torch.cat([candidates, z_NV[:, W * C :]], 1)
    values, place = candidates.topk(k, -1)
    ids = place // k * C + columns_Nk.gather(1, place % k)
    return values, torch.where(place < W * k, ids, place - W * k + W * C) if rest else ids


@dataclass
class TopK:
    """The most probable ids with log-probabilities, and the exact mass of all others, at a temperature.

    Args:
        k: ids kept at most; fewer once their mass reaches ``kept_mass``.
        rows: positions per block of logits; None: what suits the device.
    """

    network: Network
    k: int
    temperature: float = 1.0
    kept_mass: float = 1.0
    logp_bits: int = 16
    rows: int | None = None
    whole = False

    @property
    def bits(self) -> dict[str, int | None]:
        return {"logp_bits": self.logp_bits, "vocab": self.network.vocab}

    def columns(self, texts: Sequence[Text]) -> list[dict[str, Tensor]]:
        return score(texts, self)

    def __call__(self, hidden_NH: Tensor) -> dict[str, Tensor]:
        rows = self.rows or logits_rows(hidden_NH.device.type, self.network.vocab)
        parts = [self._block(hidden_NH[at : at + rows]) for at in range(0, len(hidden_NH), rows)]
        return {name: torch.cat([p[name] for p in parts]).cpu() for name in parts[0]} if parts else {}

    def _block(self, hidden_NH: Tensor) -> dict[str, Tensor]:
        vocab = self.network.vocab
        k = min(self.k, vocab)
        z_NV = self.network.logits(hidden_NH)
        if self.temperature != 1.0:
            z_NV.div_(self.temperature)
        top_NK, ids_NK = top_k(z_NV, k)
        peak_N1 = top_NK[:, :1]
        e_NK = (top_NK - peak_N1).exp()
        # What was kept is blanked and the rest summed: 1 - sum(kept) would lose a thin tail to cancellation. The rest and the kept
        # together are the normaliser, so the row is gone through once for exp and once for the sum.
        e_NV = z_NV.sub_(peak_N1).exp_()
        rest_N1 = e_NV.scatter_(1, ids_NK, 0.0).sum(-1, keepdim=True) if k < vocab else torch.zeros_like(peak_N1)
        total_N1 = e_NK.sum(-1, keepdim=True) + rest_N1
        count_N = torch.full((len(z_NV),), k, device=z_NV.device)
        if self.kept_mass < 1.0:
            enough = e_NK.cumsum(-1) >= self.kept_mass * total_N1
            count_N = torch.where(enough.any(-1), enough.to(torch.uint8).argmax(-1) + 1, k)
            dropped = torch.arange(k, device=z_NV.device) >= count_N[:, None]
            rest_N1 = rest_N1 + (e_NK * dropped).sum(-1, keepdim=True)
        lse_N1 = peak_N1 + total_N1.log()
        return {"ids": ids_NK.to(torch.int32), "logp": top_NK - lse_N1, "count": count_N.to(torch.int32),
                "tail": (rest_N1 / total_N1).squeeze(1), "lse": lse_N1.squeeze(1)}  # fmt: skip


@dataclass
class Hidden:
    """The final hidden states themselves; ``hidden_bits`` 8, 16 (bfloat16), or None: the target's dtype."""

    network: Network
    hidden_bits: int | None = None
    whole = True

    @property
    def bits(self) -> dict[str, int | None]:
        return {"hidden_bits": self.hidden_bits}

    def columns(self, texts: Sequence[Text]) -> list[dict[str, Tensor]]:
        return score(texts, self)

    def __call__(self, hidden_NH: Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden_NH.cpu()}


@torch.inference_mode()
def score_batch(network: Network, texts: Sequence[Text]) -> list[Tensor]:
    """Final hidden states of a batch of texts, each [N, H], padding dropped."""
    width = max(len(t.ids) for t in texts)
    padded = torch.tensor([[*t.ids, *[0] * (width - len(t.ids))] for t in texts], device=network.device)
    hidden = network.forward(padded, network.new_cache(len(texts), width), [0] * len(texts))
    return [h[: len(t.ids)] for h, t in zip(hidden, texts, strict=True)]


@torch.inference_mode()
def score(texts: Sequence[Text], scorer: NetworkScorer) -> list[dict[str, Tensor]]:
    """The columns of each text. Positions that nothing is learnt from are not scored: they keep no id, and a tail of 1."""
    hidden = score_batch(scorer.network, texts)
    if scorer.whole:
        return [scorer(h) for h in hidden]
    rows = [torch.tensor(list(t.supervised), dtype=torch.int64) for t in texts]
    found = scorer(torch.cat([h[r.to(h.device)] for h, r in zip(hidden, rows, strict=True)]))
    parts = {name: column.split([len(r) for r in rows]) for name, column in found.items()}
    whole = []
    for n, (text, r) in enumerate(zip(texts, rows, strict=True)):
        columns = {}
        for name, column in parts.items():
            piece = column[n]
            if len(piece) < len(text.ids):
                wide = torch.full((len(text.ids), *piece.shape[1:]), 1 if name == "tail" else 0, dtype=piece.dtype)
                wide[r] = piece
                piece = wide
            columns[name] = piece
        whole.append(columns)
    return whole


def score_texts(texts: Sequence[Text], scorer: Scorer, folder: Path, batch: int, per_shard: int, label: str, *, mark: str = "",
                here: Ranks | None = None, refused: Refused | None = None) -> None:  # fmt: skip
    """Score texts into shards; whole shards of an earlier attempt are kept. The processes of a launch share the shards out by number.

    A shard's rows are batched by length among themselves, so what it holds depends neither on where an attempt stopped nor on who makes it.
    A text that comes back ``Unscored`` stays in its shard with nothing to learn.

    Args:
        refused: takes note of such texts.

    Raises:
        DraftstillError: a shard that lies there already belongs to another recording, holds other texts, or is damaged; or too many texts
            were refused.
    """
    here = here or Ranks()
    groups = [(n, group) for n, group in enumerate(sharded(texts, per_shard)) if here.mine(n)]
    total = sum(len(t.ids) for _, group in groups for t in group)
    with Progress(label, total, "tokens", quiet=not here.main) as progress:
        done = 0
        for number, group in groups:
            path = folder / shard_name(number)
            size = sum(len(t.ids) for t in group)
            if path.exists():
                _refuse_foreign(path, group, mark)
            else:
                columns: list[dict[str, Tensor]] = [{}] * len(group)
                for rows in by_length(group, batch):
                    for i, piece in zip(rows, scorer.columns([group[i] for i in rows]), strict=True):
                        columns[i] = piece
                    progress.update(min(progress.done + sum(len(group[i].ids) for i in rows), done + size))
                unscored = {i: c for i, c in enumerate(columns) if isinstance(c, Unscored)}
                if refused is not None:
                    refused.settle(number, unscored)
                save_shard(path, without_laws(group, unscored), columns, scorer, mark)
            done += size
            progress.update(done)


def sharded(texts: Sequence[Text], per_shard: int) -> list[Sequence[Text]]:
    """The texts of each shard."""
    return [texts[at : at + per_shard] for at in range(0, len(texts), per_shard)]


def without_laws(texts: Sequence[Text], places: Collection[int]) -> list[Text]:
    """The texts with nothing to learn at these places."""
    return [replace(text, only=()) if place in places else text for place, text in enumerate(texts)]


def by_length(texts: Sequence[Text], batch: int) -> list[list[int]]:
    """Places of texts in batches of similar length."""
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i].ids), i))
    return [order[at : at + batch] for at in range(0, len(order), batch)]


def save_shard(path: Path, texts: Sequence[Text], columns: Sequence[dict[str, Tensor]], scorer: Scorer, mark: str) -> None:
    """Write scored texts as one shard."""
    whole = {name: torch.cat([c[name] for c in columns]) for name in columns[0]}
    write_shard(path, [t.ids for t in texts], [t.start for t in texts], whole, masks=[t.only for t in texts],
                kinds=[t.kind for t in texts], after=[t.after for t in texts], mark=mark, **scorer.bits)  # type: ignore[arg-type] # fmt: skip


def _refuse_foreign(path: Path, texts: Sequence[Text], mark: str) -> None:
    """A shard of an earlier attempt must be whole, of this recording, and of these very texts: those of a source may have changed since."""
    info = read_info(path, whole=True)
    if info.get("mark") != mark or info["offsets"].diff().tolist() != [len(t.ids) for t in texts]:
        raise DraftstillError(f"the shard {path.name} in {path.parent} belongs to another recording (another target, tokenizer or text)",
                              mend="delete that folder and record again")  # fmt: skip
    if info["digest"].tolist() != [digest(t.ids) for t in texts]:
        raise DraftstillError(f"the shard {path.name} in {path.parent} holds other texts than those that are recorded now",
                              mend="delete that folder and record again")  # fmt: skip
