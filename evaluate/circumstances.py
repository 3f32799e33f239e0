"""What a score's figures hold for, in words. Pure Python: no torch."""

from __future__ import annotations

from typing import Any

from draftstill.evaluate.reading import Score, as_read
from draftstill.evaluate.wording import losslessness, share


def conditions(score: Score) -> list[tuple[str, str]]:
    """What the figures hold for, as label and text."""
    score = as_read(score)
    c, t, k = score["conditions"], score["target"], score["corpus"]
    m, git = c["machine"], c.get("git")
    docs, several = k["documents"], len(score["drafts"]) > 1
    found = [("target", f"{t['name']}, {t['parameters']:,} parameters, {t['layers']} layers, {t['dtype']}")]
    for name, d in score["drafts"].items():
        found.append((f"draft {name}" if several else "draft", _draft(d)))
    found += [(f"stock draft {name}", f"{d['name']}, {d['parameters']:,} parameters{', revision ' + d['revision'] if d['revision'] else ''}")
              for name, d in score.get("stock", {}).items()]  # fmt: skip
    found += [
        ("corpus", f"{k['source']}: {docs['train']:,} documents to train, {docs['validation']:,} to validate, {docs['test']:,} for this score; "
         f"{k['recorded_tokens']:,} tokens to learn from"),
        ("prompts", prompts(score)),
        ("sampler", f"temperatures {', '.join(f'{x:g}' for x in c['temperatures'])}, top_k {c['top_k']}, top_p {c['top_p']:g}, seed {c['seed']}"),
        ("machine", f"{m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}, flags {' '.join(m['cpu_flags']) or 'none'}"),
        ("running", f"{ran_on(c)}, {c['dtype']}, {how_run(c)}, {c['threads']} threads, OMP_WAIT_POLICY {m['omp_wait_policy']}, "
         f"{c['other_cores']:.2f} cores taken by other processes"),
        *([("warm-up", f"{c['warm_up_s']:.1f} s of first rounds, captures and compilation, in no timing")] if c.get("warm_up_s") is not None else []),
        ("versions", ", ".join(f"{n} {v}" for n, v in c["versions"].items())),
        ("source", f"commit {git['commit']}{' with changes' if git['dirty'] else ''}" if git else "not a git checkout"),
        ("command", c["command"]),
        ("date", c["date"]),
    ]  # fmt: skip
    return found


def _draft(d: dict[str, Any]) -> str:
    return (
        f"{d['name']}, {d['parameters']:,} parameters"
        + (f", layers {', '.join(map(str, d['layers']))}" if d["layers"] else "")
        + (f", drafts from the {d['head_tokens']:,} most frequent ids" if d["head_tokens"] else "")
        + f"; trained on {d['trained_tokens']:,} tokens in {d['train_seconds']:,.0f} s, loss {d['loss']}"
    )


def prompts(score: Score) -> str:
    """How many texts were counted and how many timed, and how long they are."""
    c = score["conditions"]
    count, length = c.get("timed_prompts", c["prompts"]), c.get("timing_tokens", c["max_new_tokens"])
    timed = f"{count} timed, {length} new tokens each, end of text ignored so that all arms do the same work"
    if c.get("past_eos") is not None:
        timed += f" ({share(c['past_eos'])} of plain decoding's tokens stand behind one)"
    whole = any(a.get("counts") for a in score["arms"])
    counted = f"; acceptance counted on whole texts of up to {c['max_new_tokens']} tokens" if whole else ""
    return f"{c['prompts']} held-out{counted}; {timed}"


def ran_on(conditions: dict[str, Any]) -> str:
    """The device, with the GPU's name where the score knows it."""
    named = conditions.get("accelerator")
    return conditions["device"] + (f" ({named})" if named else "")


def how_run(conditions: dict[str, Any]) -> str:
    """The rounds' backend, with the reason where it is not what was asked for."""
    reason = f" (fell back: {conditions['fallback']})" if conditions.get("fallback") else ""
    laid = conditions.get("packed")  # None on a device, where there is nothing to lay out
    weights = "" if laid is None else ", weights laid out for the CPU's kernels" if laid else ", weights as loaded"
    return f"{conditions['backend']} rounds{reason}{weights}, batch {conditions['rows']}"


def audit_line(score: Score) -> str:
    """``Passed``, ``**FAILED**`` or ``Not audited``, and what was found."""
    passed, found = losslessness(score)
    return f"{'Not audited' if passed is None else 'Passed' if passed else '**FAILED**'}: {found}"
