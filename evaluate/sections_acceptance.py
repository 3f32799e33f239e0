"""The page's sections on acceptance: where it is lost, training, the per-token view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftstill.evaluate import charts
from draftstill.evaluate.markup import figure, folded, note, pair, section, table, text
from draftstill.evaluate.reading import Score, acceptance, arms_at, best_arm, held_out_figure, shown_candidate, speed
from draftstill.evaluate.sections_speed import series_keys
from draftstill.evaluate.wording import ARMS, bounded, measured_or_predicted, number, share

EXAMPLES, EXAMPLE_CHARS, PROMPT_CHARS = 8, 50_000, 2000
"""What is shown of the examples, in characters of markup (for the prompt: of text, which escapes can make eight times longer)."""
_MARKS = {"accepted": "a", "corrected": "c", "bonus": "b"}
_LEGEND = ('<ul class="legend"><li><span class="a">underlined</span> guessed by the draft and accepted</li>'
           '<li><span class="c">cross</span> the draft was wrong here; the target\'s own token</li>'
           '<li><span class="b">plus</span> all guesses passed; one more from the target</li><li>plain: no guess was made</li></ul>')  # fmt: skip
_GROUPS = (
    ("output", "By position in the output", "tokens"),
    ("token_kind", "By kind of token", "kind"),
    ("entropy_fifth", "By the target's entropy", "nats"),
    ("domain", "By domain", "domain"),
)


def by_position(score: Score) -> str:
    """Acceptance along the block: of the counts on all prompts where there are any, else of the timed rounds."""
    t = score["winner"]["temperature"]
    keys, series = series_keys(score), []
    for name, a in arms_at(score, t).items():
        if a["kind"] == "composite" and ":" in name:
            continue  # each candidate's own line says it
        metrics = (a.get("counts") or a)["metrics"]
        points = [(i, y) for i, y in enumerate(metrics.get("acceptance_at") or [], 1) if y is not None]
        if points:
            series.append(charts.Series(keys[name], ARMS[name], points))
    last = max((int(s.points[-1][0]) for s in series), default=0)
    return figure(f"By position in the block, temperature {t:g}", charts.lines(series, "position in the block", "acceptance", places=list(range(1, last + 1))),
                  "Share of guesses accepted at each position, given that all before it in the round were. Far positions rest on few rounds.")  # fmt: skip


def lost(score: Score) -> str:
    """The diagnosis of the shown candidate; those of the others fold away."""
    name = shown_candidate(score)
    every = score["diagnosis"]
    found = every.get(name or "")
    first = by_position(score)
    if not found or name is None:
        return section("Where acceptance is lost", pair(first))
    told = (
        f"{share(found['right'])} of the guesses that the target judged were accepted; alpha {number(found['alpha'], 3)}, KL {number(found['kl'], 3)} nats "
        f'on {found["tokens"]:,} tokens of {found["texts"]:,} texts, gamma {found["gamma"]}. "Of the loss": share of all lost acceptance.'
    )
    stopped = found["context"]["share"]
    if stopped:
        told += f" In {share(stopped)} of the rounds the draft's context was full and it guessed nothing."
    others = [folded(f"The same for {x}", _groups(d)) for x, d in every.items() if x != name]
    return section(f"Where acceptance is lost: {ARMS[name]}" if len(every) > 1 else "Where acceptance is lost", note(told), pair(first, *_tables(found)),
                   _worst(found), *others)  # fmt: skip


def _groups(found: Mapping[str, Any]) -> str:
    return pair(*_tables(found))


def _tables(found: Mapping[str, Any]) -> list[str]:
    made = []
    for key, title, first in _GROUPS:
        groups = found[key]
        if len(groups) < 2:
            continue  # one group says what the sum says
        rows = [(False, [text(g["name"]), charts.share_bar("tuned", g["right"]), *(text(x) for x in (
            share(g["right"]), number(g["alpha"], 3), share(g["lost"]), f"{g['tokens']:,}"))]) for g in groups]  # fmt: skip
        made.append(figure(title, table([first, "", "accepted", "alpha", "of the loss", "tokens"], rows, drawn=1, tight=True)))
    return made


def _worst(found: Mapping[str, Any]) -> str:
    out = []
    for w in found["worst"]:
        head = f"{w['prompt']}, {w['domain']}, tokens {w['from']} to {w['to']}: {w['rejected']} rejected, alpha {number(w['alpha'], 2)}"
        out.append(f'{note(head)}<div class="tokens" dir="auto">{marked(w["pieces"])}</div>')
    return folded("Passages with most rejections", _LEGEND, *out) if out else ""


def domains(score: Score) -> str:
    """The shown draft and the fastest arm on each text that was scored."""
    if len(score["domains"]) < 2:
        return ""
    t, rows = score["winner"]["temperature"], []
    wanted = list(dict.fromkeys(n for n in (shown_candidate(score), best_arm(score)) if n))
    for name, d in score["domains"].items():
        arms = {a["arm"]: a for a in (d["arms"] or score["arms"]) if a["temperature"] == t}
        for arm in wanted:
            if (a := arms.get(arm)) is not None:
                fast = measured_or_predicted(a) if speed(a) else "-"
                told = (name, ARMS[arm], a["swept"], bounded(*acceptance(a), share), number(a["alpha"], 3), fast, d["prompts"],
                        share(d["seen_in_training"]))  # fmt: skip
                rows.append((False, [text(x) for x in told]))
    head = ["text", "candidate", "gamma", "acceptance", "alpha", "speed-up", "prompts", "seen in training"]
    what = "Seen in training: share of the text's 13-word passages that training held."
    return section("Other texts", table(head, rows, tight=True), note(f"At temperature {t:g}, each at its fastest gamma there. {what}"))


_CURVES = (("tuned", "alpha_deploy"), ("untuned", "alpha"), ("composite", "top1"))


def training(score: Score) -> str:
    """alpha on held-out text while training; of several candidates the deployment's alpha of each."""
    curves = {n: c for n, c in score["training"]["curves"].items() if c}
    t = score["winner"]["temperature"]
    if not curves:
        return ""
    figure_, of_text = held_out_figure(score), held_out_figure(score).startswith("mean")
    if len(curves) > 1:
        keys = series_keys(score)
        series = [charts.Series(keys.get(n, "tuned"), n, _curve(c, "alpha_deploy") or _curve(c, "alpha")) for n, c in curves.items()]
    else:
        (curve,) = curves.values()
        labels = {"alpha_deploy": f"{figure_}, temperature {t:g}", "alpha": f"{figure_}, temperature 1",
                  "top1": "the written token is the draft's first" if of_text else "top-1 agreement"}  # fmt: skip
        series = [charts.Series(key, labels[f], _curve(curve, f)) for key, f in _CURVES]
    need = (arms_at(score, t).get(shown_candidate(score) or "") or {}).get("break_even")
    if figure_ != "alpha" or len(curves) > 1:
        need = None  # a bound below it may belong to an alpha above, and each draft has a break-even of its own
    rule = (need, f"break-even {need:.2f}") if need is not None else None
    told = "On target-written text that was not trained on." + (
        f" Below the dashed line speculation at temperature {t:g} loses." if rule else ""
    )
    chart = charts.lines([s for s in series if s.points], "training tokens", figure_, rule=rule)
    if figure_ != "alpha":
        told += " The recording does not hold the target's whole distribution there, so alpha itself is not known."
    title = figure_[0].upper() + figure_[1:]
    return figure("Held-out alpha while training" if figure_ == "alpha" else f"{title}, on held-out text while training", chart, told)


def _curve(points: Sequence[Mapping[str, Any]], figure_: str) -> list[charts.Point]:
    """At most about a hundred points: a long training would draw thousands of markers."""
    thin = [*points[: -1 : max(1, len(points) // 100)], *points[-1:]]
    return [(p["tokens"], p[figure_]) for p in thin if p.get(figure_) is not None]


def marked(pieces: Sequence[Mapping[str, Any]], room: int = EXAMPLE_CHARS) -> str:
    """Pieces with colour and mark, as many as the room (in characters of markup) holds."""
    spans: list[str] = []
    for piece in pieces:
        shown = text(piece["text"])
        if piece["kind"] in _MARKS:
            shown = f'<span class="{_MARKS[piece["kind"]]}">{shown}</span>'
        room -= len(shown)
        if room < 0:
            spans.append(f" <small>[{len(pieces) - len(spans)} more tokens not shown]</small>")
            break
        spans.append(shown)
    return "".join(spans)


def examples(score: Score) -> str:
    out = []
    for e in score["examples"][:EXAMPLES]:
        pieces = e["pieces"]
        kept = sum(p["kind"] == "accepted" for p in pieces) / max(1, len(pieces))
        prompt = e["prompt"] if len(e["prompt"]) <= PROMPT_CHARS else "…" + e["prompt"][-PROMPT_CHARS:]
        told = f"{ARMS[e['arm']]}, temperature {e['temperature']:g}: {share(kept)} of the pieces are accepted guesses."
        out.append(f'<h3>{text(e["prompt_id"])}</h3>{note(told)}<div class="tokens" dir="auto"><q>{text(prompt)}</q>{marked(pieces)}</div>')
    if not out:
        return ""
    return section("Token by token", _LEGEND, *out,
                   note("These excerpts are held-out corpus and model text. They stay in this file; publishing leaves them out."))  # fmt: skip
