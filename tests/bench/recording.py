"""``make bench-recording``: what recording costs beside the bare teacher forward, and what reading costs beside training.

How it measures, on the demo's target (SmolLM2-135M) and pieces of its corpus, in the dtype that draftstill picks for this machine:

- Recording: arms take turns batch by batch, in an order that shifts by one each time. ``bare`` is the forward, all logits (in the same
  blocks) and their log-normaliser, nothing kept. The others are the recorder's own steps, packing and writing the shard included. Shown are tokens
  per second and the median, over turns, of each arm's speed over bare's.
- Reading: random access to the shards of an arm, and collate, as the trainer does it; beside it one training step of the demo's draft (whole head, LK)
  on such batches, and the same step live: target forward first, losses from its hidden states.
- Precision: what each form of recording moves alpha by. topk: half the L1 distance between a recorded and a true law over what was
  kept. hidden: 1 - alpha between the law of the recorded states and the true one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from draftstill.cli import config_path
from draftstill.corpus import prepare_corpus, read_documents
from draftstill.decode import Network, set_threads
from draftstill.distill import Hidden, Objective, Recording, Teacher, Text, TopK, encode
from draftstill.distill.packing import decode_falls, decode_hidden, encode_falls, encode_hidden
from draftstill.distill.scoring import Scorer, save_shard, score, score_batch
from draftstill.distill.shards import write_manifest
from draftstill.machine import LoadWatch, describe_machine
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, git_state, versions, write_json
from draftstill.sources import load_model, load_tokenizer, quiet_transformers, resolve_model
from draftstill.stages import resolved_device, resolved_dtype
from draftstill.train.build import prune_depth
from draftstill.train.data import Batch, collate
from draftstill.train.module import DistilledDraft
from tests.bench.pairs import cast

BARE = "bare forward"
GOALS = {"topk, K = 64, over bare": 0.9, "hidden over bare": 0.9, "reading over training": 2.0, "recorded over live training": 2.0}
BYTES_GOAL = 210
K = 64


def load(quick: bool, folder: Path, count: int, length: int) -> tuple[Any, list[Text], str]:
    """Target in float32, texts of one length, and its dtype here."""
    if quick:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=49_152, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                                             num_key_value_heads=2, tie_word_embeddings=True)).eval()  # fmt: skip
        return model, [Text(torch.randint(49_152, (length,)).tolist()) for _ in range(count)], "float32"
    recipe = load_recipe(config_path("demo.yaml"), [f"run_dir={folder}"])
    source = resolve_model(recipe.target, "target.source")
    tokenizer = load_tokenizer(source)
    texts: list[Text] = []
    for document in read_documents(prepare_corpus(recipe, RunFolder(folder, set_aside=True)), "train"):
        ids = encode(tokenizer, document.text)
        texts += [Text(ids[at : at + length]) for at in range(0, len(ids) - length, length)]
    random.Random(0).shuffle(texts)
    return load_model(source, "float32", "cpu"), texts[:count], resolved_dtype(recipe)


class Recorder:
    """One arm: scores batches into shards of a folder of its own."""

    def __init__(self, scorer: Scorer, folder: Path) -> None:
        self.scorer, self.folder, self.shards = scorer, folder, 0
        folder.mkdir()

    def __call__(self, texts: Sequence[Text]) -> None:
        save_shard(self.folder / f"shard-{self.shards:05d}.safetensors", texts, score(texts, self.scorer), self.scorer, "")
        self.shards += 1

    def finish(self, vocab: int) -> Recording:
        topk = isinstance(self.scorer, TopK)
        write_manifest(self.folder, {"mode": "topk", "top_k": K, "vocab": vocab} if topk else {"mode": "hidden", "vocab": vocab})
        return Recording(self.folder)


def bare(network: Network, rows: int) -> Callable[[Sequence[Text]], None]:
    @torch.inference_mode()
    def run(texts: Sequence[Text]) -> None:
        hidden = torch.cat(score_batch(network, texts))
        for at in range(0, len(hidden), rows):
            network.logits(hidden[at : at + rows]).logsumexp(-1)

    return run


def in_turns(arms: dict[str, Callable[[Any], object]], inputs: Sequence[Any], sync: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each arm, input by input; the first input warms up."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn, value in enumerate(inputs):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            started = time.perf_counter()
            arms[name](value)
            sync()
            if turn:
                taken[name].append(time.perf_counter() - started)
    return taken


@torch.inference_mode()
def precision(network: Network, texts: Sequence[Text]) -> dict[str, float]:
    """Mean shift of alpha that each form allows."""
    hidden = torch.cat(score_batch(network, texts))[:512]
    p = network.logits(hidden).double().softmax(-1)
    top, ids = p.topk(K, -1)
    tail = (1 - top.sum(-1)).float()
    used = torch.ones(top.shape, dtype=torch.bool)
    half = lambda q: float((q.double().cpu() - top.cpu()).abs().sum(-1).mean() / 2)  # noqa: E731
    falls = decode_falls(encode_falls(top.log().float().cpu()), used, tail.cpu())
    lost = lambda h: float((p - network.logits(h.to(hidden)).double().softmax(-1)).abs().sum(-1).mean() / 2)  # noqa: E731
    return {"topk, 8 bits": half(falls), "topk, 16 bits": half(top.log().half().float().exp()), "mean tail": float(tail.mean()),
            "hidden, 16 bits": lost(hidden.bfloat16()), "hidden, 8 bits": lost(decode_hidden(*encode_hidden(hidden.cpu())))}  # fmt: skip


class Trainer:
    """The demo's draft; one step on a recorded batch, or live."""

    def __init__(self, model: Any, network: Network, compute: torch.dtype) -> None:
        import copy

        draft = prune_depth(copy.deepcopy(model), (0, 1)).float().to(network.device)
        self.network, self.compute = network, compute
        self.head = model.lm_head.weight.detach()[: network.vocab].to(network.device, network.dtype)
        self.module = DistilledDraft(draft, network.vocab, Objective("lk"), compute).train()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-5, fused=True)

    def recorded(self, batch: Batch) -> None:
        device = self.network.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.compute == torch.bfloat16):
            loss, _ = self.module(batch.to(device))
        (loss / batch.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def live(self, batch: Batch, texts: Sequence[Text]) -> None:
        hidden = torch.cat(score_batch(self.network, texts)).clone()
        self.recorded(Batch(batch.ids_BT, batch.rows_N, Teacher(hidden_NH=hidden, head_VH=self.head)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recording", description="Recording and reading; see the module.")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, few turns: checks that the benchmark runs")
    parser.add_argument("--batches", type=int, help="turns")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/recording.json"), help="where the JSON goes")
    options = parser.parse_args(argv)
    set_threads()
    turns, batch, length = options.batches or (4 if options.quick else 13), 2 if options.quick else 8, 64 if options.quick else 256
    watch = LoadWatch()
    with quiet_transformers(), tempfile.TemporaryDirectory() as temporary:
        model, texts, dtype = load(options.quick, options.out.parent / "decode-corpus", turns * batch, length)
        device = "cpu" if options.quick else resolved_device(load_recipe(config_path("demo.yaml")))
        network = Network(cast(model, dtype, device))
        sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        batches = [texts[at : at + batch] for at in range(0, len(texts), batch)]
        recorders = {
            "topk, K = 64": Recorder(TopK(network, K, logp_bits=8), Path(temporary) / "topk"),
            "topk, .995 or 64": Recorder(TopK(network, K, kept_mass=0.995, logp_bits=8), Path(temporary) / "mass"),
            "hidden": Recorder(Hidden(network), Path(temporary) / "hidden"),
            "hidden, 8 bits": Recorder(Hidden(network, 8), Path(temporary) / "hidden8"),
        }
        rows = 128 if device == "cpu" else (1 << 28) // network.vocab
        taken = in_turns({BARE: bare(network, rows), **recorders}, batches, sync)
        tokens = batch * length
        print(
            f"\n{dtype}, batches of {batch} x {length} tokens, {turns - 1} turns\n{'':<20}{'tok/s':>9}{'over bare':>11}{'bytes/token':>13}{'read tok/s':>12}"
        )
        report: dict[str, Any] = {"arms": {}, "quick": options.quick, "dtype": dtype}
        report["arms"][BARE] = {"tokens_per_s": tokens / statistics.median(taken[BARE])}
        print(f"{BARE:<20}{report['arms'][BARE]['tokens_per_s']:>9,.0f}")
        for name, recorder in recorders.items():
            recording = recorder.finish(network.vocab)
            order = random.Random(1).choices(range(len(recording)), k=batch * 20)
            started = time.perf_counter()
            for at in range(0, len(order), batch):
                collate(recording, order[at : at + batch])
            reading = len(order) * length / (time.perf_counter() - started)
            found = {"tokens_per_s": tokens / statistics.median(taken[name]), "read_tokens_per_s": reading,
                     "over_bare": statistics.median(b / t for b, t in zip(taken[BARE], taken[name], strict=True)),
                     "bytes_per_token": recording.manifest["bytes"] / recording.manifest["positions"]}  # fmt: skip
            report["arms"][name] = found
            print(f"{name:<20}{found['tokens_per_s']:>9,.0f}{found['over_bare']:>11.3f}{found['bytes_per_token']:>13.0f}{reading:>12,.0f}")
        compute = getattr(torch, dtype)
        trainer = Trainer(model, network, compute)
        recording = Recording(recorders["topk, K = 64"].folder)
        steps = [(collate(recording, range(at, at + batch)), texts[at : at + batch]) for at in range(0, len(texts), batch)]
        arms = {"recorded": lambda s: trainer.recorded(s[0]), "live": lambda s: trainer.live(*s)}
        trained = in_turns(arms, steps[: max(3, turns // 2)], sync)
        report["training"] = {name: tokens / statistics.median(t) for name, t in trained.items()}
        report["precision"] = precision(network, batches[0])
    measured = {
        "topk, K = 64, over bare": report["arms"]["topk, K = 64"]["over_bare"], "hidden over bare": report["arms"]["hidden"]["over_bare"],
        "reading over training": report["arms"]["topk, K = 64"]["read_tokens_per_s"] / report["training"]["recorded"],
        "recorded over live training": report["training"]["recorded"] / report["training"]["live"],
    }  # fmt: skip
    print("\ntraining, tokens/s: " + ", ".join(f"{name} {value:,.0f}" for name, value in report["training"].items()))
    print("alpha moved by, mean: " + ", ".join(f"{name} {value:.5f}" for name, value in report["precision"].items()))
    size = report["arms"]["topk, K = 64"]["bytes_per_token"]
    print("\ngoals")
    for name, least in GOALS.items():
        print(f"  {name:<30}{measured[name]:>8.2f}  at least {least:g}  {'met' if measured[name] >= least else 'NOT MET'}")
    print(f"  {'bytes per token, K = 64':<30}{size:>8.1f}  at most {BYTES_GOAL}  {'met' if size <= BYTES_GOAL else 'NOT MET'}")
    others = watch.other_cores()
    report |= {"measured": measured, "machine": describe_machine(), "versions": versions(), "git": git_state(), "other_cores": others,
               "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
    write_json(options.out, report)
    print(f"\n{report['machine']['cpu']}, {report['threads']} threads, {others:.2f} cores taken by others; JSON in {options.out}")
    if others > 0.1:
        print("Other processes were busy: do not quote these figures.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
