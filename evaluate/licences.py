"""What a draft may be given out under: it inherits from the target that taught it and from the weights it started from."""

from __future__ import annotations

import re

from draftstill.errors import DraftstillError
from draftstill.evaluate.reading import Score
from draftstill.recipe import Recipe

PERMISSIVE = {
    "apache-2.0",
    "mit",
    "mit-0",
    "bsd-2-clause",
    "bsd-3-clause",
    "isc",
    "0bsd",
    "unlicense",
    "cc0-1.0",
    "cc-by-4.0",
    "bsl-1.0",
    "zlib",
}
"""Ask for no more than their notice; a draft may carry any licence beside it."""
_LLAMA = re.compile(r"(^|[/_\s.-])(meta-)?llama-?[34]", re.IGNORECASE)
_GEMMA = re.compile(r"(^|[/_\s.-])gemma", re.IGNORECASE)


def licence(score: Score, recipe: Recipe) -> str | None:
    """The draft's licence: the user's word, else the target's where the draft is made of the target alone. None: unknown."""
    if recipe.publish.license:
        return recipe.publish.license
    return None if recipe.draft.existing else score["target"].get("licence") or None


def family(score: Score) -> str | None:
    """``llama`` or ``gemma`` where the target's licence, or its name where the licence is unknown, says so: terms that reach its drafts."""
    stated = str(score["target"].get("licence") or "")
    for text in [stated] if stated else [str(score["target"]["source"]), str(score["target"]["name"])]:
        if _LLAMA.search(text):
            return "llama"
        if _GEMMA.search(text):
            return "gemma"
    return None


def name_fault(score: Score, repo_id: str) -> str | None:
    """Why the target's licence forbids this repository name, or None."""
    if family(score) == "llama" and not repo_id.rsplit("/", 1)[-1].startswith("Llama"):
        stated = score["target"].get("licence") or "Llama"
        return f"the target's licence ({stated}) asks that the name of a model trained on it or its outputs begins with 'Llama'"
    return None


def refuse_licence(score: Score, recipe: Recipe) -> None:
    """Stop a push whose licence is undecided or laxer than the target's.

    Raises:
        DraftstillError: ``publish.license`` or ``publish.repo_id``, with what to decide.
    """
    stated, chosen, kind = (score["target"].get("licence") or None), recipe.publish.license, family(score)
    if kind == "gemma" and (chosen or "").lower() != "gemma":
        raise DraftstillError("Gemma's terms count a model trained on Gemma's outputs as a derivative: it may be given out under those terms only",
                              key="publish.license", value=chosen,
                              mend="read the Gemma terms of use; if you pass them on with the draft, set publish.license: gemma")  # fmt: skip
    if licence(score, recipe) is None:
        raise DraftstillError("the licence of the target or of the draft's start is unknown, so the draft's cannot be derived", key="publish.license",
                              mend="read their terms and set publish.license, for example apache-2.0")  # fmt: skip
    if kind == "llama" and not _LLAMA.search(chosen or stated or ""):
        raise DraftstillError("a model trained on Llama or its outputs is given out under the Llama licence", key="publish.license", value=chosen,
                              mend="set publish.license to the target's, for example llama3.1, and put the licence text beside the files")  # fmt: skip
    if stated and kind is None and stated.lower() not in PERMISSIVE and (chosen or "").lower() != stated.lower():
        raise DraftstillError(f"the target's licence ({stated}) may bind what is made with it", key="publish.license", value=chosen,
                              mend=f"read it; if it allows a draft to be given out, set publish.license: {stated}")  # fmt: skip
    if recipe.publish.repo_id and (fault := name_fault(score, recipe.publish.repo_id)):
        raise DraftstillError(fault, key="publish.repo_id", value=recipe.publish.repo_id, mend="rename the repository")
