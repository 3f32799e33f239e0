"""What a score decodes and compares, in files: each holds the key that decides its content, so that an interrupted score goes on at the
next one and a later score of the same run takes over what is still the same.

texts   plain decoding of all prompts to their natural end, side by side: what acceptance is counted on
laws    a teacher-forced pass of one draft over those texts
timing  one prompt decoded by one arm at one gamma, alone and to a fixed length, beside plain decoding of the same minute
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftstill.decode import Decoder, Request, Sampling
from draftstill.decode.trace import Trace, check
from draftstill.distill import Prompt, seed_of
from draftstill.evaluate.arms import PLAIN, Arm, Bench
from draftstill.evaluate.forced import forced
from draftstill.machine import LoadWatch
from draftstill.recipe import Recipe
from draftstill.recipe_io import fingerprint
from draftstill.runfolder import RunFolder, read_json, write_json

_ROWS = 16
"""Texts written side by side, and in one file."""
_GROUP = 8
"""Most arms that share one timing of plain decoding: the two then lie within a minute of each other."""
_WARM_TOKENS = 8

Timed = tuple[Arm, int]
"""An arm at one gamma."""


def plain_runs(arms: int) -> int:
    """Timings of plain decoding beside so many arms."""
    return max(1, -(-arms // _GROUP))


@dataclass(slots=True)
class Cells:
    """The cells of one score."""

    work: Path
    run: RunFolder
    bench: Bench
    identity: dict[str, Any]
    """What the target's texts depend on beside prompt and sampling: its weights, dtype, device."""
    drafts: Mapping[str, Any]
    """What each draft of ``Bench.drafts`` is: weights and head; and under ``bigram`` what its table is."""
    surroundings: dict[str, Any] = field(default_factory=dict)
    """What times depend on beside the work: machine, threads, versions."""
    git: dict[str, Any] | None = None
    """The source that times by; see ``runfolder.git_state``. Noted, but no part of the key: few commits change a time."""
    _decoders: dict[tuple[float, str, int], Decoder] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        return self.bench.recipe

    # -- warm-up ------------------------------------------------------------------------------------------------------------

    @property
    def warm_up_s(self) -> float:
        """Seconds of loading caches, capturing and compiling, that are in no timing; over all attempts at this score."""
        path = self.work / "warm_up.json"
        return float(read_json(path)["seconds"]) if path.exists() else 0.0

    # -- files --------------------------------------------------------------------------------------------------------------

    def read(self, name: str, key: str) -> dict[str, Any] | None:
        """The cell, from this score or taken over from an earlier one of the run."""
        path = self.work / "cells" / name
        for folder in (self.work, self.run.path / "score", *sorted(self.run.path.glob("score.old-*"), reverse=True)):
            there = folder / "cells" / name
            if there.is_file():
                found: dict[str, Any] = read_json(there)
                if found.get("key") == key:
                    if there != path:
                        write_json(path, found)
                    return found
        return None

    def write(self, name: str, key: str, value: dict[str, Any]) -> None:
        write_json(self.work / "cells" / name, {"key": key, **value})

    def sampling(self, temperature: float) -> Sampling:
        sampler = self.recipe.respond.sampler
        return Sampling(temperature, sampler.top_k, sampler.top_p)

    def seed(self, prompt: Prompt) -> int:
        """By the prompt's name, so that neither its place nor the other arms decide what is drawn."""
        return seed_of(self.recipe.seed, "score", prompt.id)

    # -- texts and laws -----------------------------------------------------------------------------------------------------

    def texts(
        self, domain: str, prompts: Sequence[Prompt], temperature: float, tell: Callable[[int], None] = lambda n: None
    ) -> list[dict[str, Any]]:
        """{prompt, tokens, finish} of each prompt, as plain decoding writes it to its natural end. ``tell`` hears of each new token count."""
        rows: list[dict[str, Any]] = []
        for name, key, group in self._groups(domain, prompts, temperature):
            cell = self.read(f"texts/{name}.json", key)
            if cell is None:
                decoder = self.bench.decoder(PLAIN, self.sampling(temperature), rows=_ROWS)
                most = self.recipe.evaluate.max_new_tokens
                traces = decoder.run([Request(p.ids, most, seed=self.seed(p)) for p in group])
                check(traces)
                cell = {"rows": [{"prompt": p.id, "tokens": t.tokens, "finish": t.finish} for p, t in zip(group, traces, strict=True)]}
                self.write(f"texts/{name}.json", key, cell)
            tell(sum(len(r["tokens"]) for r in cell["rows"]))
            rows += cell["rows"]
        return rows

    def laws(self, domain: str, prompts: Sequence[Prompt], temperature: float, texts: Sequence[Mapping[str, Any]],
             tell: Callable[[int], None] = lambda n: None) -> dict[str, list[dict[str, Any]]]:  # fmt: skip
        """By draft, for each text: entropy, alpha, keep, kl and outside by token; see ``forced``."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in self.bench.drafts}
        written = {t["prompt"]: t["tokens"] for t in texts}
        for name, key, group in self._groups(domain, prompts, temperature):
            places = {d: (f"laws/{name}/{fingerprint(self.drafts[d])[:12]}.json", fingerprint(key, self.drafts[d])) for d in found}
            cells = {d: self.read(*place) for d, place in places.items()}
            missing = [d for d, cell in cells.items() if cell is None]
            if missing:
                drafts = {d: self.bench.drafts[d] for d in missing}
                figures = forced(self.bench.target.network, drafts, [(p.ids, written[p.id]) for p in group], self.sampling(temperature))
                for d in missing:
                    rows = [{"prompt": p.id, "entropy": f["entropy"], **f["drafts"][d]} for p, f in zip(group, figures, strict=True)]
                    made: dict[str, Any] = {"made": self.drafts[d], "rows": rows}
                    self.write(*places[d], made)
                    cells[d] = made
            for d, cell in cells.items():
                assert cell is not None
                found[d] += cell["rows"]
            tell(sum(len(written[p.id]) for p in group))
        return found

    def _groups(self, domain: str, prompts: Sequence[Prompt], temperature: float) -> Iterator[tuple[str, str, Sequence[Prompt]]]:
        for number, first in enumerate(range(0, len(prompts), _ROWS)):
            group = prompts[first : first + _ROWS]
            key = fingerprint(
                self.identity, self._sampler(temperature), self.recipe.evaluate.max_new_tokens, [[p.id, p.ids, self.seed(p)] for p in group]
            )
            yield f"{domain}/t{temperature:g}-{number:04d}", key, group

    def _sampler(self, temperature: float) -> list[float]:
        sampler = self.recipe.respond.sampler
        return [temperature, sampler.top_k, sampler.top_p]

    # -- timing -------------------------------------------------------------------------------------------------------------

    def place(self, domain: str, number: int, prompt: Prompt, temperature: float, arm: Arm, gamma: int) -> tuple[str, str]:
        """File and key of one timing."""
        made = self.drafts.get(arm.draft or arm.kind)
        if arm.kind == "composite":
            made = [made, self.recipe.evaluate.lookup_gamma]
        key = fingerprint(self.identity, self.surroundings, self._sampler(temperature), self.recipe.evaluate.timed_tokens, prompt.id, prompt.ids,
                          self.seed(prompt), self.recipe.evaluate.backend, [arm.kind, made, gamma])  # fmt: skip
        # By what it is, not by its name: one candidate's composite is called otherwise once there is a second one.
        name = arm.name if arm.name == PLAIN else f"{arm.kind}-{key[:12]}"
        return f"timing/{domain}/t{temperature:g}/{number:04d}/{name}@{gamma}.json", key

    def timed(self, domain: str, number: int, prompt: Prompt, temperature: float, arms: Sequence[Timed],
              tell: Callable[[int, str], None] = lambda n, note: None) -> None:  # fmt: skip
        """Decode one prompt with every arm that was not timed on it yet: in turns whose order shifts with the prompt's number, at
        most eight and one plain run together, so that each speed-up comes from neighbours in time."""
        plain = self.bench.arms[PLAIN]
        places = {(a.name, g): self.place(domain, number, prompt, temperature, a, g) for a, g in [(plain, 0), *arms]}
        missing = [(a, g) for a, g in arms if self.read(*places[a.name, g]) is None]
        base = self.read(*places[PLAIN, 0])
        turn = number % len(missing) if missing else 0
        missing = missing[turn:] + missing[:turn]
        for first in range(0, len(missing), _GROUP) if missing else range(int(base is None)):
            group = missing[first : first + _GROUP]
            at = number % (len(group) + 1)
            order = [*group[:at], (plain, 0), *group[at:]]
            traces, other = self._run(prompt, temperature, order, tell)
            own = traces[at]
            for (arm, gamma), trace in zip(order, traces, strict=True):
                if arm.name == PLAIN and base is not None:
                    continue
                self.write(*places[arm.name, gamma], {
                    "prompt": prompt.id, "arm": arm.name, "gamma": gamma, "temperature": temperature, "trace": trace.to_json(),
                    "plain_s": own.decode_s, "plain_tokens": len(own.tokens), "other_cores": other, "git": self.git})  # fmt: skip
            base = {}

    def _run(
        self, prompt: Prompt, temperature: float, order: Sequence[Timed], tell: Callable[[int, str], None]
    ) -> tuple[list[Trace], float]:
        length = self.recipe.evaluate.timed_tokens
        decoders = [self._decoder(temperature, arm, gamma, prompt) for arm, gamma in order]
        watch, traces = LoadWatch(), []
        for (arm, gamma), decoder in zip(order, decoders, strict=True):
            (trace,) = decoder.run([Request(prompt.ids, length, seed=self.seed(prompt), ignore_eos=True)])
            check([trace])
            traces.append(trace)
            tell(len(trace.tokens), f"T={temperature:g} {arm.name}" + (f" gamma {gamma}" if gamma else ""))
        return traces, watch.other_cores()

    def _decoder(self, temperature: float, arm: Arm, gamma: int, prompt: Prompt) -> Decoder:
        """The arm's engine, warm."""
        key = temperature, arm.name, gamma
        if key not in self._decoders:
            started = time.monotonic()
            decoder = self.bench.decoder(arm.name, self.sampling(temperature), gamma=gamma or None)
            decoder.run([Request(prompt.ids, min(_WARM_TOKENS, self.recipe.evaluate.timed_tokens), ignore_eos=True)])
            self._decoders[key] = decoder
            write_json(self.work / "warm_up.json", {"seconds": round(self.warm_up_s + time.monotonic() - started, 3)})
        return self._decoders[key]
