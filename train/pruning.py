"""Cutting a draft out of a model: whole layers, groups of attention heads that share keys, units of the MLPs.

The model itself is cut, not copied, and stays an ordinary model of its family: what is left is said by its config.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftstill.sizes import check_layers


def prune_depth(model: Any, keep: tuple[int, ...]) -> Any:
    """Keep these layers, with embeddings, final norm and head; the model itself is cut, not copied."""
    check_layers(model.config.num_hidden_layers, keep)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(keep)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in keep]
    model.config = model.model.config = config
    model.model.layers = nn.ModuleList([model.model.layers[i] for i in keep])
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
        layer.self_attn.config = config
    return model


@contextlib.contextmanager
def only_layers(model: Any, keep: tuple[int, ...]) -> Iterator[Any]:
    """The model with these layers alone, and whole again afterwards."""
    config, layers = model.config, model.model.layers
    try:
        yield prune_depth(model, keep)
    finally:
        model.config = model.model.config = config
        model.model.layers = layers
        for place, layer in enumerate(layers):
            layer.self_attn.layer_idx = place
            layer.self_attn.config = config


def prune_width(model: Any, groups: Sequence[Sequence[int]] | None, units: Sequence[Sequence[int]] | None) -> Any:
    """Keep some groups of heads and some MLP units; the model itself is cut, not copied.

    Args:
        groups: for each layer the kept groups of query heads that share keys, ascending, equally many everywhere. None: all.
        units: for each layer the kept rows of its MLP, ascending, equally many everywhere. None: all.
    """
    config = copy.deepcopy(model.config)
    width, shared = model.model.layers[0].self_attn.head_dim, config.num_attention_heads // config.num_key_value_heads
    if groups is not None:
        config.num_key_value_heads, config.num_attention_heads = len(groups[0]), len(groups[0]) * shared
        config.head_dim = width  # hidden_size over the heads says it no longer
        for layer, kept in zip(model.model.layers, groups, strict=True):
            attention, pick = layer.self_attn, torch.tensor(list(kept))
            keys, queries = _runs(pick, width), _runs(pick, shared * width)
            attention.q_proj = _rows(attention.q_proj, queries)
            attention.k_proj, attention.v_proj = _rows(attention.k_proj, keys), _rows(attention.v_proj, keys)
            attention.o_proj = _columns(attention.o_proj, queries)
    if units is not None:
        config.intermediate_size = len(units[0])
        for layer, kept in zip(model.model.layers, units, strict=True):
            mlp, pick = layer.mlp, torch.tensor(list(kept))
            mlp.gate_proj, mlp.up_proj = _rows(mlp.gate_proj, pick), _rows(mlp.up_proj, pick)
            mlp.down_proj = _columns(mlp.down_proj, pick)
            mlp.intermediate_size = len(kept)
    model.config = model.model.config = config
    for layer in model.model.layers:
        layer.self_attn.config = config
    return model


@torch.inference_mode()
def importance(model: Any, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What groups of heads and MLP units add to the residual stream along some texts, float64: groups [L, K], units [L, I].

    Of a group: the mean length of its part of the attention's output, W_o x over the group's columns. Of a unit: the root mean square
    of its activation times the length of its column of the down projection, which is the same measure up to the mean's kind. Activation
    times weight is the criterion of Wanda (arXiv 2306.11695), summed over whole units as in Minitron (arXiv 2407.14679).

    Args:
        texts: token ids, each [T].
    """
    layers, config = model.model.layers, model.config
    groups = torch.zeros(len(layers), config.num_key_value_heads, dtype=torch.float64)
    squares = torch.zeros(len(layers), config.intermediate_size, dtype=torch.float64)
    count = 0

    def attended(place: int, module: nn.Linear, found: Tensor) -> None:
        parts = found.flatten(0, -2).unflatten(-1, (len(groups[0]), -1))  # [T, K, columns of a group]
        columns = module.weight.unflatten(1, parts.shape[1:])  # [H, K, columns]
        groups[place] += torch.einsum("tkc,hkc->tkh", parts, columns).float().norm(dim=-1).sum(0).double().cpu()

    def activated(place: int, found: Tensor) -> None:
        squares[place] += found.flatten(0, -2).float().square().sum(0).double().cpu()

    hooks = []
    for place, layer in enumerate(layers):
        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(lambda m, x, p=place: attended(p, m, x[0])))
        hooks.append(layer.mlp.down_proj.register_forward_pre_hook(lambda m, x, p=place: activated(p, x[0])))
    try:
        for text in texts:
            model.model(input_ids=text[None].to(model.device), use_cache=False)
            count += len(text)
    finally:
        for hook in hooks:
            hook.remove()
    columns = torch.stack([layer.mlp.down_proj.weight.float().norm(dim=0).double().cpu() for layer in layers])
    return groups / count, (squares / count).sqrt() * columns


def largest(importance: Tensor, count: int) -> list[list[int]]:
    """Places of the ``count`` largest of each row, ascending; of equals the first."""
    return importance.argsort(dim=-1, descending=True, stable=True)[:, :count].sort(-1).values.tolist()


def _runs(places: Tensor, length: int) -> Tensor:
    """Rows of whole blocks of ``length``."""
    return (places[:, None] * length + torch.arange(length)).flatten()


def _rows(linear: nn.Linear, keep: Tensor) -> nn.Linear:
    return _linear(linear.weight.detach()[keep], None if linear.bias is None else linear.bias.detach()[keep])


def _columns(linear: nn.Linear, keep: Tensor) -> nn.Linear:
    return _linear(linear.weight.detach()[:, keep], None if linear.bias is None else linear.bias.detach())


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.contiguous().clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.clone())
    return made.eval()
