"""Acceptance and speed in a running vLLM, SGLang or llama.cpp server, on the score's own prompts and beside its figures:
``draftstill evaluate RECIPE --server URL [--baseline-server URL]``.

Acceptance is counted on texts to their natural end. Speed is the ratio to a second server that is the same but for the draft, both
writing a fixed number of tokens, prompt by prompt in turns. Requests go one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftstill.corpus import prepare_corpus, stored_documents
from draftstill.decode import load_target
from draftstill.distill import Answer, Ask, Client, Prompt, seed_of
from draftstill.errors import DraftstillError
from draftstill.evaluate.adapters import Acceptance, Adapter, Counters, adapter_of
from draftstill.evaluate.domains import held_out
from draftstill.evaluate.stats import Interval, paired_ratio
from draftstill.progress import Progress, say
from draftstill.recipe import OWN, Recipe
from draftstill.runfolder import RunFolder, read_json, write_json
from draftstill.stages import stages

_SETTLE_S = 5.0
"""Longest wait for counters to catch up with answers; servers update them once a second or at the end of a step."""
_WARM_TOKENS = 8
Tell = Callable[[int], None]


@dataclass(slots=True)
class Watched:
    """A server whose counters are read around our requests."""

    client: Client
    adapter: Adapter
    metrics: bool
    """Whether it shows a metrics page; without one nobody can tell whether others use it, and a server that keeps its counts there alone cannot be scored."""

    @classmethod
    def at(cls, url: str, option: str, wants_draft: bool) -> Watched:
        client = Client(url, key=option, retries=1)
        client.health()
        about = client.about
        adapter = adapter_of(about.kind, url)
        if wants_draft and about.speculates is False:
            raise DraftstillError(f"the {about.kind} server says that it does not speculate", key=option, value=url,
                                  mend="start it with the draft: `draftstill publish RECIPE` writes the command into the card")  # fmt: skip
        return cls(client, adapter, bool(_page(client)))

    def counters(self) -> Counters:
        return _page(self.client) if self.metrics else {}

    def quiet(self) -> Counters:
        """A reading with nothing under way.

        Raises:
            DraftstillError: somebody else's requests are.
        """
        deadline = time.monotonic() + _SETTLE_S
        while (busy := self.adapter.under_way(found := self.counters())) and time.monotonic() < deadline:
            time.sleep(0.05)
        if busy:
            raise DraftstillError(f"the server has {busy} requests under way that are not ours", key=self.client.key, value=self.client.url,
                                  mend="measure it while nobody else uses it")  # fmt: skip
        return found

    def settled(self, before: Counters, requests: int, tokens: int) -> Counters:
        """A reading that has caught up with our answers.

        Raises:
            DraftstillError: it counts more than ours.
        """
        deadline = time.monotonic() + _SETTLE_S
        found = self.counters()
        while self.metrics and not self.adapter.settled(before, found, requests, tokens) and time.monotonic() < deadline:
            time.sleep(0.05)
            found = self.counters()
        other = self.adapter.foreign(before, found, requests, tokens) if self.metrics else None
        if other:
            raise DraftstillError(f"the server counted {other} while it was measured: somebody else uses it", key=self.client.key,
                                  value=self.client.url, mend="measure it while nobody else uses it; nothing was written")  # fmt: skip
        return found


def _page(client: Client) -> dict[str, float]:
    from draftstill.distill import ServerError

    try:
        return client.counters()
    except ServerError as error:
        if error.status in (404, 405, 501):  # llama.cpp without --metrics answers 501
            return {}
        raise


def score_server(recipe: Recipe, run: RunFolder, url: str, baseline_url: str | None = None) -> dict[str, Any]:
    """Score a server, print the figures beside the score's own, and write them to ``served.json`` in the score's folder.

    Returns:
        schema, servers: by kind what ``measure`` found, the latest of each kind.

    Raises:
        DraftstillError: a server is not of a known kind, does not answer, does not draft, or is used by others; nothing is written then.
    """
    folder = stages(recipe, run)["score"].folder
    score = read_json(folder / "score.json")
    served = Watched.at(url, "--server", wants_draft=True)
    baseline = None if baseline_url is None else Watched.at(baseline_url, "--baseline-server", wants_draft=False)
    if baseline is not None and (baseline.client.url == served.client.url or baseline.adapter.kind != served.adapter.kind):
        raise DraftstillError("the baseline is the same kind of server, started without the draft, at an address of its own", key="--baseline-server",
                              value=baseline_url, mend="start it a second time without the draft")  # fmt: skip
    target = load_target(recipe)
    documents = stored_documents(prepare_corpus(recipe, run), "test")
    prompts = held_out(recipe, documents, target.tokenizer, recipe.evaluate.prompts)
    found = measure(recipe, prompts, served, baseline)
    found["own"] = own_figures(score, found)
    path = folder / "served.json"
    kept: dict[str, Any] = read_json(path) if path.exists() else {"schema": 1, "servers": {}}
    kept["servers"][found["kind"]] = found
    write_json(path, kept)
    print("\n" + served_table(found))
    say(f"figures in {path}")
    return kept


def measure(recipe: Recipe, prompts: Sequence[Prompt], served: Watched, baseline: Watched | None) -> dict[str, Any]:
    """The server's figures at each temperature of the score.

    Returns:
        kind, version, model, url, validated, watched (whether foreign traffic could have been seen), prompts, temperatures: for each
        the acceptance record and, with a baseline, ``speedup`` with its interval, ``speed_of`` (decode or whole requests), tokens_per_s
        of both, and how many greedy texts are the same.
    """
    settings, about = recipe.evaluate, served.client.about
    rows = []
    passes = len(settings.temperatures) * len(prompts) * (1 if baseline is None else 3)
    with Progress("serve", passes, "texts") as progress:
        done = 0

        def tell(texts: int) -> None:
            nonlocal done
            done += texts
            progress.update(done)

        for temperature in settings.temperatures:
            row: dict[str, Any] = {
                "temperature": temperature,
                "acceptance": _acceptance(recipe, prompts, served, temperature, tell).to_json(),
            }
            if baseline is not None:
                row |= _speed(recipe, prompts, served, baseline, temperature, tell)
            rows.append(row)
    return {
        "kind": about.kind, "version": about.version, "model": about.model, "url": served.client.url, "validated": served.adapter.validated,
        "watched": served.metrics, "prompts": len(prompts), "max_new_tokens": settings.max_new_tokens,
        "baseline": None if baseline is None else {"url": baseline.client.url, "version": baseline.client.about.version},
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "temperatures": rows,
    }  # fmt: skip


def _ask(recipe: Recipe, prompt: Prompt, temperature: float, *, tokens: int, ignore_eos: bool) -> Ask:
    sampler = recipe.respond.sampler
    return Ask(
        prompt.ids, tokens, temperature, sampler.top_k, sampler.top_p, seed=seed_of(recipe.seed, "score", prompt.id), ignore_eos=ignore_eos
    )


def _written(answer: Answer) -> int:
    """Tokens of an answer.

    Raises:
        DraftstillError: it does not say: there is nothing to compare with the counters.
    """
    if answer.ids is not None:
        return len(answer.ids)
    told = (answer.raw.get("usage") or {}).get("completion_tokens") or (answer.raw.get("meta_info") or {}).get("completion_tokens")
    if told is None:
        raise DraftstillError("the server's answer says neither its token ids nor how many tokens it wrote", key="--server")
    return int(told)


def _warm(recipe: Recipe, prompt: Prompt, server: Watched, temperature: float) -> None:
    """One request that is not counted: what a server does once is then done."""
    before = server.quiet()
    answer = server.client.complete(_ask(recipe, prompt, temperature, tokens=_WARM_TOKENS, ignore_eos=True))
    server.settled(before, 1, _written(answer))


def _acceptance(recipe: Recipe, prompts: Sequence[Prompt], served: Watched, temperature: float, tell: Tell) -> Acceptance:
    _warm(recipe, prompts[0], served, temperature)
    before, answers, tokens = served.quiet(), [], 0
    for prompt in prompts:
        answer = served.client.complete(_ask(recipe, prompt, temperature, tokens=recipe.evaluate.max_new_tokens, ignore_eos=False))
        answers.append(answer.raw)
        tokens += _written(answer)
        tell(1)
    return served.adapter.record(before, served.settled(before, len(prompts), tokens), answers, tokens)


def _speed(recipe: Recipe, prompts: Sequence[Prompt], served: Watched, baseline: Watched, temperature: float, tell: Tell) -> dict[str, Any]:
    """Both servers write each prompt's text to the full length, the order changing from prompt to prompt."""
    pair = (baseline, served)
    length = recipe.evaluate.max_new_tokens
    for server in pair:
        _warm(recipe, prompts[0], server, temperature)
    before = [server.quiet() for server in pair]
    seconds: list[list[float]] = [[], []]
    decode: list[list[float | None]] = [[], []]
    tokens: list[list[int]] = [[], []]
    ids: list[list[list[int] | None]] = [[], []]
    for number, prompt in enumerate(prompts):
        for i in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            answer = pair[i].client.complete(_ask(recipe, prompt, temperature, tokens=length, ignore_eos=True))
            seconds[i].append(time.perf_counter() - started)
            decode[i].append(pair[i].adapter.decode_s(answer.raw))
            tokens[i].append(_written(answer))
            ids[i].append(answer.ids)
            tell(1)
    for i, server in enumerate(pair):
        server.settled(before[i], len(prompts), sum(tokens[i]))
    decoded = [[s for s in row if s] for row in decode]
    whole = all(len(row) == len(prompts) for row in decoded)
    taken = decoded if whole else seconds
    keys: dict[str, Any] = {"confidence": recipe.evaluate.confidence, "resamples": recipe.evaluate.bootstrap, "seed": recipe.seed}
    ratio: Interval = paired_ratio(taken[0], taken[1], tokens[0], tokens[1], **keys)
    total: Interval = paired_ratio(seconds[0], seconds[1], tokens[0], tokens[1], **keys)
    known = [(a, b) for a, b in zip(*ids, strict=True) if a is not None and b is not None]
    return {
        "speedup": ratio.to_json(), "speed_of": "decode" if whole else "whole requests", "request_speedup": total.to_json(),
        "tokens_per_s": sum(tokens[1]) / sum(taken[1]), "baseline_tokens_per_s": sum(tokens[0]) / sum(taken[0]),
        "same_texts": sum(a == b for a, b in known) if temperature == 0 and known else None,
    }  # fmt: skip


def own_figures(score: Mapping[str, Any], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The score's row of the published draft at the server's gamma, by temperature; none where that gamma was not scored, or the server does not
    tell it: figures of another gamma are no comparison."""
    published = score.get("publish") or "tuned"
    rows = []
    for t in found["temperatures"]:
        gamma = t["acceptance"]["gamma"]
        able = [r for r in score.get("sweep", score["arms"]) if r["arm"] == published and r["temperature"] == t["temperature"]
                and r.get("domain", OWN) == OWN]  # fmt: skip
        # Near the end of a text fewer are drafted, so a server's mean lies a little below its setting.
        near = [r for r in able if gamma is not None and abs(r["gamma"] - gamma) <= 0.5]
        if not near:
            continue
        r = min(near, key=lambda r: abs(r["gamma"] - gamma))
        counts = r.get("counts") or {}
        rows.append({"temperature": t["temperature"], "arm": r["arm"], "gamma": r["gamma"], "acceptance": counts.get("acceptance") or r["acceptance"],
                     "tau": counts.get("tau"), "speedup": r["speedup"]})  # fmt: skip
    return rows


def served_table(found: Mapping[str, Any]) -> str:
    """For a terminal."""
    own = {r["temperature"]: r for r in found["own"]}
    lines = [
        f"{found['kind']} {found['version'] or ''} at {found['url']}, {found['prompts']} held-out prompts, one at a time".replace("  ", " ")
    ]
    if not found["validated"]:
        lines.append("  this adapter was tested on documented output, not yet on a real server")
    if not found["watched"]:
        lines.append("  the server shows no metrics page, so requests of others would not have been seen")
    lines.append(f"  {'T':<4} {'':<10} {'gamma':>6} {'acceptance':>10} {'tau':>6}  {'speed-up':<22}")
    for t in found["temperatures"]:
        a = t["acceptance"]
        lines.append(f"  {t['temperature']:<4g} {'server':<10} {_number(a['gamma']):>6} {a['acceptance']:>10.1%} {_number(a['tau']):>6}  "
                     f"{_times(t.get('speedup'))}")  # fmt: skip
        mine = own.get(t["temperature"])
        told = "not comparable: the server does not say its gamma" if a["gamma"] is None else "not scored at this gamma"
        lines.append(f"  {'':<4} {'our own':<10} " + (told if mine is None else f"{mine['gamma']:>6} {_share(mine['acceptance']):>10} "
                     f"{_number((mine['tau'] or {}).get('estimate')):>6}  {_times(mine['speedup'])}"))  # fmt: skip
    a = found["temperatures"][0]["acceptance"]
    lines.append(
        f"  counts from {a['source']}; the draft picks its tokens {a['sampling']}; ours are sampled, which is accepted more often at T > 0"
    )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(interval: Mapping[str, Any] | None) -> str:
    return "-" if interval is None else f"{interval['estimate']:.1%}"


def _times(interval: Mapping[str, Any] | None) -> str:
    if interval is None:
        return "-"
    if str(interval["method"]).startswith("none"):
        return f"{interval['estimate']:.2f}x"
    return f"{interval['estimate']:.2f}x [{interval['low']:.2f}, {interval['high']:.2f}]"
