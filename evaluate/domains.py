"""The held-out text that is scored: the run's own test split, and further domains beside it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftstill.corpus import Document, iter_documents, prepare_corpus, stored_documents
from draftstill.dedupe import seen_shares
from draftstill.distill import LONGER, Prompt, Refusals, context_of, cut_prompts
from draftstill.errors import DraftstillError
from draftstill.gathering import Gathering, content_digest
from draftstill.progress import say
from draftstill.recipe import OWN, Corpus, Recipe
from draftstill.runfolder import RunFolder, Stage
from draftstill.sources import load_config, resolve_model
from draftstill.stages import served_target

_LEAK = 0.1
"""Share of a domain's 13-word passages that the training text holds, above which the score says so."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Prompts of one domain; the first ``timed`` are timed."""

    name: str
    prompts: list[Prompt]
    facts: dict[str, Any]


def domains(recipe: Recipe, run: RunFolder, found: Mapping[str, Stage], tokenizer: Any) -> list[Domain]:
    """The run's own domain first.

    Raises:
        DraftstillError: a domain without a document as long as a prompt.
    """
    settings = recipe.evaluate
    folder = prepare_corpus(recipe, run)
    own = held_out(recipe, stored_documents(folder, "test"), tokenizer, max(settings.prompts, settings.audit_prompts))
    share = found["corpus"].facts().get("heldout_13grams_in_train", {}).get("test")
    facts = {"source": recipe.corpus.source, "documents": found["corpus"].facts()["splits"]["test"]["documents"], "seen_in_training": share}
    made = [Domain(OWN, own, facts)]
    if settings.domains:
        trained = {content_digest(d.text, d.messages, d.tools) for d in _trained(folder)}
        for name, corpus in settings.domains.items():
            documents = _documents(name, corpus, trained, run.path)
            share = round(seen_shares((d.text for d in _trained(folder)), {name: (d.text for d in documents)})[name], 4)
            if share > _LEAK:
                say(
                    f"  evaluate.domains.{name}: {share:.0%} of its 13-word passages stand in the training text; its figures flatter the draft"
                )
            facts = {"source": corpus.source, "documents": len(documents), "seen_in_training": share}
            made.append(Domain(name, held_out(recipe, documents, tokenizer, settings.prompts, name), facts))
    for d in made:
        if len(d.prompts) < settings.prompts:
            where = "" if d.name == OWN else f" of evaluate.domains.{d.name}"
            say(f"  evaluate.prompts: the held-out documents{where} hold {len(d.prompts)} prompts, not {settings.prompts}")
    return made


def _trained(folder: Path) -> Iterator[Document]:
    """What a draft learnt from or was chosen by."""
    return (d for split in ("train", "validation") for d in iter_documents(folder, split))


def _documents(name: str, corpus: Corpus, trained: Collection[bytes], work: Path) -> list[Document]:
    """Its documents and conversations as the corpus stage would keep them, without those that were trained on or validated with."""
    gathered = Gathering(corpus, work, trained)
    gathered.gather()
    if gathered.lost and corpus.damaged == "refuse":
        first = gathered.lost[0]
        raise DraftstillError(f"the rest of a file cannot be read, from {first.id} on: {first.reason}", key=f"evaluate.domains.{name}.damaged",
                              value=corpus.damaged, mend="fetch or write the file again; or set it to keep, and do without the rest")  # fmt: skip
    kept = [Document(i, "test", i, **json.loads(line)) for i, line in zip(gathered.ids, gathered.kept(), strict=True)]
    if not kept:
        told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(gathered.reasons.items()))
        raise DraftstillError("holds no document that can be scored" + (f" ({told})" if told else ""), key=f"evaluate.domains.{name}.source",
                              value=corpus.source, mend="give text that was not trained on, or lower min_chars")  # fmt: skip
    return kept


def held_out(recipe: Recipe, documents: list[Document], tokenizer: Any, count: int, name: str = OWN) -> list[Prompt]:
    """The first prompts of a held-out text: what score, audit and server see; conversations go through the target's chat template. Asking for more
    only adds, as long as no kind of document runs out.

    Raises:
        DraftstillError: no document is as long as a prompt, no conversation makes one, there is no template for them, or the target's context
            does not hold one.
    """
    refusals = Refusals()
    context = context_of(load_config(resolve_model(served_target(recipe), "target.source")))
    prompts = cut_prompts(documents, count, recipe.respond, tokenizer, recipe.seed, context=context, refusals=refusals)
    where = "" if name == OWN else f" of evaluate.domains.{name}"
    if not prompts and refusals.rows:
        reason, told = refusals.told()
        problem = f"no prompt could be made of the held-out conversations{where}: {told}"
        if reason == LONGER:
            raise DraftstillError(problem, key="respond.chat_tokens", value=recipe.respond.chat_tokens,
                                  mend="raise it, as far as the target's context goes, or give shorter ones")  # fmt: skip
        section, corpus = ("corpus", recipe.corpus) if name == OWN else (f"evaluate.domains.{name}", recipe.evaluate.domains[name])
        raise DraftstillError(problem, key=f"{section}.source", value=corpus.source,
                              mend="look at the conversations and at the target's chat template")  # fmt: skip
    if not prompts:
        raise DraftstillError(f"no held-out document{where} is as long as a prompt of {recipe.respond.prompt_tokens} tokens", key="respond.prompt_tokens",
                              value=recipe.respond.prompt_tokens, mend="lower it, or raise corpus.heldout_fraction" if name == OWN
                              else "lower it, or give longer documents")  # fmt: skip
    return prompts
