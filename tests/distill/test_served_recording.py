"""Laws from servers, and texts without laws: what is recorded is what the target says, and what cannot be known is refused or said."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.decode import Sampling, probabilities
from draftstill.distill import Client, Recorded, Recording, Served, Text, agrees_at_top1, alpha_at_least, inspect, read_responses, record
from draftstill.errors import DraftstillError, RecipeError
from draftstill.recipe import Record
from tests.distill.fake_server import Reply, fake
from tests.pipeline import REAL, command, hashes, make_home, make_model, opened

KINDS = ("vllm", "sglang", "llama.cpp")
SERVED: dict[str, Any] = {"respond": {"prompts": 6, "heldout_prompts": 2, "prompt_tokens": 8, "max_new_tokens": 12, "batch_size": 8},
                          "record": {"top_k": 16, "sequence_length": 48, "shard_sequences": 4, "document_tokens": 0}}  # fmt: skip


@functools.cache
def law(ids: tuple[int, ...]) -> torch.Tensor:
    """The tiny target's log-probabilities over its real tokens behind each id, [N, V]."""
    with torch.inference_mode():
        return make_model()(torch.tensor([ids])).logits[0, :, :REAL].double().log_softmax(-1)


def entries(logp: torch.Tensor, k: int) -> list[tuple[int, float]]:
    found = logp.topk(min(k, len(logp)))
    return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def served(kind: str, change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor] = lambda z, _: z, cap: int = 1000, **bad: Any) -> Any:
    """A server of a kind whose laws are the tiny target's, after ``change(log-probabilities, sampling)``; ``cap`` ids at most."""

    def answer(path: str, body: Any) -> Reply:
        if body is None:
            return 0, None
        if kind == "llama.cpp" and body["n_predict"] > 1:
            return 200, {"content": "x", "tokens": [5], "stop_type": "limit", "timings": bad.get("timings", {})}
        if kind == "llama.cpp":
            k = min(cap, body["n_probs"])
            top = entries(change(law(tuple(body["prompt"]))[-1], body), k)
            told = [{"id": i, "token": "?", "logprob": lp} for i, lp in top]
            if bad.get("silent"):
                told = []
            return 200, {"content": "x", "tokens": [body["logit_bias"][0][0]], "completion_probabilities": [{"id": 0, "logprob": 0.0, "top_logprobs": told}],
                         "timings": bad.get("timings", {})}  # fmt: skip
        ids = tuple(body["prompt"] if kind == "vllm" else body["input_ids"])
        k, sampling = (body["prompt_logprobs"], body) if kind == "vllm" else (body["top_logprobs_num"], body["sampling_params"])
        if kind == "vllm" and k > cap:
            return 400, {"error": {"message": f"Requested prompt logprobs of {k}, which is greater than max allowed: {cap}"}}
        z = change(law(ids), sampling)
        tops = [entries(row, min(cap, k)) for row in z[:-1]]
        if bad.get("silent"):
            tops = []
        if kind == "sglang":
            return 200, {
                "text": "",
                "meta_info": {"input_top_logprobs": [None, *([[lp, i, None] for i, lp in top] for top in tops)] if tops else []},
            }
        told = [None]
        for top, following, row in zip(tops, ids[1:], z, strict=False):
            told.append({str(i): {"logprob": lp, "rank": n + 1, "decoded_token": "?"} for n, (i, lp) in enumerate(top)})
            told[-1].setdefault(str(following), {"logprob": float(row[following]), "rank": 99, "decoded_token": "?"})
        return 200, {"choices": [{"text": "", "prompt_logprobs": told if tops else None}]}

    return answer


def client(url: str) -> Client:
    return Client(url, retries=0, key="record.server")


def scorer(url: str, **options: Any) -> Served:
    return Served(client(url), **{"k": 8, "vocab": REAL, "plain": 7, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_from_a_server_is_the_one_in_process(kind: str, tmp_path: Path) -> None:
    ours = record(*opened(make_home(tmp_path / "a", **SERVED)))
    with fake(served(kind), kind) as server:
        home = make_home(tmp_path / "b", **{**SERVED, "record": {**SERVED["record"], "server": {"url": server.url, "concurrency": 3}}})
        theirs = record(*opened(home))
    one, two = Recording(ours / "train"), Recording(theirs / "train")
    assert len(one) == len(two) and two.manifest["server"]["kind"] == kind and "server" not in one.manifest
    for n in range(len(one)):
        a, b = one[n], two[n]
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.rows, b.rows) and a.start == b.start
        assert a.ids is not None and b.ids is not None and a.p is not None and b.p is not None and a.tail is not None and b.tail is not None
        assert (a.ids[a.rows] == b.ids[b.rows]).float().mean() > 0.99, "but for ties"
        assert torch.allclose(a.p[a.rows], b.p[b.rows], atol=1e-3) and torch.allclose(a.tail[a.rows], b.tail[b.rows], atol=1e-5)
        assert a.lse is not None and b.lse is None, "a server tells no normaliser"
    held = Recording(theirs / "heldout")
    assert held.mode == "topk" and Recording(ours / "heldout").mode == "hidden"
    assert f"from a {kind} server" in " ".join(inspect(theirs / "train").split())


@pytest.mark.parametrize("kind", KINDS)
def test_only_supervised_positions_are_scored_and_kept_mass_is_heeded(kind: str) -> None:
    text = Text([9, 20, 31, 42, 53], 0, only=(1, 3))
    with fake(served(kind), kind) as server:
        (columns,) = scorer(server.url, kept_mass=0.5).columns([text])
        if kind == "llama.cpp":
            assert [len(b["prompt"]) for b in server.asked("/completion")] == [2, 4]
            assert all(b["logit_bias"] == [[7, 1000.0]] and b["post_sampling_probs"] is False for b in server.asked("/completion"))
    assert columns["count"].tolist()[::2] == [0, 0, 0] and columns["tail"].tolist()[::2] == [1, 1, 1]
    for at in (1, 3):
        p = law((9, 20, 31, 42, 53))[at].exp()
        count = int(columns["count"][at])
        kept = columns["logp"][at, :count].exp()
        assert kept.sum() >= 0.5 or count == 8
        assert kept[:-1].sum() < 0.5 and math.isclose(float(columns["tail"][at]), 1 - float(kept.sum()), abs_tol=1e-5)
        assert columns["ids"][at, :count].tolist() == p.topk(count).indices.tolist()


# --- what a probe finds -----------------------------------------------------------------------------------------------------------


def warmed(z: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities after the temperature."""
    return (z / sampling.get("temperature", 1.0)).log_softmax(-1)


def cut(z: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities after top-k, renormalised."""
    k = sampling.get("top_k") or REAL
    return torch.where(z >= z.topk(k).values[..., -1:], z, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_tells_the_raw_law_passes(kind: str) -> None:
    with fake(served(kind), kind) as server:
        scorer(server.url).probe([9, 20, 31, 42])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("change", "words"), [(warmed, "change with the sampler"), (cut, "change with the sampler")])
def test_laws_after_sampling_are_refused(kind: str, change: Any, words: str) -> None:
    with fake(served(kind, change), kind) as server, pytest.raises(DraftstillError, match=words) as caught:
        scorer(server.url).probe([9, 20, 31, 42])
    assert caught.value.key == "record.server.url"


def renormalised(kind: str) -> Any:
    """A server that divides by the mass of what it lists."""

    def change(z: torch.Tensor, body: dict[str, Any]) -> torch.Tensor:
        k = body.get("n_probs") or body.get("prompt_logprobs") or change.k  # type: ignore[attr-defined]
        return z - z.topk(k).values.logsumexp(-1, keepdim=True)

    inner = served(kind, change)

    def answer(path: str, body: Any) -> Reply:
        change.k = (body or {}).get("top_logprobs_num")  # type: ignore[attr-defined]
        return inner(path, body)

    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_renormalised_laws_are_refused(kind: str) -> None:
    with fake(renormalised(kind), kind) as server, pytest.raises(DraftstillError, match="number of ids"):
        scorer(server.url).probe([9, 20, 31, 42])


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_without_log_probabilities_is_refused(kind: str) -> None:
    with fake(served(kind, silent=True), kind) as server, pytest.raises(DraftstillError, match="no log-probabilities"):
        scorer(server.url).probe([9, 20, 31, 42])


def test_a_server_that_speculates_is_refused() -> None:
    for kind, about in (("llama.cpp", {"speculative": "draft-simple"}), ("sglang", {"speculative": "STANDALONE"}),
                        ("vllm", {"metrics": "vllm:spec_decode_num_drafts_total 3\n"})):  # fmt: skip
        with fake(served(kind), kind, **about) as server, pytest.raises(DraftstillError, match="speculatively"):
            scorer(server.url).probe([9, 20, 31, 42])
    with (
        fake(served("llama.cpp", timings={"draft_n": 3}), "llama.cpp") as server,
        pytest.raises(DraftstillError, match="speculatively"),
    ):
        scorer(server.url).probe([9, 20, 31, 42])


def test_a_server_that_does_not_tell_whether_it_speculates_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def hidden(kind: str, **bad: Any) -> Any:
        inner = served(kind, **bad)
        return lambda path, body: (404, {}) if path in ("/metrics", "/get_server_info", "/server_info", "/slots") else inner(path, body)

    for kind in KINDS:
        with fake(hidden(kind, timings=None), kind) as server:
            scorer(server.url).probe([9, 20, 31, 42])
        assert "does not say whether it decodes speculatively" in capsys.readouterr().out, kind
        with fake(served(kind), kind) as server:
            scorer(server.url).probe([9, 20, 31, 42])
        assert "speculatively" not in capsys.readouterr().out, kind
    with fake(hidden("llama.cpp", timings={"predicted_n": 8}), "llama.cpp") as server:
        scorer(server.url).probe([9, 20, 31, 42])
    assert "speculatively" not in capsys.readouterr().out, "an answer that counts no drafted tokens tells it"


@pytest.mark.parametrize("kind", KINDS)
def test_a_cap_on_the_ids_is_said_with_what_to_do(kind: str) -> None:
    with fake(served(kind, cap=5), kind) as server, pytest.raises(DraftstillError) as caught:
        scorer(server.url).probe([9, 20, 31, 42])
    assert caught.value.key == "record.top_k" and caught.value.value == 8
    assert "--max-logprobs 8" in str(caught.value) if kind == "vllm" else "record.top_k: 5" in str(caught.value)


def test_impossible_laws_and_other_services_are_refused() -> None:
    with fake(served("vllm", lambda z, _: z + 0.1), "vllm") as server, pytest.raises(DraftstillError, match="more than 1"):
        scorer(server.url, k=150).probe([9, 20, 31])
    with fake(served("vllm"), "vllm") as server, pytest.raises(DraftstillError, match="token id"):
        scorer(server.url, vocab=60).probe([9, 20, 31])
    with fake(lambda *_: (0, None), "openai") as server, pytest.raises(DraftstillError, match=r"record\.mode: text"):
        scorer(server.url).probe([9, 20, 31])


def test_padding_is_taken_out_and_the_others_share_its_mass() -> None:
    ids = (9, 20, 31)
    with fake(served("vllm"), "vllm") as server:
        laws = scorer(server.url, k=REAL, vocab=150, rows=REAL).laws(ids, range(3))
    for at, found in enumerate(laws):
        real = law(ids)[at][:150].log_softmax(-1)
        assert sorted(i for i, _ in found) == list(range(150)) and all(math.isclose(lp, float(real[i]), abs_tol=1e-4) for i, lp in found)


def test_a_server_that_dies_while_recording_leaves_whole_shards(tmp_path: Path) -> None:
    left = [14]
    inner = served("vllm")

    def answer(path: str, body: Any) -> Reply:
        if body is not None:
            left[0] -= 1
        return inner(path, body) if left[0] > 0 else None

    def sections(url: str) -> dict[str, Any]:
        return {"respond": {**SERVED["respond"], "prompts": 12}, "record": {**SERVED["record"], "server": {"url": url, "retries": 0}}}

    with fake(served("vllm"), "vllm") as server:
        whole = record(*opened(make_home(tmp_path / "a", **sections(server.url))))
    with fake(answer, "vllm") as server:
        home = make_home(tmp_path / "b", **sections(server.url))
        with pytest.raises(DraftstillError) as caught:
            record(*opened(home))
        assert caught.value.key == "record.server.url"
        kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "b" / "run" / "recording.partial" / "train").glob("shard-*")}
        assert kept
        left[0] = 10_000
        again = record(*opened(home))
    assert all((again / "train" / p.name).stat().st_mtime_ns == time for p, time in kept.items())
    assert hashes(again, "*/shard-*") == hashes(whole, "*/shard-*")


# --- recipes ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [
    {"server": {"url": "http://x"}, "mode": "hidden"}, {"server": {"url": "http://x"}, "mode": "auto"},
    {"server": {"url": "http://x"}, "temperature": 0.7}, {"server": {"url": "http://x", "api": "chat"}},
    {"server": {"url": "http://x"}, "replays": 3, "draft": {"source": "x"}}, {"mode": "text", "server": {"url": "http://x"}},
    {"mode": "text", "rollouts": 3, "draft": {"source": "x"}},
])  # fmt: skip
def test_what_a_server_or_a_text_cannot_give_is_refused_in_the_recipe(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Record.model_validate_json(json.dumps(keys))


# --- text alone -------------------------------------------------------------------------------------------------------------------


def test_a_black_box_is_learnt_from_by_what_it_wrote(tmp_path: Path) -> None:
    sections = {**SERVED, "record": {"mode": "text", "sequence_length": 48, "shard_sequences": 4, "document_tokens": 100},
                "train": {"loss": {"name": "ce"}, "max_steps": 6, "eval_steps": 3, "bf16": False, "learning_rate": 3e-3}}  # fmt: skip
    home = make_home(tmp_path / "a", **sections)
    folder = record(*opened(home))
    recording, written = Recording(folder / "train"), list(read_responses(folder.parent / "responses", "train"))
    assert recording.mode == "text" and recording.manifest["bytes"] / recording.manifest["positions"] < 60
    ends = [r for r in written if r["finish"] == "eos"]
    for n in range(len(recording)):
        item = recording[n]
        assert item.ids is not None and item.p is not None and item.tail is not None
        assert len(item.tokens) - 1 not in item.rows.tolist(), "nothing is known of what follows the last token"
        assert (
            torch.equal(item.ids[item.rows, 0], item.tokens[item.rows + 1])
            and (item.p[item.rows] == 1).all()
            and (item.tail[item.rows] == 0).all()
        )
    if ends:
        texts = [recording[n].tokens.tolist() for n in range(len(recording))]
        assert all([*r["prompt"], *r["response"]] in texts for r in ends), "that a text ended is learnt, too"
    assert "no laws" in inspect(folder / "train")
    assert command("train", home) == 0
    with pytest.raises(RecipeError, match="the only loss is"):
        opened(home, "train.loss.name=lk")


# --- what alpha is at least -------------------------------------------------------------------------------------------------------


def pair(seed: int, n: int = 40, v: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, v, generator=generator)
    return z, z + torch.randn(n, v, generator=generator)


def item_of(z_p: torch.Tensor, k: int) -> Recorded:
    p = z_p.softmax(-1)
    top, ids = p.topk(k, -1)
    return Recorded(torch.zeros(len(p) + 1, dtype=torch.int64), 0, ids, top, (1 - top.sum(-1)).clamp_min(0))


SAMPLINGS = [Sampling(t, top_k, top_p) for t in (0.0, 0.5, 1.0, 1.7) for top_k in (0, 5, 30) for top_p in (1.0, 0.8)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}")
def test_a_bound_is_never_above_alpha_and_meets_it_when_all_is_known(sampling: Sampling) -> None:
    z_p, z_q = pair(1)
    true = torch.minimum(probabilities(z_p, sampling), probabilities(z_q, sampling)).sum(-1)
    rows = torch.arange(len(z_p))
    for k in (3, 12, 60):
        found = alpha_at_least(item_of(z_p, k), rows, z_q, sampling, "topk")
        assert (found <= true + 1e-5).all(), k
        if k == 60 or sampling.temperature == 0 or 0 < sampling.top_k <= k:
            assert torch.allclose(found, true, atol=1e-5), k
    assert (agrees_at_top1(item_of(z_p, 3), rows, z_q) == (z_p.argmax(-1) == z_q.argmax(-1))).all()


def test_of_a_text_the_mean_stays_below_alpha() -> None:
    z_p, z_q = pair(2, n=1, v=12)
    sampling = Sampling(0.7)
    p, q = probabilities(z_p, sampling), probabilities(z_q, sampling)
    drawn = torch.multinomial(p[0], 4000, replacement=True, generator=torch.Generator().manual_seed(0))
    item = Recorded(torch.zeros(4001, dtype=torch.int64), 0, drawn[:, None], torch.ones(4000, 1), torch.zeros(4000))
    found = alpha_at_least(item, torch.arange(4000), z_q.expand(4000, -1), sampling, "text").mean()
    assert abs(float(found) - float((p * q).sum())) < 0.02 and float(found) < float(torch.minimum(p, q).sum())
