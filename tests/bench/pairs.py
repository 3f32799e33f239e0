"""The pairs of the decoder benchmark: the demo's real one, and two random ones of other shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from draftstill.cli import config_path
from draftstill.corpus import prepare_corpus, read_documents
from draftstill.distill import cut_prompts
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder
from draftstill.sources import load_model, load_tokenizer, resolve_model
from draftstill.train import build_draft
from draftstill.train.build import prune_depth

Models = tuple[Any, Any, list[list[int]]]
"""Target and draft in float32, and prompts of one length."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What is run on a pair. ``load`` is called when its turn comes, so that one pair at a time is in memory."""

    name: str
    load: Callable[[], Models]
    gamma: int
    new_tokens: int
    seconds: float
    """Time for each of its tables."""
    main: bool = False
    """Timed in float32, too."""
    kept: torch.Tensor | None = None
    """Ids of a trimmed head for an extra arm of ours; None: no such arm."""


def kept_ids(draft: Path | None, count: int) -> torch.Tensor:
    """Ids of a trimmed head: the most frequent of the draft's training text; of an untrained one the first, which its tokenizer merged first."""
    ranking = None if draft is None else draft.parent / "token_ranking.safetensors"
    if ranking is None or not ranking.exists():
        return torch.arange(count)
    return load_file(ranking)["ids"].long()[:count].sort().values


def demo_pair(draft: Path | None, prompts: int, folder: Path) -> Models:
    """The demo's target, a draft of it with its whole head, and openings of held-out agreements."""
    recipe = load_recipe(config_path("demo.yaml"), [f"run_dir={folder}", "draft.head_tokens=0"])
    source = resolve_model(recipe.target, "target.source")
    target = load_model(source, "float32", "cpu")
    if draft is None:
        small = build_draft(recipe).model
    else:
        trained = recipe.draft.model_copy(update={"source": str(draft), "sha256": None, "file": None})
        small = load_model(resolve_model(trained, "--draft"), "float32", "cpu")
    documents = read_documents(prepare_corpus(recipe, RunFolder(folder, set_aside=True)), "test")
    found = cut_prompts(documents, prompts, recipe.respond, load_tokenizer(source), recipe.seed)
    return target, small, [p.ids for p in found]


def random_pair(config: Any, keep: int, damp: float, prompts: int, prompt_tokens: int = 64) -> Models:
    """A random target whose first layers decide most tokens, and a draft of exactly these layers.

    The outputs of the target's later layers are scaled by ``damp``: the smaller, the oftener the draft is right.
    """
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in target.model.layers[keep:]:
            layer.self_attn.o_proj.weight.mul_(damp)
            layer.mlp.down_proj.weight.mul_(damp)
    draft = prune_depth(copy.deepcopy(target), tuple(range(keep)))
    return target, draft, torch.randint(config.vocab_size, (prompts, prompt_tokens)).tolist()


def cast(model: Any, dtype: str, device: str) -> Any:
    """A copy in another dtype. Rotary frequencies stay float32, as in a model loaded in that dtype."""
    model = copy.deepcopy(model).to(device=device, dtype=getattr(torch, dtype))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    return model


def pairs(quick: bool, draft: Path | None, folder: Path) -> list[Pair]:
    plain: dict[str, Any] = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 2048}
    prompts = 2 if quick else 16  # the largest batch
    qwen = Qwen2Config(
        vocab_size=512 if quick else 32_000, hidden_size=64 if quick else 896, intermediate_size=256 if quick else 4864,
        num_hidden_layers=4 if quick else 24, num_attention_heads=4 if quick else 14, num_key_value_heads=2, **plain,
    )  # fmt: skip
    llama = LlamaConfig(
        vocab_size=512 if quick else 32_000, hidden_size=64 if quick else 512, intermediate_size=256 if quick else 1376,
        num_hidden_layers=4 if quick else 8, num_attention_heads=4 if quick else 8, num_key_value_heads=2 if quick else 8, **plain,
    )  # fmt: skip
    tokens = lambda many: 12 if quick else many  # noqa: E731
    seconds = lambda many: 0.0 if quick else many  # noqa: E731
    size = "tiny" if quick else "0.5B shape"
    return [
        Pair(f"SmolLM2-135M, 30 layers x 576, and {'its layers 0, 1, untrained' if draft is None else 'a trained draft'}",
             lambda: demo_pair(draft, prompts, folder), 4, tokens(48), seconds(60), main=True, kept=kept_ids(draft, 6144)),
        Pair(f"random Qwen2, {size}, {qwen.num_hidden_layers} layers x {qwen.hidden_size}, and its first layer",
             lambda: random_pair(qwen, 1, 0.1 if quick else 0.01, prompts), 4, tokens(32), seconds(45)),
        Pair(f"random Llama, {llama.num_hidden_layers} layers x {llama.hidden_size}, and its first 2 layers",
             lambda: random_pair(llama, 2, 0.1 if quick else 0.03, prompts), 4, tokens(64), seconds(60)),
    ]  # fmt: skip
