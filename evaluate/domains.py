"""The held-out text that is scored: the run's own test split, and further domains beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftstill.corpus import Document, prepare_corpus, read_documents
from draftstill.dedupe import seen_shares
from draftstill.distill import Prompt, cut_prompts
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.readers import read_rows
from draftstill.recipe import OWN, Corpus, Recipe
from draftstill.runfolder import RunFolder, Stage

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
    own = held_out(recipe, read_documents(folder, "test"), tokenizer, max(settings.prompts, settings.audit_prompts))
    share = found["corpus"].facts().get("heldout_13grams_in_train", {}).get("test")
    facts = {"source": recipe.corpus.source, "documents": found["corpus"].facts()["splits"]["test"]["documents"], "seen_in_training": share}
    made = [Domain(OWN, own, facts)]
    if settings.domains:
        training = [d.text for split in ("train", "validation") for d in read_documents(folder, split)]
        for name, corpus in settings.domains.items():
            documents = _documents(name, corpus, set(training))
            share = round(seen_shares(training, {name: (d.text for d in documents)})[name], 4)
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


def _documents(name: str, corpus: Corpus, trained: set[str]) -> list[Document]:
    """Its documents as the corpus stage would keep them, without those that were trained on or validated with."""
    known, kept = set(trained), []
    for row in read_rows(corpus):
        text = (row.text or "").strip()
        if row.reason is None and len(text) >= corpus.min_chars and text not in known:
            known.add(text)
            kept.append(Document(row.id, "test", row.id, text))
            if len(kept) == corpus.max_documents:
                break
    if not kept:
        raise DraftstillError("holds no document that can be scored", key=f"evaluate.domains.{name}.source", value=corpus.source,
                              mend="give text that was not trained on, or lower min_chars")  # fmt: skip
    return kept


def held_out(recipe: Recipe, documents: list[Document], tokenizer: Any, count: int, name: str = OWN) -> list[Prompt]:
    """The first prompts of a held-out text: what score, audit and server see. Asking for more only adds, as long as no kind of document runs out.

    Raises:
        DraftstillError: no document is as long as a prompt.
    """
    prompts = cut_prompts(documents, count, recipe.respond, tokenizer, recipe.seed)
    where = "" if name == OWN else f" of evaluate.domains.{name}"
    if not prompts:
        raise DraftstillError(f"no held-out document{where} is as long as a prompt of {recipe.respond.prompt_tokens} tokens", key="respond.prompt_tokens",
                              value=recipe.respond.prompt_tokens, mend="lower it, or raise corpus.heldout_fraction" if name == OWN
                              else "lower it, or give longer documents")  # fmt: skip
    return prompts
