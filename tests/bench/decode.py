"""``make bench-decode``: our decoder against transformers and flashspec on the same weights, machine and prompts.

How it measures:

- Everything is greedy, with the same number of new tokens in every arm and no EOS. Dtype: what draftstill picks for this machine,
  and float32 for the main pair. Threads: ``draftstill.decode.set_threads``; all arms run in this process and share the setting.
- Arms take turns prompt by prompt, in an order that shifts by one each time, so that a disturbance meets all of them. A short
  warm-up goes before. Speed-ups are ratios of two runs of the same turn; shown are their median and quartiles.
- Decode-only: our clock is the trace's, from the end of prefill, over all tokens. A peer's clock starts when its first tokens
  come out (transformers, seen by a streamer) or when its first step, which holds its prefill, ends (flashspec, by its own step
  times), and these first tokens are not counted. So neither side's decode time holds a prefill, within the very run that is timed.
  End-to-end: the wall time of the whole call, prefill included. A goal is judged by decode-only time, as speed-ups are everywhere
  in Draftstill; the end-to-end ratio stands beside it.
- The memory limit is what reading the target's weights once a token allows, at the rate at which a plain sum reads memory here: where a
  peer is close to it already, nobody can be much faster.
- Of the main pair, our speculative arm also runs with a trimmed head, which our decoder can draft from with the same weights.
- A static cache in ``generate`` runs with disable_compile, and flashspec has no compiled path on a CPU (see ``peers.py``).
- Batches: as many requests as rows. Measured over predicted = speed-up over plain / (tau / (s c + v)) while all rows are busy, with s
  draft steps per round. c (draft step) and v (verify) over a plain step are timed apart at the same batch size, before and after
  each turn of the arms, since the machine's speed drifts; each with the choice of its tokens; a draft step as the mean over a block
  behind a verify pass; drafts and verifies at positions that differ by row, as they do in use. The JSON also holds the ratio over
  whole texts, in which rows that end early leave the others a smaller batch. Assisted generation and flashspec take one row.
- Losslessness: in float32 the texts of every arm are compared with those of our plain decoding, and the rows of every batch with
  plain decoding one by one. Any difference: exit code 1. In bfloat16 near-ties flip; the JSON counts them.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from draftstill.cli import config_path
from draftstill.decode import Network, set_threads
from draftstill.decode.theory import predicted_speedup
from draftstill.decode.trace import metrics
from draftstill.machine import LoadWatch, describe_machine
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import git_state, versions, write_json
from draftstill.sources import quiet_transformers
from draftstill.stages import resolved_device, resolved_dtype
from tests.bench.pairs import Pair, cast, pairs
from tests.bench.peers import (
    ASSISTED,
    DYNAMIC,
    FLASHSPEC,
    OURS_SPECULATIVE,
    PLAIN,
    RIVAL,
    SPECULATIVE,
    STATIC,
    TRIMMED,
    Arm,
    Flashspec,
    Ours,
    Run,
    Transformers,
)
from tests.bench.tables import goals, out, quartiles, show_batches, show_conditions, show_goals, show_single

_WARM_UP_TOKENS = 8

Samples = dict[str, list[Run]]
"""Runs of each arm, turn by turn."""


class Costs(NamedTuple):
    """Of a draft step and of a verify pass, in plain steps."""

    c: float
    v: float

    @classmethod
    def of(cls, step: dict[str, float]) -> Costs:
        return cls(step["draft"] / step["plain"], step["verify"] / step["plain"])


class Bench:
    """One pair in one dtype."""

    def __init__(self, pair: Pair, target: Any, draft: Any, prompts: list[list[int]], dtype: str, device: str) -> None:
        self.pair, self.prompts = pair, prompts
        self.target, self.draft = cast(target, dtype, device), cast(draft, dtype, device)
        self.networks = Network(self.target), Network(self.draft)

    def arms(self, rows: int = 1) -> list[Arm]:
        """The arms that take any number of rows."""
        target, draft = self.networks
        return [Ours(PLAIN, target, rows=rows), Transformers(DYNAMIC, self.target), Ours(SPECULATIVE, target, draft, self.pair.gamma, rows)]

    def all_arms(self) -> list[Arm]:
        """And those that take one row, or are not worth the time with more."""
        plain, dynamic, speculative = self.arms()
        gamma, target = self.pair.gamma, self.networks[0]
        found = [plain, dynamic, Transformers(STATIC, self.target, static=True), speculative,
                 Transformers(ASSISTED, self.target, assistant=self.draft, gamma=gamma), Flashspec(FLASHSPEC, self.target, self.draft, gamma)]  # fmt: skip
        if self.pair.kept is not None:
            trimmed = Network(self.draft, head_ids=self.pair.kept)
            found.append(Ours(TRIMMED, target, trimmed, gamma))
        return found

    def memory_limit(self) -> float:
        """Tokens per second of a decoder that did nothing but read the target's weights, at the rate a plain sum reads memory."""
        buffer = torch.ones(1 << 27, device=self.target.device)
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            buffer.sum().item()
            taken.append(time.perf_counter() - started)
        return buffer.numel() * 4 / min(taken) / self.networks[0].step_bytes

    def sample(self, arms: list[Arm], rows: int, seconds: float, least: int, between: Callable[[], None] = lambda: None) -> Samples:
        """Turns of all arms until the time is up; each turn takes the next ``rows`` prompts. ``between`` is called before and after each."""
        samples: Samples = {arm.name: [] for arm in arms}
        started = time.monotonic()
        for turn in itertools.count():
            used = time.monotonic() - started
            if turn >= least and used + used / turn > seconds:
                break
            prompts = [self.prompts[(turn * rows + i) % len(self.prompts)] for i in range(rows)]
            at = turn % len(arms)
            between()
            for arm in arms[at:] + arms[:at]:
                run = arm.run(prompts, self.pair.new_tokens)
                assert all(len(text) == self.pair.new_tokens and min(text) >= 0 for text in run.texts), f"{arm.name} wrote another length"
                samples[arm.name].append(run)
        between()
        return samples

    def timed(self, arms: list[Arm], rows: int, seconds: float, least: int, between: Callable[[], None] = lambda: None) -> Samples:
        """Warm up, then sample."""
        for arm in arms:
            arm.run(self.prompts[:rows], min(self.pair.new_tokens, _WARM_UP_TOKENS))
        return self.sample(arms, rows, seconds, least, between)

    def single(self, samples: Samples) -> dict[str, Any]:
        """The table of batch 1."""
        m = metrics([t for run in samples[SPECULATIVE] for t in run.traces])
        arms: dict[str, Any] = {}
        for name, runs in samples.items():
            arms[name] = {"tokens_per_s": quartiles([r.decode_rate for r in runs]),
                          "end_to_end_tokens_per_s": quartiles([r.wall_rate for r in runs])}  # fmt: skip
            arms[name]["over"] = {}
            for ours in (o for o in RIVAL.get(name, (PLAIN,) if name in OURS_SPECULATIVE else ()) if o in samples):
                turns = list(zip(samples[ours], runs, strict=True))
                if name in OURS_SPECULATIVE:  # against our own plain decoding
                    turns = [(mine, plain) for plain, mine in turns]
                arms[name]["over"][ours] = {"decode": quartiles([o.decode_rate / t.decode_rate for o, t in turns]),
                                            "end_to_end": quartiles([o.wall_rate / t.wall_rate for o, t in turns])}  # fmt: skip
        return {"token_acceptance": m["token_acceptance"], "tau": m["tau"], "arms": arms, "same_text": same_text(samples),
                "memory_limit_tokens_per_s": self.memory_limit()}  # fmt: skip

    def batch(self, rows: int, seconds: float, least: int, repeats: int) -> dict[str, Any]:
        """One line of the table of batches."""
        taken: list[dict[str, list[float]]] = []
        samples = self.timed(self.arms(rows), rows, seconds, least, lambda: taken.append(self.step_times(rows, repeats)))
        step = {name: statistics.median(s for t in taken for s in t[name]) for name in taken[0]}
        # A machine's speed drifts by more than what is asked here, so each turn has costs of its own, timed before and after it.
        costs = [Costs.of({name: statistics.median(a[name] + b[name]) for name in a}) for a, b in itertools.pairwise(taken)]
        turns = list(zip(samples[PLAIN], samples[SPECULATIVE], strict=True))
        speedups = [fast.decode_rate / plain.decode_rate for plain, fast in turns]
        whole = [metrics(fast.traces) for _, fast in turns]
        predictions = [predicted_speedup(m["tau"], m["draft_steps"] / m["rounds"], c, v) for m, (c, v) in zip(whole, costs, strict=True)]
        busy = [(_while_all_rows(plain), _while_all_rows(fast)) for plain, fast in turns]
        generate = zip(samples[PLAIN], samples[DYNAMIC], strict=True)
        return {
            "rows": rows, "step_s": step, **dict(zip("cv", Costs.of(step), strict=True)),
            "tokens_per_s": {name: quartiles([r.decode_rate for r in runs]) for name, runs in samples.items()},
            "end_to_end_tokens_per_s": {name: quartiles([r.wall_rate for r in runs]) for name, runs in samples.items()},
            "plain_over_generate": quartiles([ours.decode_rate / theirs.decode_rate for ours, theirs in generate]),
            "tau": quartiles([m["tau"] for m in whole]), "speedup": quartiles(speedups), "predicted": quartiles(predictions),
            "measured_over_predicted": quartiles([p["token_s"] / f["token_s"] / predicted_speedup(f["tau"], f["steps"], c, v)
                                                  for (p, f), (c, v) in zip(busy, costs, strict=True)]),
            "measured_over_predicted_whole_texts": quartiles([s / p for s, p in zip(speedups, predictions, strict=True)]),
            "same_text": same_text(samples),
        }  # fmt: skip

    @torch.inference_mode()
    def step_times(self, rows: int, repeats: int) -> dict[str, list[float]]:
        """Seconds of a plain step, a verify pass and a draft step (mean over a block) of ``rows`` rows, half-way through the texts, in turns."""
        target, draft = self.networks
        middle, width = len(self.prompts[0]) + self.pair.new_tokens // 2, self.pair.gamma + 1
        uneven = [middle - row % width for row in range(rows)]
        tasks = {"plain": _step(target, [middle] * rows, 1), "verify": _step(target, uneven, width), "draft": _step(draft, uneven, 1)}
        sync = torch.cuda.synchronize if target.device.type == "cuda" else (lambda: None)
        taken: dict[str, list[float]] = {name: [] for name in tasks}
        for repeat in range(-1, repeats):
            for name, task in tasks.items():
                calls = self.pair.gamma if name == "draft" else 1
                started = time.perf_counter()
                for _ in range(calls):
                    task()
                sync()
                if repeat >= 0:  # the first turn warms up
                    taken[name].append((time.perf_counter() - started) / calls)
        return taken

    def differences(self, samples: Samples) -> dict[str, list[int]]:
        """[identical, compared] texts of every arm: ``samples`` of batch 1, and a batch, against our plain decoding one by one."""
        found = {f"{name}, 1 row": counts for name, counts in same_text(samples).items() if name != PLAIN}
        rows = min(4, len(self.prompts))
        alone = Ours(PLAIN, self.networks[0]).run(self.prompts[:rows], self.pair.new_tokens)
        for name, (run,) in self.sample(self.arms(rows), rows, 0, 1).items():
            found[f"{name}, {rows} rows"] = same_text({PLAIN: [alone], "": [run]})[""]
        return found


def _step(network: Network, starts: list[int], tokens: int) -> Callable[[], object]:
    rows = len(starts)
    cache = network.new_cache(rows, max(starts) + tokens)
    ids = torch.arange(rows * tokens, device=network.device).remainder(network.vocab).view(rows, tokens)
    return lambda: network.logits(network.forward(ids, cache, starts)).argmax(-1)


def _while_all_rows(run: Run) -> dict[str, float]:
    """tau, draft steps per round and seconds per token over the rounds before the first row ends."""
    shared = min(len(t.rounds) for t in run.traces)
    rounds = [r for t in run.traces for r in t.rounds[:shared]]
    emitted = sum(r.emitted for r in rounds)
    return {"tau": emitted / len(rounds), "steps": sum(r.draft_steps for r in rounds) / len(rounds),
            "token_s": sum(r.seconds for r in rounds) / emitted}  # fmt: skip


def same_text(samples: Samples) -> dict[str, list[int]]:
    """[identical, compared] texts of each arm against plain decoding of the same turn."""
    found = {}
    for name, runs in samples.items():
        same = [a == b for run, plain in zip(runs, samples[PLAIN], strict=True) for a, b in zip(run.texts, plain.texts, strict=True)]
        found[name] = [sum(same), len(same)]
    return found


def run_pair(pair: Pair, dtype: str, device: str, quick: bool, report: dict[str, Any]) -> None:
    """All tables of one pair."""
    target, draft, prompts = pair.load()
    for kind in dict.fromkeys((dtype, "float32")):
        timed = kind == dtype or pair.main
        bench = Bench(pair, target, draft, prompts, kind, device)
        arms = bench.all_arms()
        samples = bench.timed(arms, 1, pair.seconds, 1 if quick else 3) if timed else bench.sample(arms, 1, 0, 2)
        if timed:
            entry = {"pair": pair.name, "dtype": kind, "gamma": pair.gamma, "new_tokens": pair.new_tokens, "prompt_tokens": len(prompts[0]),
                     "single": bench.single(samples), "batches": []}  # fmt: skip
            entry["single"]["accounted"] = {a.name: statistics.median(a.accounted) for a in arms if isinstance(a, Ours)}
            show_single(entry)
            report["pairs"].append(entry)
        if kind == dtype:
            sizes = (1, 2) if quick else (1, 4, 16)
            entry["batches"] = [bench.batch(rows, pair.seconds / len(sizes), 1 if quick else 3, 1 if quick else 3) for rows in sizes]
            show_batches(entry)
        if kind == "float32":
            report["identical_in_float32"][pair.name] = bench.differences(samples)
        del bench, arms, samples
        gc.collect()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.decode", description="Our decoder against its peers; see the module.")
    parser.add_argument(
        "--quick", action="store_true", help="few tokens, tiny random models: checks that the benchmark runs, and losslessness"
    )
    parser.add_argument("--draft", type=Path, help="a trained draft of the demo's target, for example runs/demo/draft/model")
    parser.add_argument("--only", default="", help="pairs whose name holds this text")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/decode.json"), help="where the JSON goes")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("flashspec") is None:
        print("flashspec is not there: run `make bench-decode`, which fetches it into .venv-bench", file=sys.stderr)
        return 1
    set_threads()
    recipe = load_recipe(config_path("demo.yaml"))
    device, dtype = resolved_device(recipe), resolved_dtype(recipe)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "quick": options.quick, "device": device, "threads": torch.get_num_threads(),
        "machine": describe_machine(), "versions": {**versions(), "flashspec": importlib.metadata.version("flashspec")}, "git": git_state(),
        "pairs": [], "identical_in_float32": {},
    }  # fmt: skip
    if device == "cuda":
        report["gpu"] = torch.cuda.get_device_name()
    watch, started = LoadWatch(), time.monotonic()
    with quiet_transformers():
        chosen = [p for p in pairs(options.quick, options.draft, options.out.parent / "decode-corpus") if options.only in p.name]
        if not chosen:
            parser.error(f"no pair's name holds {options.only!r}")
        for pair in chosen:
            run_pair(pair, dtype, device, options.quick, report)
    report |= {"other_cores": watch.other_cores(), "seconds": round(time.monotonic() - started, 1), "goals": goals(report)}
    write_json(options.out, report)
    show_conditions(report)
    show_goals(report["goals"])
    counts = [(pair, name, *found) for pair, arms in report["identical_in_float32"].items() for name, found in arms.items()]
    out.print(f"\nfloat32: {sum(c[2] for c in counts)} of {sum(c[3] for c in counts)} texts identical to ours, plain. All in {options.out}",
              soft_wrap=True)  # fmt: skip
    wrong = [c for c in counts if c[2] != c[3]]
    for pair_name, name, same, compared in wrong:
        print(f"NOT LOSSLESS: {name}: {same} of {compared} texts identical ({pair_name})", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
