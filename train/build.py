"""Where a draft's first weights come from: cut out of the target or of another model, new layers, or an existing small model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from draftstill.decode import refuse_unsupported, revision_of
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Draft as DraftSection
from draftstill.recipe import Recipe
from draftstill.sizes import draft_size, size_of
from draftstill.sources import load_config, load_model, load_tokenizer, resolve_model
from draftstill.stages import resolved_dtype, served_target
from draftstill.train.adapter import preflight_adapt
from draftstill.train.calibration import choose
from draftstill.train.fresh import fresh_config, fresh_model
from draftstill.train.preview import check_training
from draftstill.train.pruning import prune_depth, prune_width
from draftstill.train.setup import check_head_tokens
from draftstill.train.transplant import Donation, donation, transplanted
from draftstill.vocabulary import check_vocabulary, real_size

__all__ = ["Draft", "build_draft", "preflight", "prune_depth", "refuse_untrainable"]


@dataclass(slots=True)
class Draft:
    """An untrained draft beside what its target lends it."""

    model: Any
    """A transformers model in float32, on the CPU."""
    tokenizer: Any
    """The target's: a draft is always read with it."""
    target_head: torch.Tensor
    """The target's head over the real tokens, [V, H], in the target's dtype."""
    vocab: int
    """Real tokens."""
    name: str
    revision: str | None
    """The target's commit, for a Hub id."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the stage tells of the making: ``start`` (an existing model's name, commit and licence), ``layers`` kept (none: not cut),
    ``calibration``, ``width``, ``fresh``, ``transplant``."""


_TRAINABLE = ("llama", "mistral", "qwen2", "qwen3")
"""Models that can be distilled and pruned: logits are head @ hidden and nothing else, and layers lie where ``prune_depth`` cuts."""


def refuse_untrainable(config: Any, key: str = "target.source") -> None:
    """Refuse models that cannot be decoded exactly, or not learnt from."""
    refuse_unsupported(config, key)
    if config.model_type not in _TRAINABLE:
        raise DraftstillError(f"models of type {config.model_type!r} can be decoded, but not distilled yet", key=key,
                              mend=f"supported here: {', '.join(_TRAINABLE)}")  # fmt: skip


def preflight(recipe: Recipe, *, memory: bool = False) -> None:
    """Check, from configs and tokenizers alone, what would stop the training: before hours of responding and recording.

    A target that is still to be tuned is judged by what it is tuned from: configuration and tokenizer stay the same.

    Args:
        memory: look at this machine's, too: the training will run here. What a step needs is then reckoned with the longest sequence that
            the recipe can record; where there is a recording, the training itself looks at that.

    Raises:
        DraftstillError: an unsupported model, a kept layer the target does not have, a vocabulary that does not fit, a head too large, a
            layer that takes no adapter, weights to begin with that do not fit, a phase without text, a step without room.
    """
    source = resolve_model(recipe.target, "target.source")
    config, tokenizer = load_config(source), load_tokenizer(source)
    refuse_untrainable(config)
    if recipe.adapt is not None:
        preflight_adapt(recipe.adapt, config)
    own_size = own_config = rows = None
    if recipe.draft.existing:
        own = resolve_model(recipe.draft, "draft.source")
        own_config, own_tokenizer = load_config(own), load_tokenizer(own)
        refuse_untrainable(own_config, "draft.source")
        own_size = size_of(own_config.to_dict())
        if _foreign(recipe, tokenizer, own_tokenizer):
            own_tokenizer, own_rows, rows = tokenizer, config.vocab_size, real_size(tokenizer)
        else:
            own_rows = own_config.vocab_size
            if recipe.draft.transplant:
                say("  draft.transplant: the tokenizers are equal already, so nothing is transplanted")
        vocab = _vocabulary(tokenizer, own_tokenizer, config.vocab_size, own_rows)
    else:
        vocab = _vocabulary(tokenizer, tokenizer, config.vocab_size, config.vocab_size)
    if recipe.draft.source == "fresh":
        fresh_config(recipe, config)
    draft_size(recipe.draft, size_of(config.to_dict()), own_size)
    check_head_tokens(recipe, vocab)
    for name, named in recipe.evaluate.stock.items():
        key = f"evaluate.stock.{name}.source"
        stock = resolve_model(named, key)
        stock_config = load_config(stock)
        refuse_unsupported(stock_config, key)
        check_vocabulary(tokenizer, load_tokenizer(stock), config.vocab_size, stock_config.vocab_size, key)
    check_training(recipe, config, own_config, rows, vocab, memory=memory)
    _say_unused(recipe.draft)


def _say_unused(draft: DraftSection) -> None:
    """Say which keys do nothing for a draft of this source. They may stand there for the sake of other candidates, so they are no fault."""
    unused = {
        "cut": draft.cut and not draft.existing, "transplant": draft.transplant and not draft.existing,
        "layers": draft.layers == "auto" and not draft.pruned, "depth": draft.depth is not None and draft.existing and not draft.cut,
        "keep_heads": draft.keep_heads < 1 and not draft.pruned, "keep_mlp": draft.keep_mlp < 1 and not draft.pruned,
        "fresh": bool(draft.fresh.model_dump(exclude_defaults=True)) and draft.source != "fresh",
    }  # fmt: skip
    if names := [f"draft.{key}" for key, idle in unused.items() if idle]:
        hint = "; draft.cut: true cuts it" if draft.existing and not draft.cut else ""
        say(f"  {', '.join(names)}: of no effect with draft.source {draft.source}{hint}")


def _foreign(recipe: Recipe, target: Any, own: Any) -> bool:
    """Whether embeddings are to be transplanted: the recipe allows it and the tokenizers differ."""
    if not recipe.draft.transplant or target.get_vocab() == own.get_vocab():
        return False
    for key, tokenizer in (("target.source", target), ("draft.source", own)):
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise DraftstillError("what this tokenizer's tokens write cannot be read: it has no tokenizer.json", key=key,
                                  mend="convert it to a fast tokenizer and save it, or leave draft.transplant off")  # fmt: skip
    return True


def _vocabulary(target: Any, own: Any, target_rows: int, own_rows: int) -> int:
    """Real tokens, agreed upon. Raises DraftstillError where the ids mean different tokens."""
    try:
        return check_vocabulary(target, own, target_rows, own_rows, "draft.source").real_size
    except DraftstillError as error:
        if target.get_vocab() == own.get_vocab():
            raise
        mend = f"{error.mend}; draft.transplant: true gives this model the target's vocabulary"
        raise DraftstillError(error.problem, key=error.key, value=error.value, mend=mend) from None


def build_draft(recipe: Recipe) -> Draft:
    """The draft before training. Deterministic: built again, it is the same.

    Raises:
        DraftstillError: a kept layer the target does not have, or a draft whose vocabulary does not fit.
    """
    source = resolve_model(served_target(recipe), "target.source")
    tokenizer = load_tokenizer(source)
    target = load_model(source, resolved_dtype(recipe), "cpu")
    refuse_untrainable(target.config)
    revision, facts = revision_of(target, source), dict[str, Any]()
    if recipe.draft.existing:
        own = resolve_model(recipe.draft, "draft.source")
        model, own_tokenizer, name = load_model(own, "float32", "cpu"), load_tokenizer(own), own.name
        refuse_untrainable(model.config, "draft.source")
        facts["start"] = {"name": own.name, "revision": revision_of(model, own), "licence": own.licence}
        if _foreign(recipe, tokenizer, own_tokenizer):
            donated: Donation = donation(tokenizer, own_tokenizer)
            model = transplanted(model, donated, real_size(own_tokenizer), target.config)
            facts["transplant"], own_tokenizer, name = donated.facts, tokenizer, f"{name} with the target's vocabulary"
        vocab = _vocabulary(tokenizer, own_tokenizer, target.config.vocab_size, model.config.vocab_size)
    else:
        name = source.name
        vocab = _vocabulary(tokenizer, tokenizer, target.config.vocab_size, target.config.vocab_size)
        model = target
    head = target.lm_head.weight.detach()[:vocab].clone()
    if recipe.draft.source == "fresh":
        model = fresh_model(recipe, target)
        facts["fresh"] = {
            "hidden_size": model.config.hidden_size,
            "layers": model.config.num_hidden_layers,
            "init": recipe.draft.fresh.init,
        }
        name = f"{name} fresh {model.config.num_hidden_layers} x {model.config.hidden_size}"
    del target
    if recipe.draft.pruned:
        model, cut = _cut(recipe, model, head)
        facts |= cut
        name += f" layers {'-'.join(map(str, cut['layers']))}"
        if "width" in cut:
            name += f", {cut['width']['num_key_value_heads']} KV heads, MLP {cut['width']['intermediate_size']}"
    return Draft(model.float(), tokenizer, head, vocab, name, revision, facts)


def _cut(recipe: Recipe, model: Any, target_head: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The model cut as the recipe says, and what to tell of it."""
    draft_size(recipe.draft, size_of(model.config.to_dict()), size_of(model.config.to_dict()))  # raises before anything is measured
    kept = choose(recipe, model, target_head)
    model = prune_depth(model, kept.layers)
    facts: dict[str, Any] = {"layers": list(kept.layers), **kept.facts}
    if kept.groups is not None or kept.units is not None:
        model = prune_width(model, kept.groups, kept.units)
        facts["width"] = {k: getattr(model.config, k) for k in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    return model, facts
