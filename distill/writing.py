"""How responses get to disk, and the decoder that writes them in process; a server is asked by ``over_http``.

A file holds a window of prompts. In process a window is decoded whole and then written: how rows stand side by side decides the last bits of a
logit, so a window that was cut off is decoded again as it was, and a resumed run ends with the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftstill.distill.prompts import Prompt, seed_of
from draftstill.distill.ranks import Ranks
from draftstill.recipe import Recipe, Respond
from draftstill.runfolder import read_json, write_json

FINISHED = ("eos", "stop", "length", "context")
"""Ends of a text that can be learnt from; whatever else a server says (a filter, an abort) leaves no row."""
TRUNCATED = ("length", "context")
REFUSED, TOO_LONG = "refused by the server", "prompt longer than the server's context"
"""Ends of a row that was never answered."""
_FILES = 16
"""Files that a side has at least, where it has that many batches: a restart loses a sixteenth of it, and as many processes can share it."""
RESPOND, INSTRUCT = "respond", "instruct"
"""What is written, and so which stream of random numbers: answers to prompts; instructions, of which a cut-off one is still looked at."""
Row = dict[str, Any]
Window = tuple[Path, Sequence[Prompt]]


class Engine(Protocol):
    """Writes windows of prompts to their files; ``tell`` hears of every new token count."""

    def write(self, windows: Sequence[Window], length: int, salt: str, tell: Callable[[int], None]) -> None: ...


def windows(folder: Path, stem: str, prompts: Sequence[Prompt], settings: Respond) -> list[Window]:
    """The files of a list of prompts; they depend on nothing but their number and the recipe."""
    batches = -(-len(prompts) // settings.batch_size)
    step = settings.batch_size * max(1, min(settings.window, batches // _FILES))
    return [(folder / f"{stem}-{n:05d}.json", prompts[at : at + step]) for n, at in enumerate(range(0, len(prompts), step))]


def written(engine: Engine, found: Sequence[Window], here: Ranks, length: int, salt: str, tell: Callable[[int], None]) -> None:
    """Make sure that this process's share of the files is there. A file of other prompts is written anew."""
    missing = []
    for number, (path, prompts) in enumerate(found):
        if here.mine(number):
            rows = read_json(path) if path.exists() else None
            if rows is not None and [r["prompt_id"] for r in rows] == [p.id for p in prompts]:
                tell(sum(len(r.get("response", ())) for r in rows))
            else:
                missing.append((path, prompts))
    if missing:
        engine.write(missing, length, salt, tell)


def read_rows(found: Sequence[Window]) -> Iterator[Row]:
    """All rows, dropped ones among them, in order."""
    for path, _ in found:
        yield from read_json(path)


def row_of(prompt: Prompt, tokens: Sequence[int], finish: str, settings: Respond, salt: str) -> Row:
    """What is kept of a response. A dropped one leaves its prompt's name and its end, so that it is counted."""
    if finish not in FINISHED or (salt == RESPOND and settings.truncated == "drop" and finish in TRUNCATED):
        return {"prompt_id": prompt.id, "dropped": True, "finish": finish}
    return {
        "prompt_id": prompt.id,
        "prompt": prompt.ids,
        "supervised_from": prompt.supervised_from,
        "response": list(tokens),
        "finish": finish,
    }


class InProcess:
    """The decoder: rows side by side, waiting ones enter as others finish; with ``respond.draft`` speculatively."""

    def __init__(self, recipe: Recipe, target: Any) -> None:
        from draftstill.decode import Decoder, ModelDrafter, Sampling

        settings, sampler = recipe.respond, recipe.respond.sampler
        drafter = ModelDrafter(_draft(recipe, target), settings.draft_gamma) if settings.draft else None
        self.recipe = recipe
        self.decoder = Decoder(target.network, drafter, sampling=Sampling(**sampler.model_dump()), eos=target.eos, rows=settings.batch_size,
                               steady=True)  # fmt: skip

    def write(self, windows: Sequence[Window], length: int, salt: str, tell: Callable[[int], None]) -> None:
        from draftstill.decode import Request

        for path, prompts in windows:
            # Of similar length side by side: a step reads the cache up to the longest row.
            order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
            requests = [Request(prompts[i].ids, length, seed=seed_of(self.recipe.seed, salt, prompts[i].id)) for i in order]
            traces = dict(zip(order, self.decoder.run(requests, on_tokens=lambda _, __, new: tell(len(new))), strict=True))
            write_json(
                path, [row_of(p, traces[i].tokens, traces[i].finish or "none", self.recipe.respond, salt) for i, p in enumerate(prompts)]
            )


def _draft(recipe: Recipe, target: Any) -> Any:
    from draftstill.decode import load_draft

    assert recipe.respond.draft is not None
    return load_draft(recipe.respond.draft, "respond.draft.source", target, recipe).network
