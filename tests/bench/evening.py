"""``make bench-evening``: the best draft for the demo's target that an hour on this machine makes, and what limits the rest.

Three parts, each a recipe of its own in the work folder, made by the product's own stages:

- ``screen``: one recording of agreements, and from it many drafts that differ in one thing each (depth, ids they guess among, loss, LoRA, layers
  chosen by search, kinds of text), trained for the same number of steps. Its curves of alpha on held-out validation text say
  which shape to train on (the test prompts are the other parts' to be judged by), and how alpha grows with depth and with tokens seen.
- ``general``: the shape named by ``--layers`` and ``--head-tokens``, from a recording with three times as many of the target's own responses, on which
  alone the training ends: at equal tokens they teach more than documents do, and cost more to have.
- ``adapted``: the same hour with a target that was tuned on agreements first (LoRA, merged); it writes and records its own text.

The hour holds responses, recording, training and score; tuning the target comes before it, for it is the user's and not the draft's. Its parts are
stated by the report. Started again, everything goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from draftstill.cli import config_path
from draftstill.decode import set_threads
from draftstill.runfolder import atomic_write, write_json
from tests.bench.sweeps import DEPLOYED, RESPONSES_LAST, STOPS, borrow, fastest, judged, made, over, table, written

PARTS = ("screen", "general", "adapted")
TEMPERATURES = (DEPLOYED, 0.0)
GOALS = {"general": {DEPLOYED: 1.6, 0.0: 2.0}, "adapted": {DEPLOYED: 2.0}}
"""Speed-up of the best arm with the tuned draft."""
HEAD = 6144
"""Ids that a draft guesses among where nothing else is said: the demo's."""


def candidates(steps: int) -> dict[str, dict[str, Any]]:
    """What the screen compares with two layers, ``HEAD`` ids, LK and all weights."""
    full = {"train": {"head_tokens": 0}, "draft": {"head_tokens": 0}}
    ids = lambda count: {"train": {"head_tokens": count}, "draft": {"head_tokens": count}}  # noqa: E731
    changed: dict[str, dict[str, Any]] = {
        "two-layers": {},
        **{f"{word}-layers": {"draft": {"layers": list(range(n))}} for word, n in (("one", 1), ("three", 3), ("four", 4), ("six", 6))},
        "all-ids": full, "16k-ids": ids(16_384), "8k-ids": ids(8_192),
        "forward-kl": {"train": {"loss": {"name": "forward_kl"}}},
        "switched": {"train": {"loss": {"name": "forward_kl", "switch": {"to": "lk", "alpha": 0.25}}}},
        "lora": {"train": {"lora": {"r": 32, "lora_alpha": 64}}},
        "searched": {"draft": {"layers": "auto", "depth": 2}},
        "documents-alone": {"train": {"phases": [{"kinds": ["document"]}]}},
        "responses-alone": {"train": {"phases": [{"kinds": ["response"]}]}},
        "responses-last": {"train": {"phases": RESPONSES_LAST}},
    }  # fmt: skip
    return {name: {**more, "train": {"max_steps": steps, **more.get("train", {})}} for name, more in changed.items()}


def recipe_value(part: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The demo's recipe with more text, and one part's drafts."""
    demo = yaml.safe_load(config_path("demo.yaml").read_text(encoding="utf-8"))
    quick, screen = options.quick, part == "screen"
    prompts, tokens = (480, 900_000) if screen else (options.prompts, options.tokens)
    text = {"prompts": 8, "heldout_prompts": 4, "max_new_tokens": 8} if quick else {"prompts": prompts, "heldout_prompts": 48}
    base: dict[str, Any] = {
        **demo, "run_dir": str(folder / part),
        "draft": {"source": "prune", "layers": [0, 1] if screen else options.layers, "head_tokens": HEAD if screen else options.head_tokens},
        "respond": {**demo["respond"], **text},
        "record": {**demo["record"], "document_tokens": 4_000 if quick else tokens},
        "train": {**demo["train"], "num_train_epochs": 3.0 if screen else options.epochs, "eval_steps": 100,
                  "head_tokens": HEAD if screen else options.head_tokens, **({"max_steps": 4} if quick else {})},
        "evaluate": {**demo["evaluate"], "candidates": ["tuned", "lookup", *(() if screen else ("composite",))],
                     "gammas": [1, 2, 3] if screen else [1, 2, 3, 4], "prompts": 4 if quick else 48,
                     "timing_prompts": 2 if quick or screen else 24, "audit_prompts": 0 if quick or screen else 4,
                     **({"max_new_tokens": 8} if quick else {})},
    }  # fmt: skip
    if screen:
        base["train"]["candidates"] = candidates(4 if quick else options.screen_steps)
    else:
        base["train"]["phases"] = RESPONSES_LAST
    if part == "adapted":
        base["adapt"] = {"r": 16, "lora_alpha": 32, "learning_rate": 5e-4, "max_tokens": 4_000 if quick else 300_000, "sequence_length": 256,
                         "eval_tokens": 1_000 if quick else 8_000}  # fmt: skip
    return base


def curve(report: dict[str, Any]) -> str:
    """Markdown: held-out alpha (temperature of the deployment, exact, over the ids it drafts from) by tokens seen, a row for each draft. Of many
    measurements those at every doubling, and the last."""
    steps = sorted({c["step"] for found in report["curves"].values() for c in found})
    shown = [step for place, step in enumerate(steps) if place & (place - 1) == 0 or step == steps[-1]]
    lines = [f"| draft | {' | '.join(f'step {s:,}' for s in shown)} |", "|---" * (1 + len(shown)) + "|"]
    for name, found in report["curves"].items():
        at = {c["step"]: f"{c['alpha_deploy']:.3f} ({c['tokens'] / 1000:,.0f}k)" for c in found}
        lines.append(f"| {name} | {' | '.join(at.get(s, '') for s in shown)} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.evening", description="The best draft of an hour; see the module.")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all, in this order)")
    parser.add_argument("--quick", action="store_true", help="very little of everything: does it run?")
    parser.add_argument("--tokens", type=int, default=700_000, help="document tokens to record in the other parts")
    parser.add_argument("--prompts", type=int, default=1440, help="responses to learn from in the other parts")
    parser.add_argument("--screen-steps", type=int, default=300)
    parser.add_argument("--epochs", type=float, default=3.5, help="passes over the recording in the other parts")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1], help="of the target, in the other parts")
    parser.add_argument("--head-tokens", type=int, default=HEAD, help="ids to guess among in the other parts (0: all)")
    parser.add_argument("--stop-after", choices=STOPS, help="stop there; the same command goes on")
    parser.add_argument("--out", type=Path, help="work folder (default: runs/bench/evening)")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    set_threads()
    folder = options.out or Path("runs/bench") / ("evening-quick" if options.quick else "evening")
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in options.parts or PARTS:
        try:
            _part(part, folder, options)
        except Exception:  # hours of other parts may be waiting behind it
            traceback.print_exc()
            failed.append(part)
    if failed:
        print(f"failed: {', '.join(failed)}; the same command tries again")
    return 1 if failed else 0


def _part(part: str, folder: Path, options: argparse.Namespace) -> None:
    """Make one part as far as asked, and print its report."""
    borrow(folder / "screen", folder / part, "corpus")
    report = made(written(folder / f"{part}.yaml", recipe_value(part, folder, options)), options.stop_after)
    if report is None:
        return
    write_json(folder / f"{part}.json", report)
    text = "".join(f"Temperature {t:g}:\n\n{table(report, t, by_prediction=part == 'screen')}\n" for t in TEMPERATURES) + curve(report)
    kinds = ("tuned", "composite")
    goals = {
        f"{part}, temperature {t:g}": ((fastest(report, t, *kinds) or {}).get("speedup"), goal) for t, goal in GOALS.get(part, {}).items()
    }
    ahead = {
        f"{part}, temperature {t:g}, over prompt lookup": (over(report, t, kinds, ("lookup",)), 1.0) for t in TEMPERATURES if part in GOALS
    }
    atomic_write(folder / f"{part}.md", text)
    print("\n" + text + "\n".join([*judged(goals), *judged(ahead, "low")]))
    spent = ", ".join(f"{stage} {seconds / 60:.1f} min" for stage, seconds in report["wall_s"].items())
    print(f"{part}: {spent}; {report['other_cores']:.2f} cores taken by others; JSON in {folder / f'{part}.json'}")


if __name__ == "__main__":
    sys.exit(main())
