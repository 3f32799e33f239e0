"""A draft with new layers: the target's family and vocabulary in sizes of one's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from draftstill.decode import refuse_unsupported
from draftstill.distill import seed_of
from draftstill.recipe import Recipe
from draftstill.sizes import draft_size, size_of


def fresh_config(recipe: Recipe, config: Any) -> Any:
    """The target's config with the recipe's sizes; every layer attends fully.

    Raises:
        DraftstillError: sizes that do not fit each other.
    """
    size = draft_size(recipe.draft, size_of(config.to_dict()), None)
    assert size is not None
    made = copy.deepcopy(config)
    made.num_hidden_layers, made.hidden_size, made.intermediate_size = size.layers, size.hidden, size.inner
    made.num_attention_heads, made.num_key_value_heads, made.head_dim = size.heads, size.kv_heads, size.head_width
    made.tie_word_embeddings = size.tied
    if getattr(made, "layer_types", None):
        made.layer_types = ["full_attention"] * size.layers
    if getattr(made, "sliding_window", None):
        made.sliding_window, made.use_sliding_window = None, False
    refuse_unsupported(made, "draft.fresh")
    return made


def fresh_model(recipe: Recipe, target: Any) -> Any:
    """The untrained draft in float32; its layers follow from the recipe's seed.

    Embedding and head are the target's where the recipe says so. At another width they keep what they can: of all maps of the given
    rank, the projection onto the principal directions changes the matrix least (Eckart-Young). A head is projected with the final
    norm's weight in it, which the draft's own norm starts without.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed_of(recipe.seed, "fresh"))
        model = type(target)(fresh_config(recipe, target.config)).float().eval()
        if recipe.draft.fresh.init == "random":
            return model
        embedding = target.model.embed_tokens.weight.detach().float()
        same = embedding.shape[1] == model.config.hidden_size
        tied = model.config.tie_word_embeddings
        if same:
            model.model.norm.weight.copy_(target.model.norm.weight.float())
        model.model.embed_tokens.weight.copy_(resized(embedding, model.config.hidden_size))
        if not tied:
            head = target.lm_head.weight.detach().float()
            model.lm_head.weight.copy_(
                head if same else resized(head * target.model.norm.weight.detach().float(), model.config.hidden_size)
            )
    return model


def resized(matrix_VH: Tensor, width: int) -> Tensor:
    """[V, width]: the rows along their first ``width`` principal directions; behind them zeros, where there are fewer."""
    have = matrix_VH.shape[1]
    if width >= have:
        return torch.nn.functional.pad(matrix_VH, (0, width - have))
    # Of the Gram matrix rather than by SVD: [H, H] instead of [V, H], and the same directions.
    exact = matrix_VH.double()
    values, directions = torch.linalg.eigh(exact.T @ exact)
    chosen = directions[:, values.argsort(descending=True, stable=True)[:width]]
    # A direction's sign is arbitrary; fixed, the same draft comes out of every library.
    chosen = chosen * chosen.gather(0, chosen.abs().argmax(0, keepdim=True)).sign()
    return (exact @ chosen).to(matrix_VH.dtype)
