"""What a draft of a given acceptance would be worth on this machine, before it is trained, or even before the pair exists.

Real forwards of real sizes; only the verdict on each proposed token is drawn at the rate asked for. What is written means nothing,
and everything that shows it says so.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftstill.decode.costs import measure_costs
from draftstill.decode.drafters import ModelDrafter
from draftstill.decode.engine import Decoder
from draftstill.decode.network import Network
from draftstill.decode.pairs import Pair, open_pair
from draftstill.decode.programs import Backend
from draftstill.decode.requests import Request
from draftstill.decode.sampling import Sampling
from draftstill.decode.theory import best_gamma, break_even, predicted_speedup
from draftstill.decode.trace import metrics
from draftstill.errors import DraftstillError
from draftstill.machine import LoadWatch, describe_machine
from draftstill.progress import say
from draftstill.runfolder import versions, write_json


@dataclass(frozen=True, slots=True)
class Simulated:
    """Figures of a simulated acceptance; speeds are medians over the repeats."""

    acceptance: float
    gamma: int
    rows: int
    prompt_tokens: int
    new_tokens: int
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    """Smallest and largest ratio of neighbouring runs."""
    tau: float
    c: float
    v: float
    predicted: float
    break_even: float | None
    best_gamma: int
    best_predicted: float
    other_cores: float
    engine: dict[str, Any]
    simulated: bool = True


def measure(target: Network, draft: Network, acceptance: float, *, gamma: int = 4, rows: int = 1, prompt_tokens: int = 64, new_tokens: int = 64,
            temperature: float = 0.0, repeats: int = 5, backend: Backend = "auto", most_gamma: int = 8) -> Simulated:  # fmt: skip
    """Plain and speculative decoding in turns, ``repeats`` times after a warm-up; c and v are timed apart."""
    sampling = Sampling(temperature)
    decoders = [Decoder(target, rows=rows, sampling=sampling, backend=backend),
                Decoder(target, ModelDrafter(draft, gamma), rows=rows, sampling=sampling, backend=backend, simulate=acceptance)]  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, min(target.vocab, draft.vocab), (rows, prompt_tokens), generator=generator).tolist()
    watch, runs = LoadWatch(), []
    for repeat in range(repeats + 1):
        requests = [Request(p, new_tokens, seed=repeat * rows + i, ignore_eos=True) for i, p in enumerate(prompts)]
        runs.append([metrics(d.run(requests)) for d in decoders])
    runs = runs[1:]
    costs = measure_costs(
        target,
        {"draft": draft},
        prompt_tokens + new_tokens // 2,
        max(gamma, most_gamma),
        rows=rows,
        backend=decoders[1].backend,
        sampling=sampling,
    )
    rates = [[m["tokens_per_s"] for m in pair] for pair in runs]
    ratios = [fast / slow for slow, fast in rates]
    tau = sum(pair[1]["emitted"] for pair in runs) / sum(pair[1]["rounds"] for pair in runs)
    c, v = costs.c("draft", gamma), costs.v(gamma + 1)
    best, best_speed = best_gamma(acceptance, costs.c_by_gamma("draft", most_gamma), costs.v_by_gamma(), most_gamma)
    plain_s, fast_s = (statistics.median(r[i] for r in rates) for i in (0, 1))
    return Simulated(
        acceptance, gamma, rows, prompt_tokens, new_tokens, plain_s, fast_s, statistics.median(ratios), min(ratios), max(ratios), tau, c, v,
        predicted_speedup(tau, _steps(runs), c, v), break_even(gamma, c, v), best, best_speed, watch.other_cores(), decoders[1].describe(),
    )  # fmt: skip


def _steps(runs: list[list[dict[str, Any]]]) -> float:
    """Draft forwards per round: fewer than gamma where a text ends."""
    return sum(pair[1]["draft_steps"] for pair in runs) / sum(pair[1]["rounds"] for pair in runs)


def simulate(target: str, draft: str | None, acceptance: float, *, sha256: str | None = None, json_path: Path | None = None,
             **options: Any) -> Simulated:  # fmt: skip
    """Measure, print, and write JSON if asked to. Sources as in a recipe, or ``random:SHAPE``; ``options`` are ``measure``'s."""
    if draft is None:
        raise DraftstillError("a simulated acceptance needs a draft whose steps can be timed", key="--draft",
                              mend="name a model, or a shape such as random:llama-3.1-8b,num_hidden_layers=2")  # fmt: skip
    pair = open_pair(target, draft, sha256=sha256)
    assert pair.draft is not None
    found = measure(pair.target, pair.draft, acceptance, **options)
    say(table(pair, found))
    if json_path is not None:
        write_json(
            json_path,
            {**asdict(found), "target": target, "draft": draft, "dtype": pair.dtype, "machine": describe_machine(), "versions": versions()},
        )
        say(f"figures in {json_path}")
    return found


def table(pair: Pair, s: Simulated) -> str:
    """For a terminal of 80 columns."""
    lost = "even a perfect draft loses" if s.break_even is None else f"loses below acceptance {s.break_even:.2f}"
    lines = [
        f"SIMULATED acceptance {s.acceptance:g}: real costs, drawn verdicts; the text means nothing.",
        f"  target {pair.names[0]}, {pair.target.parameters / 1e6:,.1f}M parameters",
        f"  draft  {pair.names[1]}, {pair.draft.parameters / 1e6 if pair.draft else 0:,.1f}M parameters, gamma {s.gamma}",
        f"  {pair.dtype} on {pair.target.device.type}, {torch.get_num_threads()} threads, {s.rows} row{'s' * (s.rows > 1)}, "
        f"prompt {s.prompt_tokens}, {s.new_tokens} new tokens",
        f"  plain        {s.plain_tokens_per_s:9.1f} tok/s",
        f"  speculative  {s.tokens_per_s:9.1f} tok/s   {s.speedup:.2f}x [{s.speedup_low:.2f}, {s.speedup_high:.2f} over the repeats]",
        f"  tau {s.tau:.2f}, c {s.c:.3f}, v {s.v:.3f}: predicted {s.predicted:.2f}x; {lost}",
        f"  best gamma at this acceptance: {s.best_gamma} (predicted {s.best_predicted:.2f}x)",
    ]
    if s.engine.get("fallback"):
        lines.append(f"  ran eagerly: {s.engine['fallback']}")
    if s.other_cores > 0.2:
        lines.append(f"  other processes kept {s.other_cores:.1f} cores busy: time it again on a quiet machine")
    return "\n".join(lines)
