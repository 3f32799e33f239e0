"""A target's configuration and recipes for it: all that a plan needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftstill.recipe import Recipe

SMOLLM2_135M = {
    "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip


def target_folder(folder: Path) -> Path:
    """A model folder that holds its configuration only."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2_135M))
    return folder


def make(tmp_path: Path, **sections: Any) -> Recipe:
    """A recipe with an empty folder of text."""
    (tmp_path / "text").mkdir(exist_ok=True)
    values = {
        "run_dir": str(tmp_path / "run"),
        "target": {"source": "some/target"},
        "corpus": {"source": str(tmp_path / "text")},
        **sections,
    }
    return Recipe.model_validate_json(json.dumps(values))
