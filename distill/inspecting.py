"""What ``draftstill recording inspect`` prints. Everything fits 80 columns."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch

from draftstill.distill.recording import Recording, manifests
from draftstill.distill.shards import digest
from draftstill.errors import DraftstillError
from draftstill.sources import ModelSource, load_tokenizer

_SAMPLES = 2
_WIDTH = 80
_BINS = 100_000
"""Of the tail mass, for its percentile: a tenth of the last digit that is shown."""


def inspect(path: str | Path) -> str:
    """Sizes, tail mass, what alpha can be known to, and samples; every checksum and token hash is verified.

    Args:
        path: a recording, a folder that holds some, or an fsspec address.
    """
    return "\n\n".join(describe(Recording(folder)) for folder in manifests(path))


def describe(recording: Recording) -> str:
    """One recording."""
    m = recording.manifest
    _check_tokens(recording)
    rows = [
        ("mode", _mode(m)),
        ("target", f"{m['target']['name']} ({m['dtype']}), {m['vocab']:,} real tokens"),
        ("content", f"{m['sequences']:,} sequences, {m['positions']:,} positions in {len(m['shards'])} shards"),
    ]
    if kinds := m.get("kinds"):
        parts = (f"{v['supervised']:,} of {v['tokens']:,} positions of {k}s" for k, v in kinds.items())
        rows.append(("learnt from", ", ".join(parts)))
    if refused := m.get("refused"):
        rows.append(("refused", f"{refused:,} sequences, by the server: they hold no laws, and nothing is learnt from them"))
    rows.append(("size", f"{m['bytes'] / 2**20:,.1f} MiB, {m['bytes'] / max(1, m['positions']):,.0f} bytes per position"))
    rows.append(("checksums", "all right, token hashes too"))
    if auto := m.get("auto"):
        rows.append(
            ("auto", f"took {auto['mode']}: mean tail of the pilot {auto['mean_tail']:.4f}, record.auto_tail {auto['auto_tail']:g}")
        )
    if m["mode"] == "topk":
        rows += _tails(recording)
    rows += _samples(recording)
    return "\n".join([str(recording.folder), *(_row(*row) for row in rows)])


def _mode(m: dict[str, Any]) -> str:
    if m["mode"] == "hidden":
        bits = m.get("hidden_bits")
        return "hidden, " + (f"{bits} bits" if bits else f"in {m['dtype']}")
    if m["mode"] == "text":
        return "text: what the target wrote, no laws"
    if m["mode"] == "live":
        return "live: texts alone, no laws; the target scores them while the draft trains"
    until = "" if m["kept_mass"] >= 1 else f" (fewer once they hold {m['kept_mass']:g})"
    server = m.get("server")
    where = f", from a {server['kind']} server ({server['version'] or 'version unknown'})" if server else ""
    return f"topk, K = {m['top_k']}{until}, temperature {m['temperature']}, {m['logp_bits']}-bit log-probabilities{where}"


def _tails(recording: Recording) -> list[tuple[str, str]]:
    """Tail mass over the recorded laws, and the width it leaves to alpha. Shard by shard: a recording may be larger than the memory."""
    laws, kept, mass, largest = 0, 0, 0.0, 0.0
    by_mass = torch.zeros(_BINS + 1, dtype=torch.int64)
    for shard in range(recording.shards):
        columns = recording.columns(shard)
        known = columns["count"] > 0
        if not known.any():
            continue
        tails = columns["tail"][known].double()
        laws, kept, mass = laws + len(tails), kept + int(columns["count"][known].sum()), mass + float(tails.sum())
        largest = max(largest, float(tails.max()))
        by_mass += torch.bincount((tails * _BINS).round().long().clamp(0, _BINS), minlength=_BINS + 1)
    if not laws:
        return []
    ninth = int(torch.searchsorted(by_mass.cumsum(0), max(1, round(0.9 * laws)))) / _BINS
    rounding = recording.manifest["rounding"]
    return [
        ("kept ids", f"mean {kept / laws:.1f} a position, {recording.manifest['top_k']} at most"),
        ("tail mass", f"mean {mass / laws:.4f}, 90th percentile {ninth:.4f}, largest {largest:.4f}"),
        ("alpha", f"known to within {mass / laws:.4f} on average whatever the draft: sum over kept ids <= alpha <= that + the smaller of both tails; "
                  f"rounding shifts a position's bounds by {rounding:.4f} at most"),
    ]  # fmt: skip


def _samples(recording: Recording) -> list[tuple[str, str]]:
    """A few texts with what the target expected at their end, where its tokenizer can be found on this machine."""
    target = recording.manifest["target"]
    if not len(recording) or not Path(str(target.get("path_or_id", ""))).is_dir():
        return []
    try:
        tokenizer = load_tokenizer(ModelSource(**target))
    except (DraftstillError, TypeError):
        return []
    rows = []
    for index in dict.fromkeys((0, len(recording) // 2)):
        item = recording[index]
        at = int(item.rows[len(item.rows) // 2]) if len(item.rows) else 0
        text = " ".join(tokenizer.decode(item.tokens[: at + 1].tolist()).split())[-150:]
        expected = ""
        if item.ids is not None and item.p is not None:
            best = [(i, p) for i, p in zip(item.ids[at, :3].tolist(), item.p[at, :3].tolist(), strict=True) if i >= 0]
            expected = "  -> " + ", ".join(f"{tokenizer.decode([i]).strip()!r} {p:.2f}" for i, p in best)
        rows.append((f"{recording.kind(index)} {index}", f"... {text}{expected}"))
    return rows[:_SAMPLES]


def _check_tokens(recording: Recording) -> None:
    """Raises DraftstillError: a sequence's ids are not those whose hash was written."""
    for shard in range(recording.shards):
        columns = recording.columns(shard)
        parts = columns["tokens"].split(columns["offsets"].diff().tolist())
        for row, (tokens, known) in enumerate(zip(parts, columns["digest"].tolist(), strict=True)):
            if digest(tokens.numpy()) != known:
                name = recording.manifest["shards"][shard]["file"]
                raise DraftstillError(
                    f"sequence {row} of the shard {name} does not hold the tokens it was written with", mend="record again"
                )


def _row(name: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=f"  {name:<12}", subsequent_indent=" " * 14, break_on_hyphens=False)
