"""A real llama.cpp server (the one inside xllamacpp) as the target: it answers, and its laws are ours of the same weights."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.cli import config_path
from draftstill.decode import Network, load_target
from draftstill.distill import Client, Recording, Served, Text, read_responses, record
from draftstill.errors import DraftstillError
from draftstill.evaluate.gguf_tokens import tokens_of_folder
from draftstill.evaluate.ggufs import write_gguf
from draftstill.evaluate.serving import llama_server
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, read_json
from draftstill.sources import wheel_files
from tests.evaluate.published import REAL, byte_tokenizer, make_draft

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="pip install 'draftstill[served]'"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target as folder and GGUF."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_draft(folder / "target", rows=REAL, tokenizer=byte_tokenizer(), spread=2.0, layers=3)
    write_gguf(target, folder / "target.gguf", "f16", tokens_of_folder(target), name="target")
    shutil.copy(folder / "target.gguf", folder / "same.gguf")
    return folder


def test_a_small_model_s_laws_agree_to_rounding(pair: Path) -> None:
    """Byte tokens among them, which are parts of characters: a server that sampled one would keep its law back."""
    from transformers import AutoModelForCausalLM

    network = Network(AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32), vocab=REAL)
    ids = [int(i) for i in torch.randint(REAL - 3, (40,), generator=torch.Generator().manual_seed(0))]
    cache = network.new_cache(1, 64)
    with torch.inference_mode():
        p = network.logits(network.forward(torch.tensor([ids]), cache, [0])).softmax(-1)[0]
    with llama_server(f"llama-server -m {pair / 'target.gguf'} -c 512 -np 2", threads=1) as address:
        served = Served(Client(address), 32, REAL, plain=byte_tokenizer()("a")["input_ids"][-1], logp_bits=16, concurrency=2)
        served.probe(ids)
        (columns,) = served.columns([Text(ids)])
    assert (columns["count"] == 32).all()
    ours = p.gather(1, columns["ids"].long())
    assert (columns["logp"].exp() - ours).abs().sum(-1).max() < 0.02
    assert (columns["tail"] - (1 - ours.sum(-1))).abs().max() < 0.02


def test_a_server_with_a_draft_is_refused(pair: Path) -> None:
    command = f"llama-server -m {pair / 'target.gguf'} -md {pair / 'same.gguf'} --spec-type draft-simple --spec-draft-n-max 3 -c 512"
    with llama_server(command, threads=1) as address, pytest.raises(DraftstillError, match="speculatively"):
        Served(Client(address), 8, REAL, plain=65).probe(list(range(20, 40)))


def test_the_demos_target_answers_and_is_recorded_over_http(tmp_path: Path) -> None:
    """Q4_1 weights: llama.cpp multiplies them with activations of 8 bits, we with what they stand for."""
    base = load_recipe(config_path("demo.yaml"), [f"run_dir={tmp_path / 'x'}"])
    gguf = next(wheel_files(base.target.source, base.target.sha256, "target.source").rglob("*.gguf"))
    with llama_server(f"llama-server -m {gguf} -c 2048 -np 2 --metrics", threads=2) as address:
        recipe = load_recipe(config_path("demo.yaml"), [
            f"run_dir={tmp_path / 'run'}", "respond.prompts=6", "respond.heldout_prompts=2", "respond.prompt_tokens=24", "respond.max_new_tokens=24",
            "respond.chat_template=true", f"respond.server.url={address}", "respond.server.concurrency=2", f"record.server.url={address}",
            "record.server.concurrency=2", "record.top_k=20", "record.document_tokens=0", "record.logp_bits=16", "train.head_tokens=0"])  # fmt: skip
        folder = record(recipe, RunFolder(tmp_path / "run"))
    facts: dict[str, Any] = read_json(folder.parent / "responses" / "provenance.json")["facts"]
    assert facts["server"]["kind"] == "llama.cpp" and facts["server"]["retokenised"] == 0 and facts["dropped"] == 0
    rows = list(read_responses(folder.parent / "responses", "train"))
    assert len(rows) == 6 and all(r["finish"] in ("eos", "length") for r in rows)
    target = load_target(recipe, dtype="float32")
    recording = Recording(folder / "train")
    shifts = []
    for n in range(len(recording)):
        item = recording[n]
        assert item.ids is not None and item.p is not None and item.tail is not None
        with torch.inference_mode():
            cache = target.network.new_cache(1, len(item.tokens))
            p = target.network.logits(target.network.forward(item.tokens[None], cache, [0])).softmax(-1)[0][item.rows]
        ours = p.gather(1, item.ids[item.rows])
        shifts.append(0.5 * ((ours - item.p[item.rows]).abs().sum(-1) + (1 - ours.sum(-1) - item.tail[item.rows]).abs()))
    apart = torch.cat(shifts)
    print(f"total variation between llama.cpp's law and ours, {len(apart)} positions: mean {apart.mean():.4f}, largest {apart.max():.4f}")
    assert apart.mean() < 0.05
