"""What each key of a recipe may change: the stage that it changes first is made anew with all behind it, those before it are reused.

A key without a row here fails: whoever adds one says what it decides.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from draftstill.recipe import Recipe
from draftstill.recipe.candidates import section_of
from draftstill.runfolder import RunFolder
from draftstill.stages import stages

SERVER = {"url": "http://localhost:1"}
SOURCE = {"source": "some/draft"}
HASH = "0" * 64
BASE: dict[str, Any] = {"device": "cpu", "target": {"source": "some/target", "dtype": "float32"}, "corpus": {"source": "texts"}, "adapt": {},
                        "draft": SOURCE, "train": {"bf16": False}}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "respond.server.": {"respond.server": SERVER}, "record.server.": {"record.server": SERVER},
    "respond.draft.": {"respond.draft": SOURCE}, "record.draft.": {"record.draft": SOURCE}, "record.replays": {"record.draft": SOURCE},
    "record.rollouts": {"record.draft": SOURCE}, "train.lora.": {"train.lora": {}}, "train.loss.switch.": {"train.loss.switch": {}},
    "train.live": {"record.mode": "live"}, "train.loss.temperature": {"record.mode": "hidden"}, "draft.layers": {"draft.source": "prune"},
    "draft.depth": {"draft.source": "fresh", "draft.depth": 2},
}  # fmt: skip
"""What else a key needs to be taken, by the beginning of its name."""

FIRST: dict[str | None, dict[str, Any]] = {
    "corpus": {
        "seed": 1,
        "corpus.source": "others", "corpus.sha256": HASH, "corpus.format": "text", "corpus.include": ["*.md"], "corpus.dataset_config": "a",
        "corpus.dataset_split": "validation", "corpus.dataset_revision": "a", "corpus.streaming": True, "corpus.field": "body",
        "corpus.fields": {"text": "body"}, "corpus.where": {"language": ["en"]}, "corpus.categories": ["a"], "corpus.terms_per_document": 2,
        "corpus.min_chars": 1, "corpus.max_chars": 9, "corpus.max_documents": 9, "corpus.redact": ["email"], "corpus.heldout_fraction": 0.2,
        "corpus.near_duplicates": 0.9,
    },
    "adapted": {
        "adapt": None, "device": "cuda",
        "target.source": "other/target", "target.sha256": HASH, "target.file": "a.gguf", "target.revision": "a", "target.trust_remote_code": True,
        "target.dtype": "bfloat16",
        "adapt.r": 2, "adapt.lora_alpha": 1.0, "adapt.lora_dropout": 0.5, "adapt.target_modules": ["q_proj"], "adapt.learning_rate": 0.5,
        "adapt.lr_scheduler_type": "linear", "adapt.warmup_steps": 1, "adapt.weight_decay": 0.5, "adapt.max_grad_norm": 2.0,
        "adapt.per_device_train_batch_size": 1, "adapt.gradient_accumulation_steps": 2, "adapt.gradient_checkpointing": True,
        "adapt.num_train_epochs": 2.0, "adapt.max_steps": 1, "adapt.max_tokens": 9, "adapt.sequence_length": 9, "adapt.eval_tokens": 9,
        "adapt.eval_steps": 9,
    },
    "responses": {
        "respond.prompts": 9, "respond.heldout_prompts": 9, "respond.shares": {"cut": 1.0}, "respond.prompt_tokens": 9, "respond.chat_tokens": 9,
        "respond.synthetic.passage_tokens": 9, "respond.synthetic.instruction_tokens": 9, "respond.synthetic.ask": "{passage}?",
        "respond.max_new_tokens": 9, "respond.truncated": "drop", "respond.batch_size": 9, "respond.window": 9, "respond.chat_template": True,
        "respond.draft": SOURCE, "respond.draft.source": "another", "respond.draft.sha256": HASH, "respond.draft.file": "a.gguf",
        "respond.draft.revision": "a", "respond.draft.trust_remote_code": True, "respond.draft_gamma": 9,
        "respond.server": SERVER, "respond.server.model": "a", "respond.server.api": "chat",
        "respond.sampler.temperature": 0.0, "respond.sampler.top_k": 9, "respond.sampler.top_p": 0.5,
    },
    "recording": {
        "record.mode": "hidden", "record.server": SERVER, "record.server.model": "a", "record.top_k": 9, "record.kept_mass": 0.5,
        "record.logp_bits": 16, "record.hidden_bits": 8, "record.auto_tail": 0.5, "record.temperature": 0.5, "record.document_tokens": 9,
        "record.draft": SOURCE, "record.draft.source": "another", "record.draft.sha256": HASH, "record.draft.file": "a.gguf",
        "record.draft.revision": "a", "record.draft.trust_remote_code": True, "record.rollouts": 9, "record.replays": 9, "record.replay_gamma": 9,
        "record.shares": {"response": 1.0}, "record.sequence_length": 9, "record.batch_size": 9, "record.shard_sequences": 9,
    },
    "draft": {
        "draft.source": "prune", "draft.sha256": HASH, "draft.file": "a.gguf", "draft.revision": "a", "draft.cut": True, "draft.layers": [0, 2],
        "draft.depth": 3, "draft.search.positions": 9, "draft.search.beam": 9, "draft.keep_heads": 0.5, "draft.keep_mlp": 0.5,
        "draft.fresh.hidden_size": 8, "draft.fresh.intermediate_size": 8, "draft.fresh.num_attention_heads": 2,
        "draft.fresh.num_key_value_heads": 2, "draft.fresh.head_dim": 8, "draft.fresh.tie_word_embeddings": True, "draft.fresh.init": "random",
        "draft.transplant": True,
        "train.loss.name": "lk", "train.loss.mix": {"tvd": 1.0}, "train.loss.eta": 1.0, "train.loss.beta": 0.9, "train.loss.temperature": 0.5,
        "train.loss.top_k": 9, "train.loss.top_p": 0.5, "train.loss.switch": {}, "train.loss.switch.to": "tvd", "train.loss.switch.alpha": 0.9,
        "train.tokens.first": 9, "train.tokens.last": 9, "train.tokens.prefix_gamma": 9, "train.tokens.keep": 0.5, "train.phases": [{}],
        "train.lora": {}, "train.lora.r": 2, "train.lora.lora_alpha": 1.0, "train.lora.lora_dropout": 0.5, "train.lora.target_modules": ["q_proj"],
        "train.init_from": "a", "train.learning_rate": 0.5, "train.lr_scheduler_type": "linear", "train.warmup_steps": 1,
        "train.weight_decay": 0.5, "train.adam_beta1": 0.5, "train.adam_beta2": 0.5, "train.max_grad_norm": 2.0,
        "train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 2, "train.live": "shard", "train.packing": True,
        "train.gradient_checkpointing": True, "train.ema_decay": 0.5, "train.num_train_epochs": 2.0, "train.max_steps": 1, "train.bf16": True,
        "train.head_tokens": 9, "train.full_head_from": 0.5, "train.eval_steps": 9, "train.early_stopping_patience": 9,
    },
    "score": {"draft.head_tokens": 9},  # the weights keep the whole head; of two measurements it may choose another as the best
    None: {  # nothing is made otherwise: limits, manners, and what is told on the way
        "corpus.max_rejected": 0.9, "corpus.damaged": "keep", "corpus.test_sha256": HASH,
        "adapt.save_steps": 9,
        "respond.server.url": "http://localhost:2", "respond.server.concurrency": 9, "respond.server.timeout_s": 9.0, "respond.server.retries": 9,
        "respond.server.api_key_env": "A",
        "record.server.url": "http://localhost:2", "record.server.concurrency": 9, "record.server.timeout_s": 9.0, "record.server.retries": 9,
        "record.server.api_key_env": "A", "record.max_refused": 0.9, "record.mirror": "memory://a",
        "train.logging_steps": 9, "train.save_steps": 9, "train.save_total_limit": 9, "train.report_to": ["wandb"], "train.run_name": "a",
    },
}  # fmt: skip
"""The first stage that a key may change: each key with another value than the base's."""
ELSEWHERE = {
    "run_dir": "where, not what",
    "train.candidates": "stages of their own: test_stages",
    "record.server.api": "only one is taken",
}
SECTIONS = ("seed", "device", "run_dir", "target", "corpus", "adapt", "respond", "record", "draft", "train")


def keys(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Every key of a section and those inside; of a section that may be absent also itself."""
    for name, field in model.model_fields.items():
        inner = section_of(model, name)
        if inner is None or field.default is None:
            yield before + name
        if inner is not None:
            yield from keys(inner, f"{before}{name}.")


def changed(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(values)
    section, names = found, key.split(".")
    for name in names[:-1]:
        section = section.setdefault(name, {})
    section[names[-1]] = value
    return found


def fingerprints(values: dict[str, Any], home: Path) -> dict[str, str]:
    recipe = Recipe.model_validate_json(json.dumps({**values, "run_dir": str(home / "run")}))
    return {name: stage.fingerprint for name, stage in stages(recipe, RunFolder(recipe.run_dir)).items()}


def test_every_key_has_a_row() -> None:
    walked = {key for key in keys(Recipe) if key.partition(".")[0] in SECTIONS}
    rows = [key for group in FIRST.values() for key in group] + [*ELSEWHERE]
    assert len(rows) == len(set(rows)), "a key has one row"
    assert walked - set(rows) == set(), "say which stage a new key changes first"
    assert set(rows) - walked == set(), "there is no such key"


@pytest.mark.parametrize(("first", "key", "value"), [(first, key, value) for first, group in FIRST.items() for key, value in group.items()])
def test_a_key_makes_anew_what_it_decides_and_nothing_before(first: str | None, key: str, value: Any, tmp_path: Path) -> None:
    values = BASE
    for beginning, beside in BESIDE.items():
        if key.startswith(beginning):
            for name, other in beside.items():
                values = changed(values, name, other)
    one, two = fingerprints(values, tmp_path), fingerprints(changed(values, key, value), tmp_path)
    order = list(one)
    expected = [] if first is None else order[order.index(first) :]
    found = [name for name in order if one[name] != two.get(name)]
    assert found == expected
