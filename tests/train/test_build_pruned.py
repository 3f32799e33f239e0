"""Drafts cut by measurement: which layers, which heads, which MLP units, and that the choice is made once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.distill import Recording
from draftstill.errors import DraftstillError
from draftstill.runfolder import RunFolder
from draftstill.stages import stages
from draftstill.train import calibration
from draftstill.train.build import build_draft, preflight
from draftstill.train.layer_search import alpha_of, search_layers
from draftstill.train.pruning import importance, largest, only_layers, prune_width
from tests.pipeline import REAL, make_model
from tests.train.drafts import FAMILIES, recipe_of, recorded, tiny


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording(recorded() / "run" / "recording" / "train")


@pytest.fixture(scope="module")
def pieces(recording: Recording) -> list[calibration.Piece]:
    return calibration.sample(recording, 40, make_model().lm_head.weight[:REAL].detach(), 1.0, seed=0)


def chosen(folder: Path) -> list[Path]:
    return sorted((folder / "run" / calibration.FOLDER).glob("*.json"))


# --- layers ------------------------------------------------------------------------------------------------------------------


def test_a_wide_beam_finds_the_best_of_all_subsets(pieces: list[calibration.Piece]) -> None:
    model = make_model()
    by_hand = {}
    for layers in itertools.combinations(range(4), 2):
        with only_layers(model, layers):
            by_hand[layers] = round(alpha_of(model, pieces, REAL, 1.0), 6)
    tried = search_layers(model, 2, pieces, REAL, 1.0, beam=4)
    assert dict(tried) == by_hand
    assert tried[0][1] == max(by_hand.values()) and [a for _, a in tried] == sorted(by_hand.values(), reverse=True)


def test_a_search_never_loses_to_the_familiar_choices(pieces: list[calibration.Piece]) -> None:
    tried = dict(search_layers(make_model(), 3, pieces, REAL, 1.0, beam=1))
    assert {(0, 1, 2), (0, 1, 3)} <= tried.keys()


@torch.no_grad()
def test_a_search_leaves_the_model_whole(pieces: list[calibration.Piece]) -> None:
    model, ids = make_model(), torch.arange(9)[None]
    before, config = model(ids).logits, model.config.to_dict()
    search_layers(model, 2, pieces, REAL, 1.0, beam=1)
    assert torch.equal(model(ids).logits, before) and model.config.to_dict() == config
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]


def test_alpha_of_the_whole_model_is_its_recorded_mass(pieces: list[calibration.Piece]) -> None:
    """The target against its own recording: only what the recording left out is missing."""
    kept = torch.cat([p.p_NK.sum(-1) for p in pieces]).mean()
    assert alpha_of(make_model(), pieces, REAL, 1.0) == pytest.approx(float(kept), abs=0.02)  # 8-bit probabilities


@torch.no_grad()
def test_alpha_is_that_of_whole_laws(recording: Recording, pieces: list[calibration.Piece]) -> None:
    target, model = make_model(), make_model(1)
    total, count = 0.0, 0
    for piece in pieces:
        p, q = (m(piece.tokens[None]).logits[0, piece.rows_N, :REAL].softmax(-1) for m in (target, model))
        total, count = total + float(torch.minimum(p, q).sum()), count + len(piece.rows_N)
    left_out = 1 - float(torch.cat([p.p_NK.sum(-1) for p in pieces]).mean())
    assert total / count - left_out - 0.02 <= alpha_of(model, pieces, REAL, 1.0) <= total / count + 0.02


def test_the_sample_is_written_by_the_target_and_as_large_as_asked(recording: Recording) -> None:
    head = make_model().lm_head.weight[:REAL].detach()
    found = calibration.sample(recording, 33, head, 1.0, seed=0)
    assert sum(len(p.rows_N) for p in found) == 33
    texts = {tuple(recording[i].tokens.tolist()) for i in range(len(recording)) if recording.kind(i) == "response"}
    assert all(tuple(p.tokens.tolist()) in texts for p in found)
    assert [p.tokens.tolist() for p in found] == [p.tokens.tolist() for p in calibration.sample(recording, 33, head, 1.0, seed=0)]


def test_hidden_states_give_the_same_law(recording: Recording) -> None:
    """The held-out recording holds hidden states: their law is the target's own."""
    target = make_model()
    piece = calibration.sample(
        Recording(recorded() / "run" / "recording" / "heldout"), 8, target.lm_head.weight[:REAL].detach(), 0.5, seed=0
    )[0]
    with torch.no_grad():
        law = (target(piece.tokens[None]).logits[0, piece.rows_N, :REAL] / 0.5).softmax(-1)
    assert torch.allclose(law.gather(1, piece.ids_NK), piece.p_NK, atol=1e-4)


AUTO: dict[str, Any] = {"layers": "auto", "depth": 2, "search": {"positions": 30, "beam": 2}}


def test_layers_are_chosen_once_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, **AUTO)
    first = build_draft(recipe)
    (path,) = chosen(tmp_path)
    told = first.facts["calibration"]
    assert first.facts["layers"] == told["tried"][0]["layers"] and told["positions"] == 30
    assert told["tried"][0]["alpha"] == max(t["alpha"] for t in told["tried"]) and first.model.config.num_hidden_layers == 2
    assert first.name == f"target layers {'-'.join(map(str, first.facts['layers']))}"

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr(calibration, "search_layers", never)
    again = build_draft(recipe)
    assert again.facts == first.facts
    # What was written decides, on whichever machine it was measured.
    other = json.loads(path.read_text()) | {"layers": [1, 3]}
    path.write_text(json.dumps(other))
    assert build_draft(recipe).facts["layers"] == [1, 3]
    # Another candidate with the same cut shares it; head_tokens has no part in it.
    assert build_draft(recipe_of(tmp_path, **AUTO, head_tokens=50)).facts["layers"] == [1, 3]
    with pytest.raises(AssertionError, match="searched again"):
        build_draft(recipe_of(tmp_path, **{**AUTO, "depth": 1}))
    with pytest.raises(AssertionError, match="searched again"):
        build_draft(recipe_of(tmp_path, "seed=7", **AUTO))


def test_another_recording_is_another_choice(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, **AUTO)
    build_draft(recipe)
    provenance = tmp_path / "run" / "recording" / "provenance.json"
    provenance.write_text(json.dumps(json.loads(provenance.read_text()) | {"fingerprint": "f" * 64}))
    build_draft(recipe)
    assert len(chosen(tmp_path)) == 2


def test_named_layers_need_no_recording_and_write_nothing(tmp_path: Path) -> None:
    draft = build_draft(recipe_of(tmp_path, recording=False, layers=[0, 3]))
    assert draft.facts == {"layers": [0, 3]} and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "key"), [(AUTO, "draft.layers"), ({"keep_heads": 0.5}, "draft.keep_heads"), ({"keep_mlp": 0.5}, "draft.keep_mlp")]
)
def test_without_a_recording_it_says_what_to_run(section: dict[str, Any], key: str, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, recording=False, **section)
    preflight(recipe)  # runs before there is one
    with pytest.raises(DraftstillError, match="draftstill distill RECIPE") as caught:
        build_draft(recipe)
    assert caught.value.key == key and not list((tmp_path / "run").glob("calibration/*.json"))


# --- width -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_narrow_model_is_the_model_with_the_rest_set_to_zero(family: str) -> None:
    """Cutting rows and columns says what zeroing the units' own outputs says: no unit was taken for another."""
    model, zeroed, ids = tiny(family), tiny(family), torch.randint(REAL, (2, 12), generator=torch.Generator().manual_seed(0))
    groups, units = [[1], [0], [1]], [sorted({(7 * i + k) % 48 for i in range(16)}) for k in range(3)]
    for layer, kept, mlp in zip(zeroed.model.layers, groups, units, strict=True):
        columns = torch.zeros(32)
        for g in kept:
            columns[16 * g : 16 * (g + 1)] = 1
        layer.self_attn.o_proj.weight.mul_(columns)
        gone = torch.ones(48, dtype=torch.bool)
        gone[mlp] = False
        layer.mlp.down_proj.weight[:, gone] = 0
    cut = prune_width(model, groups, units)
    assert torch.allclose(cut(ids, use_cache=False).logits, zeroed(ids, use_cache=False).logits, atol=1e-5)
    assert (cut.config.num_attention_heads, cut.config.num_key_value_heads, cut.config.head_dim) == (2, 1, 8)
    assert cut.config.intermediate_size == 16 and sum(p.numel() for p in cut.parameters()) < sum(p.numel() for p in zeroed.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_importance_is_what_a_unit_adds(family: str) -> None:
    """Against the definition, one unit after the other: the length of its own part of the residual stream's increment."""
    model, ids = tiny(family), torch.arange(10, 22)
    groups, units = importance(model, [ids[:7], ids[7:]])
    grabbed: dict[str, list[torch.Tensor]] = {"o": [], "d": []}
    layer = model.model.layers[1]
    layer.self_attn.o_proj.register_forward_pre_hook(lambda m, x: grabbed["o"].append(x[0][0].detach()))
    layer.mlp.down_proj.register_forward_pre_hook(lambda m, x: grabbed["d"].append(x[0][0].detach()))
    with torch.no_grad():
        for text in (ids[:7], ids[7:]):
            model.model(input_ids=text[None])
        attended, activated = torch.cat(grabbed["o"]), torch.cat(grabbed["d"])
        for g in range(2):
            part = attended[:, 16 * g : 16 * (g + 1)] @ layer.self_attn.o_proj.weight[:, 16 * g : 16 * (g + 1)].T
            assert float(groups[1, g]) == pytest.approx(float(part.norm(dim=-1).mean()), rel=1e-4)
        for u in (0, 17, 47):
            part = activated[:, u : u + 1] * layer.mlp.down_proj.weight[:, u]
            assert float(units[1, u]) == pytest.approx(float(part.norm(dim=-1).square().mean().sqrt()), rel=1e-4)


def test_a_unit_that_adds_nothing_goes_first() -> None:
    model = make_model()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[:, 5:21] = 0
        model.model.layers[2].self_attn.o_proj.weight[:, :16] = 0
    groups, units = importance(model, [torch.arange(5, 60)])
    assert largest(groups, 1)[2] == [1] and largest(units, 48)[2] == [*range(5), *range(21, 64)]


def test_width_is_chosen_on_the_kept_layers_and_told(tmp_path: Path) -> None:
    draft = build_draft(recipe_of(tmp_path, layers=[1, 3], keep_heads=0.5, keep_mlp=0.5))
    config, (path,) = draft.model.config, chosen(tmp_path)
    assert draft.facts["width"] == {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (2, 2, 1, 32)
    assert draft.name == "target layers 1-3, 1 KV heads, MLP 32"
    kept, found = draft.facts["calibration"]["importance_kept"], json.loads(path.read_text())
    assert 0.5 <= kept["groups"] <= 1 and 0.5 <= kept["units"] <= 1
    target = make_model()
    assert torch.equal(draft.model.model.layers[1].mlp.down_proj.weight, target.model.layers[3].mlp.down_proj.weight[:, found["units"][1]])


@pytest.mark.parametrize(
    ("section", "key", "says"),
    [
        ({"layers": [0, 4]}, "draft.layers", "between 0 and 3"),
        ({"layers": "auto", "depth": 5}, "draft.depth", "4 layers"),
        ({"keep_heads": 0.9}, "draft.keep_heads", "rounds to all"),
        ({"keep_mlp": 0.99}, "draft.keep_mlp", "rounds to all"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_work(section: dict[str, Any], key: str, says: str, tmp_path: Path) -> None:
    for ask in (preflight, build_draft):
        with pytest.raises(DraftstillError, match=says) as caught:
            ask(recipe_of(tmp_path, **section))
        assert caught.value.key == key and caught.value.mend


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"source": "{target}", "layers": "auto", "depth": 2, "keep_mlp": 0.5}, "draft.layers, draft.depth, draft.keep_mlp: of no effect"),
        ({"source": "{target}", "keep_heads": 0.5}, "draft.cut: true cuts it"),
        (
            {"source": "prune", "transplant": True, "cut": True, "fresh": {"hidden_size": 8}},
            "draft.cut, draft.transplant, draft.fresh: of no effect",
        ),
        ({"source": "fresh", "depth": 1, "keep_mlp": 0.5}, "draft.keep_mlp: of no effect"),
        ({"source": "fresh", "depth": 1, "layers": [0, 1]}, ""),
        ({"source": "{target}", "cut": True, "keep_mlp": 0.5}, ""),
    ],
)
def test_a_key_of_no_effect_is_said(section: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {**section, "source": section["source"].format(target=recorded() / "target")}
    preflight(recipe_of(tmp_path, **section))
    told = capsys.readouterr().out
    assert says in told and ("of no effect" in told) == bool(says)


@pytest.mark.parametrize("source", ["prune", "fresh"])
def test_a_folder_of_the_same_name_decides_nothing(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``prune`` and ``fresh`` are ways to build, not places, wherever the command is given."""
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(tmp_path / "home", source=source, depth=2)
    inputs = lambda: stages(recipe, RunFolder(recipe.run_dir))["draft"].inputs  # noqa: E731
    before = inputs()
    (tmp_path / source).mkdir()
    (tmp_path / source / "notes.txt").write_text("x")
    assert inputs() == before
