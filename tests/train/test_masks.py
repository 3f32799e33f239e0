"""Chats that lost their mask: texts that begin with a template are not supervised throughout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from draftstill.distill import Recording
from draftstill.distill.recording import write_manifest, write_shard
from draftstill.runfolder import read_json, write_json
from draftstill.train.data import learnable
from draftstill.train.loop import Job
from tests.pipeline import borrowed, opened
from tests.train.jobs import RECORDED


def test_a_chat_supervised_throughout_lost_its_mask(tmp_path: Path) -> None:
    """The finished run's prompts are no chats, so its responses are supervised from their first position: the same rows as chats are refused."""
    borrowed(tmp_path, *RECORDED)
    recording = Recording(tmp_path / "run" / "recording" / "train")
    responses = [i for i in range(len(recording)) if recording.kind(i) == "response"]
    kept, refused = learnable(recording, chat=True)
    assert refused == {"chat text supervised throughout": len(responses)} and not set(kept) & set(responses) and kept
    assert learnable(recording, chat=False) == (list(range(len(recording))), {})


@pytest.mark.parametrize(("kinds", "respond", "refuses"), [
    ({"real": 16, "synthetic": 6}, {}, True), ({"cut": 22}, {"chat_template": True}, True), ({"cut": 22}, {}, False),
    ({"real": 20, "cut": 2}, {}, False), ({"real": 6}, {"prompts": 0}, False), ({}, {}, False), (None, {}, False),
])  # fmt: skip
def test_whether_texts_are_chats_is_told_by_their_prompts(
    kinds: dict[str, int] | None, respond: dict[str, Any], refuses: bool, tmp_path: Path
) -> None:
    """Conversations and invented instructions take the template in any case. A mixture with prompts cut as they are holds good texts that are supervised
    throughout; so may rollouts, where there are no training responses."""
    recipe, run = opened(borrowed(tmp_path, *RECORDED, respond=respond))
    told = run.path / "responses" / "provenance.json"
    facts = read_json(told)
    if kinds is None:
        shutil.rmtree(told.parent)
    else:
        write_json(told, {**facts, "facts": {**facts["facts"], "kinds": kinds}})
    job = Job(recipe, run.path / "recording", tmp_path, Accelerator(cpu=True))
    assert ("chat text supervised throughout" in job.refused) == refuses and job.kept


@pytest.mark.parametrize("mode", ["topk", "hidden", "text"])
def test_a_lost_mask_is_seen_in_every_mode(mode: str, tmp_path: Path) -> None:
    """Where there are no laws the last position is never supervised, so all that can be is one position less."""
    count = 5
    laws = {"topk": {"ids": torch.zeros(4 * count, 1, dtype=torch.uint16), "logp": torch.zeros(4 * count, 1), "tail": torch.zeros(4 * count)},
            "hidden": {"hidden": torch.zeros(4 * count, 2)}, "text": {}}[mode]  # fmt: skip
    end = count - (mode == "text")
    masks = [range(end), range(1, end), range(end), range(0)]
    kinds = ["response", "response", "document", "response"]
    write_shard(tmp_path / "shard-00000.safetensors", [[3] * count] * 4, [0, 1, 0, 0], laws, masks=masks, kinds=kinds)
    write_manifest(tmp_path, {"mode": mode, "vocab": 9, "top_k": 1})
    kept, refused = learnable(Recording(tmp_path), chat=True)
    assert kept == [1, 2] and refused == {"nothing supervised": 1, "chat text supervised throughout": 1}
    assert learnable(Recording(tmp_path), chat=False)[0] == [0, 1, 2]
