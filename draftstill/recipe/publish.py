"""The folder that others load."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from draftstill.recipe.base import Section


class Publish(Section):
    """The folder that others load."""

    name: str | None = None
    """Title of the model card; default: made from target and corpus."""
    license: str | None = None
    """Licence id of the draft. Needed when the target's licence is unknown or binds what is made with it."""
    language: tuple[str, ...] = ()
    """Language codes for the card, for example [en]; default: what the target's file says."""
    vocabulary: Literal["padded", "real"] = "padded"
    """Rows of the published draft: ``padded`` to the target's configured size, which vLLM, SGLang and transformers compare, or the ``real`` tokens only.
    Rows that no token id points at draw no probability either way."""
    gguf: Literal["auto"] | tuple[Literal["f16", "q8_0"], ...] = "auto"
    """GGUF files for llama.cpp: ``[f16, q8_0]`` or one of them, none with ``[]``; ``auto`` writes both where the family and the tokenizer allow, and
    says why where not."""
    target_gguf: str | None = None
    """The GGUF file that serves the target, where target.source is another form of it: its tokenizer is copied into the draft's GGUF."""
    repo_id: str | None = None
    """Hub repository for --push."""
    private: bool = True
    """Visibility of a repository that --push creates."""
    pull_request: bool = False
    """--push opens a pull request instead of committing to main."""
    tag: str | None = None
    """Tag that --push gives the commit, for example v1. Not with pull_request: that commit is not on main yet."""
    collection: str | None = None
    """Hub collection that --push adds the repository to: its slug (owner/name-id), or a title, made when missing."""

    @model_validator(mode="after")
    def _tag_or_request(self) -> Publish:
        if self.tag and self.pull_request:
            raise ValueError("tag and pull_request exclude each other: a tag marks what is on main; set the tag after the merge")
        return self
