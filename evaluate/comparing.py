"""This score against an earlier one: ``draftstill evaluate RECIPE --compare OLD.json``. Torch-free.

A difference counts only where the interval of the change excludes none. That interval is made of the two scores' own intervals (MOVER:
Zou and Donner 2008, Statistics in Medicine 27, equation 7), on the logarithm for a speed-up, and is widened to hold for all figures that are
compared at once (Bonferroni, by t quantiles of the prompts that each was made from): a gate that looks at fifty figures must not fail by chance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

from draftstill.errors import DraftstillError
from draftstill.evaluate.reading import OWN, Score, as_read, has_interval
from draftstill.evaluate.wording import ARMS, BUSY_CORES, bounded, losslessness, share, times

Interval = Mapping[str, Any]
_UNTIMED = frozenset({"draftstill", "python"})
"""Versions that may differ where speeds are compared: the first is what a regression test is about."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A condition that is not the same."""

    what: str
    old: str
    new: str
    bars: Literal["nothing", "speed", "everything"]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both scores."""

    figure: Literal["acceptance", "speed-up", "speed-up under load"]
    domain: str
    temperature: float
    arm: str
    gamma: int
    """Under load: requests at once."""
    old: Interval
    new: Interval
    change: Interval
    """New over old for a speed-up, new minus old for acceptance."""
    reading: Literal["better", "worse", "no clear difference"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What became of an earlier score."""

    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    """Arms, gammas and texts of the old score that the new one has not."""
    broken: bool
    """The audit passed before and fails now."""

    @property
    def barred(self) -> list[str]:
        """Conditions for which speed is not compared."""
        return [d.what for d in self.differences if d.bars != "nothing"]

    @property
    def regressed(self) -> list[str]:
        """A sentence for each regression; empty: none."""
        said = [
            f"{c.figure} of {subject(c)} fell from {shown(c, c.old)} to {shown(c, c.new)}" for c in self.changes if c.reading == "worse"
        ]
        return [*(["the output was audited as lossless and is not any more"] if self.broken else []), *said]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "barred": self.barred, "regressed": self.regressed}


def compare(new: Score, old: Score) -> Comparison:
    """Compare two scores figure by figure.

    Raises:
        DraftstillError: they are of different targets, so that no figure of one means anything for the other.
    """
    new, old = as_read(new), as_read(old)
    mine, theirs = ([s["target"][k] for k in ("name", "parameters", "vocab_size")] for s in (new, old))
    if mine != theirs:
        raise DraftstillError("the old score is of another target", key="--compare", value=f"{theirs[0]}, {theirs[1]:,} parameters",
                              mend=f"give an earlier score of {mine[0]}")  # fmt: skip
    differences = tuple(_differences(new, old))
    bars = {d.bars for d in differences}
    before, now = (dict(_figures(s, _counted(new) and _counted(old))) for s in (old, new))
    barred = lambda key: "everything" in bars or (key[0] != "acceptance" and "speed" in bars)  # noqa: E731
    apart = {f"stock:{name}" for name, was, is_ in _stock(old, new) if was != is_}
    both = [key for key in before if key in now and not barred(key) and key[3] not in apart]
    sure = min(old["conditions"]["confidence"], new["conditions"]["confidence"])
    changes = tuple(_change(key, before[key], now[key], sure, len(both)) for key in both)
    names = {key_name(key): None for key in before if key not in now and key[0] != "speed-up under load"}
    broken = losslessness(old)[0] is True and losslessness(new)[0] is False
    return Comparison(differences, changes, tuple(names), broken)


def _differences(new: Score, old: Score) -> Iterator[Difference]:
    a, b = old["conditions"], new["conditions"]
    whole = _counted(new) and _counted(old)  # then acceptance is that of whole texts; lookup finds the more, the longer a text
    pairs: list[tuple[str, Any, Any, Literal["nothing", "speed", "everything"]]] = [
        *((what, a.get(key), b.get(key), "everything") for what, key in (("test documents", "test_sha256"), ("prompts", "prompts_sha256"))
          if None not in (a.get(key), b.get(key))),
        *((f"prompts of {name}", was, is_, "everything") for name, was, is_ in _texts_apart(old, new)),
        ("sampler", [a["top_k"], a["top_p"]], [b["top_k"], b["top_p"]], "everything"),
        *((f"machine: {k}", a["machine"].get(k), b["machine"].get(k), "speed") for k in ("cpu", "cores", "memory_gib", "cpu_flags", "omp_wait_policy")),
        *((k, a[k], b[k], "speed") for k in ("accelerator",) if k in a and k in b),  # an older score does not know it
        *((k, a.get(k), b.get(k), "speed") for k in ("device", "dtype", "threads", "backend", "packed", "fallback", "rows")),
        *((f"version of {k}", a["versions"].get(k), b["versions"].get(k), "nothing" if k in _UNTIMED else "speed")
          for k in dict.fromkeys([*a["versions"], *b["versions"]])),
        ("text", _text(old), _text(new), "speed"),
        ("timed prompts", _prompts(old), _prompts(new), "speed"),
        ("tokens of a text", a["max_new_tokens"], b["max_new_tokens"], "everything" if whole else "speed"),
        ("tokens of a timed text", a.get("timing_tokens", a["max_new_tokens"]), b.get("timing_tokens", b["max_new_tokens"]),
         "speed" if whole else "everything"),
        ("seed", a["seed"], b["seed"], "speed"),
        *((f"stock draft {name}", was, is_, "nothing") for name, was, is_ in _stock(old, new)),
        ("commit", (a.get("git") or {}).get("commit"), (b.get("git") or {}).get("commit"), "nothing"),
    ]  # fmt: skip
    for what, was, is_, bars in pairs:
        if was != is_ and not (what.startswith("version") and None in (was, is_)):  # a list of versions may have grown
            yield Difference(what, _say(was), _say(is_), bars)
    for which, c in (("old", a), ("new", b)):
        if (c.get("other_cores") or 0.0) > BUSY_CORES:
            told = f"{c['other_cores']:.2f} cores"
            yield Difference(
                f"other processes during the {which} score", told if which == "old" else "-", told if which == "new" else "-", "speed"
            )


def _stock(old: Score, new: Score) -> Iterator[tuple[str, Any, Any]]:
    """Stock drafts of both scores by name, each with what it was and is. Of one that is another model now no figure is compared."""
    for name, was in old.get("stock", {}).items():
        if is_ := new.get("stock", {}).get(name):
            yield name, *({k: d[k] for k in ("name", "parameters", "revision", "content", "sha256")} for d in (was, is_))


def _texts_apart(old: Score, new: Score) -> Iterator[tuple[str, Any, Any]]:
    """Further texts of both scores, each with the hashes of its prompts where both know them."""
    for name, d in old["domains"].items():
        pair = (d.get("prompts_sha256"), new["domains"].get(name, {}).get("prompts_sha256"))
        if None not in pair and name != OWN:
            yield name, *pair


def _text(score: Score) -> list[Any]:
    return [score["corpus"]["source"], score["corpus"]["documents"]["test"]]


def _prompts(score: Score) -> list[str]:
    """Names of the timed prompts, which say document and place."""
    plain = next((a for a in score["arms"] if a["arm"] == "plain"), None)
    return sorted(p["prompt"] for p in plain["per_prompt"]) if plain else []


def _say(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)}: {', '.join(map(str, value[:3]))}, ..." if len(value) > 4 else ", ".join(map(str, value))
    return "-" if value is None else str(value)


Key = tuple[Any, ...]
"""(figure, domain, temperature, arm, gamma)."""


def _counted(score: Score) -> bool:
    return any(r.get("counts") for r in score["sweep"])


def _figures(score: Score, counted: bool) -> Iterator[tuple[Key, Interval]]:
    """Everything with an interval. Acceptance on whole texts of all prompts where both scores have it, else that of the timed ones."""
    for r in score["sweep"]:
        if r["arm"] == "plain":
            continue
        place = (r["domain"], r["temperature"], r["arm"], r["swept"])
        accepted = (r.get("counts") or {}).get("acceptance") if counted else r["acceptance"]
        for figure, interval in (("acceptance", accepted), ("speed-up", r["speedup"])):
            if interval:
                yield (figure, *place), interval
    load = score.get("load") or {"batches": ()}
    for b in load["batches"]:
        for name, arm in b["arms"].items():
            if arm["ratio"]:
                yield (
                    ("speed-up under load", OWN, load["temperature"], load[name]["arm"] if name == "fixed" else name, b["rows"]),
                    arm["ratio"],
                )


def _change(key: Key, old: Interval, new: Interval, confidence: float, compared: int) -> Change:
    figure, domain, temperature, arm, gamma = key
    f, back = (math.log, math.exp) if figure != "acceptance" else (float, float)
    difference = f(new["estimate"]) - f(old["estimate"])
    known = all(_bounded(x) and (figure == "acceptance" or x["low"] > 0) for x in (old, new))
    low = high = difference
    if known:
        n, o = (_wider(x, confidence, compared) for x in (new, old))
        low -= math.hypot(n * (f(new["estimate"]) - f(new["low"])), o * (f(old["high"]) - f(old["estimate"])))
        high += math.hypot(n * (f(new["high"]) - f(new["estimate"])), o * (f(old["estimate"]) - f(old["low"])))
    reading: Literal["better", "worse", "no clear difference"] = "no clear difference"
    if known and low > 0:
        reading = "better"
    elif known and high < 0:
        reading = "worse"
    bound = lambda x: back(max(-50.0, min(50.0, x)))  # noqa: E731 - two prompts give intervals that overflow
    change = {"estimate": bound(difference), "low": bound(low), "high": bound(high),
              "method": f"MOVER, {compared} figures at once" if known else "none: one of the two has no interval"}  # fmt: skip
    return Change(figure, domain, temperature, arm, gamma, old, new, change, reading)


def _wider(interval: Interval, confidence: float, compared: int) -> float:
    """By how much an interval widens to hold for all figures at once. Quantiles of t go apart the faster, the fewer the prompts: of five
    prompts and twenty figures by a factor of 2.4, where the normal law has 1.5."""
    prompts = interval.get("prompts") or next((int(n) for n in re.findall(r"(\d+) prompts", interval["method"])), None)
    tail, single = 1 - (1 - confidence) / compared / 2, (1 + confidence) / 2
    if prompts is None or prompts < 2:
        normal = NormalDist()
        return normal.inv_cdf(tail) / normal.inv_cdf(single)
    from scipy.special import stdtrit

    return float(stdtrit(prompts - 1, tail) / stdtrit(prompts - 1, single))


def _bounded(interval: Interval) -> bool:
    """Where all prompts agree the figure is known without an interval: that is how a draft that nothing is accepted of looks."""
    return has_interval(interval) or interval["method"] == "none: all prompts have the same ratio"


def key_name(key: Key) -> str:
    _, domain, temperature, arm, gamma = key
    where = "" if domain == OWN else f", text {domain}"
    return f"{ARMS[arm]} at gamma {gamma}, temperature {temperature:g}{where}"


def subject(c: Change) -> str:
    if c.figure == "speed-up under load":
        return f"{ARMS[c.arm]} at {c.gamma} requests at once, temperature {c.temperature:g}"
    return key_name((c.figure, c.domain, c.temperature, c.arm, c.gamma))


def shown(c: Change, interval: Interval) -> str:
    return bounded(interval, None, share if c.figure == "acceptance" else times)
