"""Tiny models of every trainable family, and recipes for drafts of them over one recording."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from draftstill.recipe import Recipe
from draftstill.sources import quiet_transformers
from tests.pipeline import PADDED, command, make_home, make_tokenizer, opened, write_recipe

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def tiny(family: str, tied: bool = False, *, seed: int = 0, rows: int = PADDED, layers: int = 3) -> Any:
    """A random model of a family, its biases and norms included; two groups of two heads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, vocab_size=rows, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
                                  num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=1,
                                  pad_token_id=None, **({} if family == "qwen2" else {"head_dim": 8}))  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if p.dim() == 1 and p.numel() in (8, 32) else 0.0))
    return model


def saved(folder: Path, model: Any, vocabulary: list[str] | None = None) -> Path:
    """A transformers folder of a model."""
    with quiet_transformers():
        model.save_pretrained(folder)
    make_tokenizer(vocabulary).save_pretrained(folder)
    return folder


@functools.cache
def recorded() -> Path:
    """A home with a recording, made once per process. Look, do not touch."""
    home = Path(tempfile.mkdtemp(prefix="draftstill-tests-"))
    import atexit

    atexit.register(shutil.rmtree, home, ignore_errors=True)
    with contextlib.redirect_stdout(open(home / "output.txt", "w")):  # noqa: SIM115
        assert command("distill", make_home(home)) == 0
    return home


def recipe_of(home: Path, *overrides: str, recording: bool = True, **draft: Any) -> Recipe:
    """A recipe with this section ``draft`` in a home of its own; the recording of ``recorded`` serves it."""
    source = recorded()
    home.mkdir(parents=True, exist_ok=True)
    if recording and not (home / "run" / "recording").exists():
        shutil.copytree(source / "run" / "recording", home / "run" / "recording")
    path = write_recipe(home, draft={"layers": [0, 1], **draft})
    return opened(path, f"target.source={source / 'target'}", f"corpus.source={source / 'texts'}", *overrides)[0]
