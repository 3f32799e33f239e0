"""Coverage of a trimmed vocabulary: the share of text and probability that its ids hold."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path

import pytest
import torch

from draftstill.decode import Sampling, probabilities
from draftstill.distill import Recording
from draftstill.distill.shards import write_manifest, write_shard
from draftstill.runfolder import read_json, save_tensors
from draftstill.train import covered, train
from draftstill.train.coverage import RANKING, coverage, coverage_table
from tests.pipeline import REAL, make_model, opened, write_recipe
from tests.train.drafts import recorded

DEPLOY = Sampling(0.7, 20, 0.95)
EOS = 1


@pytest.fixture(scope="module")
def heldout() -> Recording:
    return Recording(recorded() / "run" / "recording" / "heldout")


@pytest.mark.parametrize("count", [1, 37, 200])
@torch.no_grad()
def test_it_is_counted_position_by_position(heldout: Recording, count: int) -> None:
    target = make_model()
    ranking = torch.randperm(REAL, generator=torch.Generator().manual_seed(0))
    found = coverage(heldout, ranking, target.lm_head.weight[:REAL], DEPLOY)
    kept, tokens, mass, positions, written = set(ranking[:count].tolist()), 0, 0.0, 0, 0
    for i in range(len(heldout)):
        item = heldout[i]
        law = probabilities(target(item.tokens[None]).logits[0, :, :REAL], DEPLOY)
        for t in item.rows.tolist():
            mass, positions = mass + float(law[t, ranking[:count]].sum()), positions + 1
            behind = int(item.tokens[t + 1]) if t + 1 < len(item.tokens) else item.after
            if behind >= 0:
                tokens, written = tokens + (behind in kept), written + 1
    assert float(found["tokens"][count - 1]) == pytest.approx(tokens / written, abs=1e-6)
    assert float(found["mass"][count - 1]) == pytest.approx(mass / positions, abs=1e-4)


def test_the_end_of_an_answer_is_a_written_token(tmp_path: Path) -> None:
    """It is nowhere but behind the text."""
    head = make_model().lm_head.weight[:REAL].detach()
    write_shard(
        tmp_path / "shard-00000.safetensors",
        [[5, 6, 9], [8, 5]],
        [1, 0],
        {"hidden": torch.zeros(5, head.shape[1])},
        vocab=REAL,
        after=[EOS, -1],
    )
    write_manifest(tmp_path, {"mode": "hidden", "vocab": REAL, "top_k": 1})
    ranking = torch.tensor([EOS, 9, 5, *(i for i in range(REAL) if i not in (EOS, 9, 5))])
    found = coverage(Recording(tmp_path), ranking, head, DEPLOY)
    assert found["tokens"][:4].tolist() == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_it_bounds_alpha(heldout: Recording) -> None:
    """What the kept ids do not hold is rejected: not even the target itself, trimmed, does better."""
    head = make_model().lm_head.weight[:REAL].detach()
    ranking = torch.arange(REAL)
    found, kept = coverage(heldout, ranking, head, Sampling(1.0)), 60
    total, positions = 0.0, 0
    for i in range(len(heldout)):
        item = heldout[i]
        assert item.hidden is not None
        z = (item.hidden[item.rows] @ head.T).float()
        p, q = z.softmax(-1), torch.zeros(len(z), REAL)
        q[:, :kept] = z[:, :kept].softmax(-1)
        total, positions = total + float(torch.minimum(p, q).sum()), positions + len(z)
    assert total / positions == pytest.approx(float(found["mass"][kept - 1]), abs=1e-5)


def test_the_table_has_powers_of_two_what_was_asked_and_all() -> None:
    share = torch.linspace(0, 1, 5000)
    rows = coverage_table({"tokens": share, "mass": share}, 1500, 0)
    assert [r["head_tokens"] for r in rows] == [1024, 1500, 2048, 4096, 5000] and rows[-1]["mass"] == 1.0
    assert [r["head_tokens"] for r in coverage_table({"tokens": share[:200], "mass": share[:200]}, 9999)] == [200]


def test_a_finished_stage_is_asked_for_any_size(tmp_path: Path) -> None:
    share = torch.linspace(0.5, 1, 6)
    save_tensors(tmp_path / RANKING, {"ids": torch.arange(6, dtype=torch.int32), "tokens": share, "mass": share / 2})
    assert covered(tmp_path, 1) == {"tokens": 0.5, "mass": 0.25} and covered(tmp_path, 0) == {"tokens": 1.0, "mass": 0.5}
    save_tensors(tmp_path / RANKING, {"ids": torch.arange(6, dtype=torch.int32)})
    assert covered(tmp_path, 3) is None, "a stage from before coverage was kept"


def test_training_keeps_it(tmp_path: Path) -> None:
    source = recorded()
    for name in ("corpus", "responses", "recording"):
        shutil.copytree(source / "run" / name, tmp_path / "run" / name)
    path = write_recipe(tmp_path, train={"max_steps": 1}, draft={"head_tokens": 50, "layers": [0]})
    recipe, run = opened(path, f"target.source={source / 'target'}", f"corpus.source={source / 'texts'}")
    with contextlib.redirect_stdout(io.StringIO()):
        folder = train(recipe, run)
    facts = read_json(folder / "provenance.json")["facts"]
    assert [r["head_tokens"] for r in facts["coverage"]] == [50, REAL] and facts["layers"] == [0]
    found = covered(folder, 50)
    assert found is not None and facts["coverage"][0]["mass"] == pytest.approx(found["mass"], abs=1e-5) and 0 < found["mass"] < 1
