"""SIGKILL in responding, recording, training and scoring of the demo's own target, in the machine's own dtype: the same bytes at the end."""

from __future__ import annotations

import pytest
import yaml

from draftstill.cli import config_path
from tests.pipeline import hashes, process
from tests.test_kill import SAME, kill_when

SMALL = {
    "respond": {"prompts": 6, "heldout_prompts": 2, "max_new_tokens": 16, "batch_size": 2},
    "record": {"document_tokens": 3000, "batch_size": 2, "shard_sequences": 2},
    "train": {"num_train_epochs": 4, "save_steps": 2, "eval_steps": 4},
    "evaluate": {"prompts": 2, "max_new_tokens": 8, "audit_prompts": 0},
}
MARKS = (
    "responses.partial/train-00001.json",
    "recording.partial/train/shard-00002.safetensors",
    "draft.partial/checkpoint-0000004/state.json",
    "score.partial/cells/timing/own/t0/0001/plain@0.json",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_demo_killed_in_its_long_stages_ends_with_the_same_bytes(tmp_path):
    recipes = {}
    for name in ("quiet", "killed"):
        value = yaml.safe_load(config_path("demo.yaml").read_text())
        value["run_dir"] = str(tmp_path / name)
        for section, settings in SMALL.items():
            value[section] |= settings
        value["train"]["learning_rate"] = 3e-3
        recipes[name] = tmp_path / f"{name}.yaml"
        recipes[name].write_text(yaml.safe_dump(value, sort_keys=False))
    whole = process("run", recipes["quiet"])
    assert whole.wait() == 0, whole.communicate()[0]
    for mark in MARKS:
        kill_when((tmp_path / "killed" / mark).exists, recipes["killed"], seconds=400)
    last = process("run", recipes["killed"])
    assert last.wait() == 0, last.communicate()[0]
    for pattern in SAME:
        expected = hashes(tmp_path / "quiet", pattern)
        assert expected and hashes(tmp_path / "killed", pattern) == expected, pattern
