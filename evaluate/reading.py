"""A score as its reports read it: one shape for every schema, and the questions that they ask of it. Pure Python: no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError

Score = Mapping[str, Any]
Row = Mapping[str, Any]
KINDS = ("plain", "stock", "untuned", "tuned", "lookup", "bigram", "composite")
OWN = "own"
"""Name of the run's own text among the domains."""
SCHEMAS = (1, 2)


def load_score(path: Path, key: str) -> Score:
    """Read a score.json.

    Raises:
        DraftstillError: it is missing, no JSON, or no score of a schema known here; ``key`` names the option or recipe key.
    """
    mend = "give the score.json of an earlier score"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DraftstillError(f"cannot be read: {error.strerror}", key=key, value=str(path), mend=mend) from None
    except ValueError as error:
        raise DraftstillError(f"is not JSON: {error}", key=key, value=str(path), mend=mend) from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema not in SCHEMAS:
        raise DraftstillError(f"has the schema {schema!r}, not {' or '.join(map(str, SCHEMAS))}", key=key, value=str(path), mend=mend)
    missing = [k for k in ("target", "conditions", "arms", "winner") if k not in found]
    if missing:
        raise DraftstillError(f"is no score: it has no {', '.join(missing)}", key=key, value=str(path), mend=mend)
    return as_read(found)


def as_read(score: Score) -> Score:
    """The score in the shape of schema 2; what an older one did not measure is None or empty there."""
    if score.get("schema", 1) >= 2:
        return score
    gamma = score["conditions"]["gamma"]
    arms = [{"domain": OWN, "kind": a["arm"], "candidate": "tuned" if a["arm"] in ("tuned", "composite") else None, "counts": None,
             "swept": gamma if a["arm"] == "composite" else a["gamma"], **a} for a in score["arms"]]  # fmt: skip
    winner, at = score["winner"], score["winner"]["temperature"]
    mine = [a for a in arms if a["temperature"] == at and a["arm"] != "plain"]
    fastest = max((a for a in mine if a["speedup"]), key=lambda a: a["speedup"]["estimate"], default=None)
    own = next((a for a in mine if a["arm"] == winner["arm"]), None)
    return {
        **score,
        "schema": 2,
        "arms": arms,
        "sweep": [{k: v for k, v in a.items() if k != "per_prompt"} for a in arms],
        "drafts": {"tuned": score["draft"]},
        "training": {"curves": {"tuned": score["training"]["curve"]}, **score["training"]},
        "winner": {"gamma": own["swept"] if own else None, "candidate": own["candidate"] if own else None, "to_settle": None,
                   "rivals": [] if winner["arm"] is None else _rivals(score), "prompts": score["conditions"]["prompts"],
                   "fastest": None if fastest is None else {"arm": fastest["arm"], "gamma": fastest["swept"], "speedup": fastest["speedup"]}, **winner},
        "publish": "tuned" if any(a["arm"] == "tuned" for a in arms) else None,
        "domains": {}, "diagnosis": {}, "costs": score.get("costs"),
    }  # fmt: skip


def _rivals(score: Score) -> list[dict[str, Any]]:
    """Arms that schema 1's pairwise comparisons do not tell from the winner; plain decoding is no rival."""
    winner, found = score["winner"], []
    for c in score["comparisons"]:
        pair = (c["a"], c["b"])
        if c["temperature"] != winner["temperature"] or winner["arm"] not in pair or "plain" in pair or told_apart(c["ratio"]):
            continue
        r, turned = c["ratio"], c["b"] == winner["arm"]
        ratio = {"estimate": 1 / r["estimate"], "low": 1 / r["high"], "high": 1 / r["low"], "method": r["method"]} if turned else r
        found.append({"arm": c["a"] if turned else c["b"], "gamma": None, "ratio": ratio, "to_settle": None})
    return found


def has_interval(interval: Mapping[str, Any] | None) -> bool:
    return bool(interval) and not str(interval.get("method", "")).startswith("none")  # type: ignore[union-attr]


def told_apart(ratio: Mapping[str, Any]) -> bool:
    """Whether the interval of a ratio excludes 1."""
    return has_interval(ratio) and not ratio["low"] <= 1.0 <= ratio["high"]


def temperatures(score: Score) -> list[float]:
    """Scored temperatures, the deployment's first."""
    deployed = score["winner"]["temperature"]
    return sorted({a["temperature"] for a in score["arms"]}, key=lambda t: (t != deployed, t))


def arms_at(score: Score, temperature: float) -> dict[str, Row]:
    """Arms on the run's own text by name at one temperature, kind by kind in the order of ``KINDS``."""
    found = {a["arm"]: a for a in score["arms"] if a["temperature"] == temperature}
    return {name: found[name] for name in sorted(found, key=lambda name: KINDS.index(found[name].get("kind", name)))}


def speed(row: Row) -> dict[str, Any] | None:
    """The measured speed-up, else the one that the counts predict."""
    return row["speedup"] or (row.get("counts") or {}).get("predicted")


def ranked(score: Score, temperature: float) -> list[str]:
    """Arms by speed, the fastest first; plain decoding counts as 1, what has no figure comes last."""
    arms = arms_at(score, temperature)
    fast = lambda name: 1.0 if name == "plain" else (speed(arms[name]) or {"estimate": 0.0})["estimate"]  # noqa: E731
    return sorted(arms, key=lambda name: -fast(name))


def best_arm(score: Score) -> str | None:
    """The winner, else the fastest arm at the deployment's temperature, whether it gains anything or not."""
    t = score["winner"]["temperature"]
    return score["winner"]["arm"] or next((n for n in ranked(score, t) if n != "plain" and speed(arms_at(score, t)[n])), None)


def shown_candidate(score: Score) -> str | None:
    """The trained candidate that the page speaks of: the published one, else the first."""
    return score.get("publish") or next(iter(score["drafts"]), None)


def untrained(score: Score, candidate: str, temperature: float) -> Row | None:
    """The arm of a candidate's draft before training. Drafts that start alike share one, which has the name of one of them."""
    arms = arms_at(score, temperature)
    shape = lambda name: [score["drafts"].get(name, {}).get(k) for k in ("name", "layers", "head_tokens")]  # noqa: E731
    for name, row in arms.items():
        kind, _, owner = name.partition(":")
        if kind == "untuned" and (not owner or owner == candidate or shape(owner) == shape(candidate)):
            return row
    return None


def swept(score: Score, arm: str, temperature: float, domain: str = OWN) -> list[Row]:
    """An arm's rows at each gamma that was tried, ascending."""
    rows = [r for r in score["sweep"] if (r["arm"], r["temperature"], r["domain"]) == (arm, temperature, domain)]
    return sorted(rows, key=lambda r: r["swept"])


def acceptance(row: Row) -> tuple[dict[str, Any] | None, float | None]:
    """Token acceptance: its interval and its value; of whole texts of all prompts where those were counted, else of the timed ones."""
    counts = row.get("counts")
    if counts:
        return counts["acceptance"], counts["metrics"].get("token_acceptance")
    return row["acceptance"], row["metrics"].get("token_acceptance")


def partial_of(score: Score) -> tuple[int, int] | None:
    """(timed, of) prompts, in a score that is not finished."""
    partial = score.get("partial")
    return (partial["timed"], partial["of"]) if partial else None


def held_out_figure(score: Score) -> str:
    """What the training's curve shows of the held-out text: alpha where the target's whole law was recorded there, else what is known of it."""
    mode = (score["corpus"].get("recording") or {}).get("heldout_mode")
    return {"topk": "alpha, at least", "text": "mean probability of the written token"}.get(str(mode), "alpha")


def tau(row: Row) -> float | None:
    """Tokens per round; of whole texts of all prompts where those were counted, else of the timed ones, as ``acceptance``."""
    counts = row.get("counts")
    found = counts["metrics"].get("tau") if counts else row["metrics"].get("tau")
    return None if found is None else float(found)


def plain_speed(score: Score, row: Row) -> float | None:
    """Plain decoding's tokens per second in the minutes of this row's own timings: what its speed-up was paired with."""
    own = [p for p in row.get("per_prompt") or () if p.get("plain_seconds")]
    if own:
        return float(sum(p["emitted"] for p in own) / sum(p["plain_seconds"] for p in own))
    plain = arms_at(score, row["temperature"]).get("plain")
    return None if plain is None else plain["tokens_per_s"]
