"""The audit by itself: ``draftstill evaluate RECIPE --audit``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftstill.corpus import prepare_corpus, stored_documents
from draftstill.decode import load_target
from draftstill.errors import DraftstillError
from draftstill.evaluate.audit import audit, failures
from draftstill.evaluate.domains import held_out
from draftstill.progress import say
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, write_json
from draftstill.train import train_all


def audit_run(recipe: Recipe, run: RunFolder) -> list[str]:
    """Audit the run's drafts thoroughly, print what was found and write it to ``audit.json`` in the run folder; returns the failures.

    Raises:
        DraftstillError: the recipe audits no prompts, or there are none.
    """
    if not recipe.evaluate.audit_prompts:
        raise DraftstillError("the recipe audits no prompts", key="evaluate.audit_prompts", value=0, mend="give a number, for example 4")
    folders = train_all(recipe, run)
    documents = stored_documents(prepare_corpus(recipe, run), "test")
    prompts = held_out(recipe, documents, load_target(recipe).tokenizer, recipe.evaluate.audit_prompts)
    say(f"audit of {', '.join(folders)} on {len(prompts)} held-out prompts")
    found = audit(recipe, folders, prompts, thorough=True)
    assert found is not None
    wrong = failures(found)
    path = run.path / "audit.json"
    write_json(path, {**found, "failures": wrong})
    print(audit_table(found, wrong))
    say(f"figures in {path}")
    return wrong


def audit_table(found: Mapping[str, Any], wrong: list[str]) -> str:
    """For a terminal."""
    greedy, tie, sampled, kept = found["greedy_fp32"], found.get("ties"), found["sampling"], found["identities"]
    lines = [
        f"greedy, float32   {greedy['identical']} of {greedy['prompts']} texts identical in {', '.join(greedy['arm_names'])} and plain decoding"
    ]
    if tie:
        widest = (
            ""
            if tie["largest_gap"] is None
            else f"; widest gap {tie['largest_gap']:.3f} logits, {tie['largest_steps']:.1f} steps of {tie['steps']} allowed"
        )
        lines.append(
            f"greedy, {tie['dtype']:<9} {tie['identical']} of {tie['texts']} texts identical, {tie['tied']} part at a tie, {tie['failed']} elsewhere{widest}"
        )
    if sampled and sampled["p_value"] is None:
        lines.append(f"sampling          not tested: of {sampled['draws']} texts no token came often enough to be compared")
    elif sampled:
        lines.append(f"sampling          p = {sampled['p_value']:.3g} over {len(sampled['places'])} places, {sampled['draws']} texts of each arm "
                     f"at temperature {sampled['temperature']:g}; lowest: {sampled['arm']}")  # fmt: skip
    lines.append(f"self-pair         {found['self_pair']['token_acceptance']} of its guesses accepted")
    lines.append(f"traces            {kept['traces'] - kept['broken']} of {kept['traces']} agree with themselves")
    return "\n".join([*lines, "", *[f"FAILED: {w}" for w in wrong], *([] if wrong else ["passed"])])
