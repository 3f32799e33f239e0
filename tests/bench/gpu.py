"""What the captured rounds are worth on a CUDA device: random weights of real shapes, since only sizes decide what a step costs.

Run by ``make bench-gpu`` (8 minutes at most on an H200). First the tests marked gpu, then for each target and draft:

- plain decoding, graphs on and off, in turns; the bandwidth it reaches: bytes of the weights that a step reads, over its time;
- speculative decoding at a simulated acceptance, graphs on and off, in turns with plain; over its prediction tau / (steps c + v)
  with c and v timed apart, as graphs;
- the self-pair, drafted greedily: its acceptance (bfloat16: near-ties may fall either way between widths), and whether captured
  and eager rounds write the same text.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from draftstill.decode import Decoder, ModelDrafter, Network, Request, make_network, measure_costs, random_model
from draftstill.decode.theory import predicted_speedup
from draftstill.decode.trace import metrics
from draftstill.machine import describe_machine
from draftstill.runfolder import git_state, versions, write_json

PEAKS = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "L40S": 0.864e12, "T4": 0.32e12}
"""Bytes per second of the memory, as the makers state it."""
PAIRS = [("qwen2.5-1.5b", (1, 4)), ("llama-3.1-8b", (1, 2, 4))]
GAMMA, ACCEPTANCE, PROMPT, NEW = 4, 0.8, 128, 256
GOALS = {"bandwidth of plain decoding on 8B, share of peak": 0.7, "speculative over predicted": 0.9}


def peak() -> float | None:
    """Stated bandwidth of this device, if known."""
    name = torch.cuda.get_device_name()
    if "MIG" in name or "GH200" in name:  # a part of a card, or another memory
        return None
    return next((p for key, p in PEAKS.items() if key in name), None)


def run(decoder: Decoder, prompt: list[int], seed: int) -> tuple[dict[str, Any], list[int]]:
    (trace,) = decoder.run([Request(prompt, NEW, seed=seed, ignore_eos=True)])
    return metrics([trace]), trace.tokens


def in_turns(decoders: dict[str, Decoder], prompt: list[int], repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Metrics of each, repeat by repeat, after one warm-up (captures included)."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in decoders}
    for repeat in range(repeats + 1):
        for name, decoder in decoders.items():
            m, _ = run(decoder, prompt, repeat)
            if repeat:
                found[name].append(m)
    return found


def pair(name: str, layers: int, target: Network, repeats: int) -> dict[str, Any]:
    """One draft of so many layers, as wide as its target."""
    draft = make_network(random_model(f"random:{name},num_hidden_layers={layers}", "bfloat16", "cuda", "draft", seed=1))
    prompt = torch.randint(0, target.vocab, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    arms = {
        "plain": Decoder(target, backend="graphs"),
        "plain eager": Decoder(target, backend="eager"),
        "speculative": Decoder(target, ModelDrafter(draft, GAMMA), simulate=ACCEPTANCE, backend="graphs"),
        "speculative eager": Decoder(target, ModelDrafter(draft, GAMMA), simulate=ACCEPTANCE, backend="eager"),
    }
    found = in_turns(arms, prompt, repeats)
    rate = {arm: statistics.median(m["tokens_per_s"] for m in ms) for arm, ms in found.items()}
    spread = {arm: [min(r), max(r)] for arm, ms in found.items() if (r := [m["tokens_per_s"] for m in ms])}
    costs = measure_costs(target, {"draft": draft}, PROMPT + NEW // 2, GAMMA, backend="graphs")
    last = found["speculative"][-1]
    predicted = predicted_speedup(last["tau"], last["draft_steps"] / last["rounds"], costs.c("draft", GAMMA), costs.v(GAMMA + 1))
    speedup = statistics.median(f["tokens_per_s"] / p["tokens_per_s"] for f, p in zip(found["speculative"], found["plain"], strict=True))
    limit = peak()
    return {
        "target": name, "draft_layers": layers, "gamma": GAMMA, "simulated_acceptance": ACCEPTANCE, "tokens_per_s": rate, "spread": spread,
        "bandwidth": target.step_bytes * rate["plain"], "share_of_peak": target.step_bytes * rate["plain"] / limit if limit else None,
        "speedup": speedup, "predicted": predicted, "over_predicted": speedup / predicted, "tau": last["tau"], "costs": costs.to_json(),
        "graphs_over_eager": {"plain": rate["plain"] / rate["plain eager"], "speculative": rate["speculative"] / rate["speculative eager"]},
        "engine": arms["speculative"].describe(),
        "time_split": {part: last[f"{part}_s"] / last["decode_s"] for part in ("draft", "verify", "sample", "host")},
    }  # fmt: skip


def self_pair(target: Network) -> dict[str, Any]:
    """The target as its own draft, greedily; captured against eager, and against plain."""
    prompt = torch.randint(0, target.vocab, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    captured, one = run(Decoder(target, ModelDrafter(target, GAMMA), backend="graphs"), prompt, 0)
    eager, two = run(Decoder(target, ModelDrafter(target, GAMMA), backend="eager"), prompt, 0)
    _, plain = run(Decoder(target, backend="graphs"), prompt, 0)
    first = next((i for i, (a, b) in enumerate(zip(one, plain, strict=True)) if a != b), None)
    return {"acceptance": captured["token_acceptance"], "acceptance_eager": eager["token_acceptance"], "captured_equals_eager": one == two,
            "first_difference_from_plain": first}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/gpu.json"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--targets", nargs="*", default=[name for name, _ in PAIRS])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-gpu needs a CUDA device; there is none here", file=sys.stderr)
        return 1
    started, rows, selves = time.monotonic(), [], {}
    for name, depths in PAIRS:
        if name not in options.targets:
            continue
        target = make_network(random_model(f"random:{name}", "bfloat16", "cuda", "target"))
        selves[name] = self_pair(target)
        print(f"{name}: self-pair {selves[name]}", flush=True)
        for layers in depths:
            row = pair(name, layers, target, options.repeats)
            rows.append(row)
            share = "" if row["share_of_peak"] is None else f" ({row['share_of_peak']:.0%} of peak)"
            print(f"{name}, draft of {layers}: plain {row['tokens_per_s']['plain']:.0f} tok/s, {row['bandwidth'] / 1e12:.2f} TB/s{share}; "
                  f"speculative {row['speedup']:.2f}x, {row['over_predicted']:.2f} of predicted; graphs over eager "
                  f"{row['graphs_over_eager']['plain']:.2f} and {row['graphs_over_eager']['speculative']:.2f}", flush=True)  # fmt: skip
            gc.collect()
            torch.cuda.empty_cache()
        del target
        gc.collect()
        torch.cuda.empty_cache()
    write_json(options.out, {
        "device": torch.cuda.get_device_name(), "machine": describe_machine(), "versions": versions(), "git": git_state(), "goals": GOALS,
        "pairs": rows, "self_pairs": selves, "seconds": time.monotonic() - started, "command": " ".join(sys.argv),
    })  # fmt: skip
    print(f"{time.monotonic() - started:.0f} s; {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
