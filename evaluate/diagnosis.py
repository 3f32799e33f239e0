"""Where acceptance is lost, from the rounds along target-written text and from both models' laws there. Pure Python: no torch.

A guess was *judged* if the target's verdict reached it: the accepted ones, and the first rejected one of each round. ``right`` is the
share of judged guesses that were accepted; ``lost`` the share of all lost acceptance, 1 - alpha summed over positions, that falls
on a group.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftstill.decode.theory import dispersion, histogram
from draftstill.decode.trace import Trace, ratio
from draftstill.evaluate.advice import Conditions, advise
from draftstill.evaluate.token_kinds import KINDS, token_kinds

_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Ends of the buckets of output position; what lies behind is one more."""
_QUANTILES = 5
_WINDOW, _WORST = 24, 5
"""Tokens of a passage, and how many passages are shown."""
SURE = 1.0
"""Nats of target entropy below which the target is called sure: a draft of enough capacity and training could know the answer."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text that the target wrote, with what a draft did along it; all columns have one entry per token."""

    prompt: str
    domain: str
    pieces: Sequence[str]
    trace: Trace
    alpha: Sequence[float]
    kl: Sequence[float]
    entropy: Sequence[float]
    outside: Sequence[float] = ()
    """The target's mass on ids that the draft cannot propose."""


@dataclass(frozen=True, slots=True)
class _Token:
    text: int
    place: int
    mark: str
    kind: str
    alpha: float
    kl: float
    entropy: float

    @property
    def judged(self) -> bool:
        return self.mark in ("accepted", "corrected")


def text_of(prompt: str, domain: str, pieces: Sequence[str], trace: Trace, law: Mapping[str, Any]) -> Text:
    """From what a score stores: the trace derived along a text, and the draft's teacher-forced figures there.

    Raises:
        ValueError: columns of different lengths: trace and law are not of one text.
    """
    made = Text(prompt, domain, pieces, trace, law["alpha"], law["kl"], law["entropy"], law.get("outside", ()))
    lengths = {len(made.pieces), len(trace.tokens), len(made.alpha), len(made.kl), len(made.entropy)}
    if len(lengths) != 1 or len(made.outside) not in (0, len(trace.tokens)):
        raise ValueError(f"{prompt}: {sorted(lengths)} values for {len(trace.tokens)} tokens")
    return made


def diagnose(texts: Sequence[Text], gamma: int, conditions: Conditions | None = None, others: Sequence[Text] = ()) -> dict[str, Any]:
    """Where guesses fail, and what to do about it.

    Args:
        texts: of one draft at one gamma and temperature.
        conditions: costs and speeds, without which there is no advice.
        others: the same of further domains. They stand in the table of domains only: what they lose says nothing of the text that the draft is
            for.

    Returns:
        JSON: tokens, rounds, alpha, kl, entropy, right; ``block``: by place in the block, conditional and unconditional; ``output`` (by
        place in the output), ``domain``, ``token_kind``, ``entropy_fifth``: groups with tokens, judged, right, alpha, kl, entropy,
        lost; ``sure``: the group of positions where the target's entropy is below ``SURE``; ``worst``: passages with most
        rejections; ``context``: rounds without a draft because its context was full; ``dispersion``: see ``theory.dispersion``;
        ``advice``: see ``advise``.

    Raises:
        ValueError: no texts, or texts without tokens.
    """
    tokens = _tokens(texts)
    if not tokens:
        raise ValueError("no tokens to diagnose")
    lost = sum(1 - t.alpha for t in tokens)
    rounds = [r for t in texts for r in t.trace.rounds]
    stopped = sum(t.trace.drafting_stopped for t in texts)
    outside = [x for t in texts for x in t.outside]
    whole = histogram((r.accepted for r in rounds if r.proposed == gamma), gamma)
    alpha = statistics.fmean(t.alpha for t in tokens)
    every = [*texts, *others]
    pooled = [*tokens, *_tokens(others, len(texts))]
    found: dict[str, Any] = {
        **_group(tokens, lost), "gamma": gamma, "texts": len(texts), "rounds": len(rounds), "outside": statistics.fmean(outside) if outside else None,
        "block": _block(texts), "output": _split(tokens, lost, lambda t: _bucket(t.place)),
        "domain": _split(pooled, sum(1 - t.alpha for t in pooled), lambda t: every[t.text].domain),
        "token_kind": _split(tokens, lost, lambda t: t.kind, KINDS),
        "entropy_fifth": _fifths(tokens, lost), "sure": _group([t for t in tokens if t.entropy < SURE], lost), "worst": _worst(texts, tokens),
        "context": {"rounds": stopped, "share": ratio(stopped, len(rounds))},
        "dispersion": dispersion(whole, alpha).to_json() if sum(whole) else None,
    }  # fmt: skip
    return {**found, "advice": [] if conditions is None else advise(found, conditions)}


def _tokens(texts: Sequence[Text], first: int = 0) -> list[_Token]:
    return [_Token(n, place, mark, kind, t.alpha[place], t.kl[place], t.entropy[place])
            for n, t in enumerate(texts, first)
            for place, (mark, kind) in enumerate(zip(t.trace.marks(), token_kinds(t.pieces), strict=True))]  # fmt: skip


def _group(tokens: Sequence[_Token], lost: float) -> dict[str, Any]:
    judged = [t for t in tokens if t.judged]
    mean = lambda name: statistics.fmean(getattr(t, name) for t in tokens) if tokens else None  # noqa: E731
    return {
        "tokens": len(tokens), "judged": len(judged), "right": ratio(sum(t.mark == "accepted" for t in judged), len(judged)),
        "alpha": mean("alpha"), "kl": mean("kl"), "entropy": mean("entropy"), "lost": ratio(sum(1 - t.alpha for t in tokens), lost),
    }  # fmt: skip


def _split(tokens: Sequence[_Token], lost: float, key: Callable[[_Token], Any], order: Iterable[Any] | None = None) -> list[dict[str, Any]]:
    groups: dict[Any, list[_Token]] = {name: [] for name in order or ()}
    for t in tokens:
        groups.setdefault(key(t), []).append(t)
    return [{"name": name, **_group(group, lost)} for name, group in groups.items() if group]


def _bucket(place: int) -> str:
    low = 0
    for high in _BUCKETS:
        if place < high:
            return f"{low}-{high - 1}"
        low = high
    return f"{low}-"


def _fifths(tokens: Sequence[_Token], lost: float) -> list[dict[str, Any]]:
    """Equally many positions each, from those where the target is surest on."""
    ranked = sorted(tokens, key=lambda t: (t.entropy, t.text, t.place))
    cuts = [len(ranked) * i // _QUANTILES for i in range(_QUANTILES + 1)]
    groups = [ranked[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    return [
        {"name": f"{g[0].entropy:.2f}-{g[-1].entropy:.2f}", "from": g[0].entropy, "to": g[-1].entropy, **_group(g, lost)} for g in groups
    ]


def _block(texts: Sequence[Text]) -> list[dict[str, Any]]:
    rounds = [r for t in texts for r in t.trace.rounds]
    out = []
    for i in range(1, 1 + max((r.proposed for r in rounds), default=0)):
        proposed, accepted = sum(r.proposed >= i for r in rounds), sum(r.accepted >= i for r in rounds)
        reached = sum(r.proposed >= i and r.accepted >= i - 1 for r in rounds)
        out.append({"i": i, "proposed": proposed, "reached": reached, "accepted": accepted, "conditional": ratio(accepted, reached),
                    "unconditional": ratio(accepted, proposed)})  # fmt: skip
    return out


def _worst(texts: Sequence[Text], tokens: Sequence[_Token]) -> list[dict[str, Any]]:
    """Passages with most rejections; of equals the one with the lower alpha. No two overlap."""
    by_text: dict[int, list[_Token]] = {}
    for t in tokens:
        by_text.setdefault(t.text, []).append(t)
    windows = []
    for n, own in by_text.items():
        for start in range(0, max(1, len(own) - _WINDOW + 1)):
            passage = own[start : start + _WINDOW]
            rejected = sum(t.mark == "corrected" for t in passage)
            windows.append((-rejected, statistics.fmean(t.alpha for t in passage), n, start))
    taken: list[dict[str, Any]] = []
    for minus, alpha, n, start in sorted(windows):
        if len(taken) == _WORST or not minus:
            break
        if all(w["text_number"] != n or abs(w["from"] - start) >= _WINDOW for w in taken):
            to = min(start + _WINDOW, len(by_text[n]))
            pieces = [{"text": texts[n].pieces[t.place], "kind": t.mark, "alpha": round(t.alpha, 4)} for t in by_text[n][start:to]]
            taken.append({"text_number": n, "prompt": texts[n].prompt, "domain": texts[n].domain, "from": start, "to": to, "rejected": -minus,
                          "alpha": alpha, "pieces": pieces})  # fmt: skip
    for w in taken:
        del w["text_number"]
    return taken
