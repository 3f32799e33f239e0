"""The front door: verbs of the command line.

Top layer: only it, ``running`` and ``plan`` may reach into decode, distill, train and evaluate, and only inside functions, so that
``--help`` and ``plan`` start without torch.
"""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftstill import running
from draftstill.errors import DraftstillError
from draftstill.guard import GateMissed, guarded, prepare_environment

if TYPE_CHECKING:
    from draftstill.runfolder import RunFolder


class Backends(StrEnum):
    """How the decoder's rounds run."""

    auto = "auto"
    eager = "eager"
    graphs = "graphs"
    compile = "compile"


app = typer.Typer(
    name="draftstill",
    help="Distil a target model's token distributions into a small draft model, and prove what it is worth.",
    epilog="A run goes on where it stopped: after an interruption give the same command again.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipe_app = typer.Typer(help="Look at recipes: schema, resolved values, reference page.", no_args_is_help=True)
recording_app = typer.Typer(help="Look at recordings.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")
app.add_typer(recording_app, name="recording")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file, for example configs/demo.yaml", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Values that replace the file's: train.learning_rate=2e-4", show_default=False),
]
SetAside = Annotated[bool, typer.Option("--set-aside", help="Keep a stage that another recipe made as STAGE.old-N and make a new one.")]


def _audit(recipe_path: Path, overrides: list[str] | None, set_aside: bool) -> None:
    recipe, run = running.open_run(recipe_path, overrides, set_aside)
    with run.lock():
        running.through("draft", recipe, run)
        wrong = running.face("evaluate", "audit_run")(recipe, run)
    if wrong:
        raise GateMissed("\n".join(wrong))


def _show_score(run: RunFolder) -> dict[str, Any]:
    from draftstill.evaluate.report import to_terminal
    from draftstill.runfolder import read_json

    folder = run.path / "score"
    score = read_json(folder / "score.json")
    print("\n" + to_terminal(score, {"html": folder / "report.html", "markdown": folder / "report.md"}))
    return score


@app.command()
def plan(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Say what a run will do, reuse and need; start nothing."""
    from draftstill.plan import plan as describe
    from draftstill.plan import problems

    resolved, run = running.open_run(recipe, overrides)
    print(describe(resolved, run))
    if problems(resolved):
        raise typer.Exit(1)


@app.command()
def adapt(recipe: RecipePath, overrides: Overrides = None, set_aside: SetAside = False) -> None:
    """Tune the target itself on the corpus, where the recipe has a section adapt."""
    if running.open_run(recipe, overrides)[0].adapt is None:
        raise DraftstillError("the recipe does not ask for a tuned target", key="adapt",
                              mend="add the section adapt, for example adapt: {r: 16}; without it the target is taken as it is")  # fmt: skip
    running.make("adapted", "distill", recipe, overrides, set_aside)


@app.command()
def distill(recipe: RecipePath, overrides: Overrides = None, set_aside: SetAside = False) -> None:
    """Corpus, then the target's responses, then the recording of its distributions."""
    running.make("recording", "train", recipe, overrides, set_aside)


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None, set_aside: SetAside = False) -> None:
    """Train the draft on the recording (on many devices: accelerate launch -m draftstill.train RECIPE)."""
    running.make("draft", "evaluate", recipe, overrides, set_aside)


@app.command()
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    set_aside: SetAside = False,
    min_speedup: Annotated[float | None, typer.Option(help="Exit 2 if the lower end of the winner's speed-up is below this.")] = None,
    min_alpha: Annotated[float | None, typer.Option(help="Exit 2 if the tuned draft's alpha is below this.")] = None,
    load: Annotated[
        bool,
        typer.Option("--load", help="Measure throughput at the batch sizes of evaluate.batches, too; of 1, 4 and 16 if it names none."),
    ] = False,
    audit: Annotated[bool, typer.Option("--audit", help="Check losslessness alone, thoroughly; exit 2 if a check fails.")] = False,
    server: Annotated[
        str | None, typer.Option(help="Measure a running vLLM, SGLang or llama.cpp server beside the score.", show_default=False)
    ] = None,
    baseline_server: Annotated[
        str | None, typer.Option(help="With --server: the same server without the draft, for its speed-up.", show_default=False)
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier score.json; exit 2 if a figure regressed beyond its interval.", show_default=False)
    ] = None,
) -> None:
    """Score every candidate draft by decoding with it; write the report."""
    alone = "--audit" if audit else "--server" if server is not None else None
    others: dict[str, object] = {"--min-speedup": min_speedup, "--min-alpha": min_alpha, "--load": load or None, "--compare": compare}
    if audit:
        others |= {"--server": server, "--baseline-server": baseline_server}
    for option, value in others.items():
        if alone and value is not None:
            raise DraftstillError(f"would be left out beside {alone}", key=option, value=None if value is True else str(value),
                                  mend=f"run the command twice: once with {alone}, once with {option}")  # fmt: skip
    if baseline_server is not None and server is None:
        raise DraftstillError("--baseline-server belongs to --server", mend="give both addresses")
    old = None if compare is None else running.face("evaluate", "old_score")(compare)
    if audit:
        _audit(recipe, overrides, set_aside)
        return
    if load and running.open_run(recipe, overrides)[0].evaluate.batches == (1,):
        overrides = [*(overrides or ()), "evaluate.batches=[1,4,16]"]
    resolved, run = running.make("score", "publish", recipe, overrides, set_aside)
    if server is not None:
        with run.lock():
            running.face("evaluate", "score_server")(resolved, run, server, baseline_server)
        return
    shown = _show_score(run)
    missed = gates(shown, min_speedup, min_alpha)
    if old is not None:
        missed += running.face("evaluate", "compare_scores")(shown, old, run.path / "score")
    if missed:
        raise GateMissed("\n".join(missed))


@app.command()
def publish(
    recipe: RecipePath,
    overrides: Overrides = None,
    set_aside: SetAside = False,
    push: Annotated[bool, typer.Option("--push", help="Send the folder to the Hub repository publish.repo_id.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what --push would send, and send nothing.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the folder for five servers; exit 2 if a check fails.")] = False,
    served: Annotated[bool, typer.Option("--served", help="With --check: measure in a real llama.cpp server, too.")] = False,
) -> None:
    """Write the checked, documented folder that others load; --push sends it to the Hub."""
    if served and not check:
        raise DraftstillError("--served belongs to --check", mend="give both: draftstill publish RECIPE --check --served")
    # --check looks at the folder that lies there; a dry run by itself makes none.
    resolved, run = running.make("score" if dry_run and not check else "published", None, recipe, overrides, set_aside)
    if check:
        with run.lock():
            passed = running.face("evaluate", "check_published")(resolved, run, served=served)
        if not passed:
            raise GateMissed("a check of the published folder failed; the mends stand above")
    if push or dry_run:
        with run.lock():
            running.face("evaluate", "publish")(resolved, run, push=push, dry_run=dry_run)


@app.command()
def run(recipe: RecipePath, overrides: Overrides = None, set_aside: SetAside = False) -> None:
    """All stages, reusing each whose inputs did not change."""
    _, folder = running.make("published", None, recipe, overrides, set_aside)
    _show_score(folder)


@app.command()
def decode(
    target: Annotated[str, typer.Option(help="Model source: Hub id, folder, .gguf file or pinned wheel.", show_default=False)],
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads it from standard input.", show_default=False)] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model; without one, plain decoding.", show_default=False)] = None,
    gamma: Annotated[int, typer.Option(min=0, max=64, help="Tokens proposed per round.")] = 4,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Choose gamma by measured costs and acceptance.")] = False,
    min_confidence: Annotated[float, typer.Option(min=0.0, max=1.0, help="Stop a block where the draft is less sure.")] = 0.0,
    lookup: Annotated[bool, typer.Option("--lookup", help="Prompt lookup first, the draft elsewhere.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k likeliest tokens (0: all).")] = 0,
    top_p: Annotated[float, typer.Option(max=1.0, help="Keep the smallest set of this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Keep tokens this likely, relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens of the text get less likely.")] = 1.0,
    no_repeat_ngram: Annotated[int, typer.Option(min=0, help="Never write the same n tokens twice (0: may).")] = 0,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="No end of text before so many tokens.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="End the text at this string; may be given again.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's turn, by the chat template.")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="With -: each line of standard input is a prompt.")] = False,
    backend: Annotated[Backends, typer.Option(help="How rounds run; auto: graphs on CUDA, else eager.")] = Backends.auto,
    simulate_acceptance: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, show_default=False, help="Time the pair at this acceptance instead; sources may be random:SHAPE."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Texts side by side (simulated acceptance only).")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the trace here.", show_default=False)] = None,
    sha256: Annotated[str | None, typer.Option(help="Expected SHA-256 of a wheel or .gguf target.", show_default=False)] = None,
) -> None:
    """Watch accepted and corrected tokens arrive, or time a pair at a simulated acceptance."""
    if simulate_acceptance is not None:
        options: dict[str, Any] = {
            "gamma": gamma,
            "rows": rows,
            "new_tokens": max_new_tokens,
            "temperature": temperature,
            "backend": backend.value,
        }
        running.face("decode", "simulate")(target, draft, simulate_acceptance, sha256=sha256, json_path=json_path, **options)
        return
    if prompt is None:
        raise DraftstillError("there is no prompt", mend="give a text to continue, or - to read it from standard input")
    text = sys.stdin.read() if prompt == "-" else prompt
    prompts = [line for line in text.splitlines() if line.strip()] if lines else [text]
    if not any(prompts):
        raise DraftstillError("the prompt is empty", mend="give a text to continue")
    running.face("decode", "show")(
        target, draft, prompts, gamma=gamma, max_new_tokens=max_new_tokens, seed=seed, lookup=lookup, adaptive=adaptive, min_confidence=min_confidence,
        backend=backend.value, chat=chat, stop=stop or (), json_path=json_path, sha256=sha256, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, no_repeat_ngram=no_repeat_ngram, min_new_tokens=min_new_tokens,
    )  # fmt: skip


@app.command()
def demo(overrides: Overrides = None, set_aside: SetAside = False) -> None:
    """The main job on a real model and real contracts, small enough for a laptop."""
    from draftstill.progress import say

    recipe_path = config_path("demo.yaml")
    resolved, folder = running.open_run(recipe_path, overrides, set_aside)
    say("The demo tunes a small draft for a real target on real contract text, and measures what it gains.")
    say(f"  target   {resolved.target.source}")
    say(f"  corpus   {resolved.corpus.source}")
    say(f"  recipe   {recipe_path}")
    say(f"  results  {folder.path.resolve()}")
    say("It is sized for 2 CPU cores and under 20 minutes, downloads included; each step shows the time it still takes.")
    say("Ctrl-C is safe at any moment: the same command goes on where it stopped.\n")
    running.make("published", None, recipe_path, overrides, set_aside)
    _show_score(folder)


@recipe_app.command("new")
def recipe_new(path: Annotated[Path, typer.Argument(help="Where to write it, for example my.yaml.", show_default=False)]) -> None:
    """Write a commented recipe for your own target and text."""
    from draftstill.runfolder import atomic_write

    if path.exists():
        raise DraftstillError("there is a file of this name already", value=str(path), mend="give another name; nothing was overwritten")
    atomic_write(path, config_path("contracts.yaml").read_text(encoding="utf-8"))
    print(f"wrote {path}; change the lines marked CHANGE, then: draftstill plan {shlex.quote(str(path))}")


@recipe_app.command("schema")
def recipe_schema_() -> None:
    """Print the JSON schema that editors complete from."""
    from draftstill.recipe_io import recipe_schema

    print(recipe_schema(), end="")


@recipe_app.command("show")
def recipe_show(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Print the resolved recipe: every key, defaults included."""
    from draftstill.recipe_io import dump_recipe

    print(dump_recipe(running.open_run(recipe, overrides)[0]), end="")


@recipe_app.command("reference")
def recipe_reference_() -> None:
    """Print the reference of all keys as Markdown (docs/recipe.md)."""
    from draftstill.reference import reference_page

    print(reference_page(), end="")


@recording_app.command("inspect")
def recording_inspect(
    path: Annotated[str, typer.Argument(help="The recording folder of a run, or an fsspec address.", show_default=False)],
) -> None:
    """Say what a recording holds and whether it is whole."""
    print(running.face("distill", "inspect")(path))


def config_path(name: str) -> Path:
    """A recipe that ships with Draftstill: inside an installed wheel, or beside the package in a source tree."""
    package = Path(__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / name).exists():
            return folder / name
    raise DraftstillError(f"the packaged recipe {name} is missing", mend="install Draftstill again")


def gates(score: dict[str, Any], min_speedup: float | None, min_alpha: float | None) -> list[str]:
    """Gates that the score misses. A figure that was not measured passes no gate."""
    missed = []
    winner = score["winner"]
    low = (winner.get("speedup") or {}).get("low")
    if min_speedup is not None and (low is None or low < min_speedup):
        found = "there is no winner" if low is None else f"it is {low:.2f}"
        missed.append(f"--min-speedup {min_speedup}: {found} (lower end of the winner's interval at the deployment temperature)")
    published = score.get("publish") or "tuned"
    tuned = [arm for arm in score["arms"] if arm["arm"] == published and arm["temperature"] == winner["temperature"]]
    alpha = tuned[0]["alpha"] if tuned else None
    if min_alpha is not None and (alpha is None or alpha < min_alpha):
        found = "it was not measured" if alpha is None else f"it is {alpha:.3f}"
        missed.append(f"--min-alpha {min_alpha}: {found} (the tuned draft's alpha at the deployment temperature)")
    return missed


def main() -> None:
    """Exit codes: 0 pass, 1 an error, 2 a missed gate, 130 stopped by the user, 143 by SIGTERM."""
    prepare_environment()
    sys.exit(guarded(app))
