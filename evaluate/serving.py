"""A draft's acceptance in a real llama.cpp server, read from the server's own counters, beside that of our decoder on the same prompts.

The server is the one inside the ``xllamacpp`` wheel: llama.cpp's own HTTP server, here in a process of its own, on loopback only. It is
driven by the same command line that a card prints, each option of which is set on the server's parameters.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError

_START_S, _REQUEST_S = 120.0, 300.0


def _draft(params: Any) -> Any:
    return params.speculative.draft


def _set_types(params: Any, text: str) -> None:
    import xllamacpp

    params.speculative.types = [
        getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{t.upper().replace('-', '_')}") for t in text.split(",")
    ]


def _set(where: Callable[[Any], Any], name: str, kind: Callable[[str], Any]) -> Callable[[Any, str], None]:
    return lambda params, text: setattr(where(params), name, kind(text))


_OPTIONS: dict[str, Callable[[Any, str], None]] = {
    "-m": _set(lambda p: p.model, "path", str),
    "-md": _set(lambda p: _draft(p).mparams, "path", str),
    "--spec-type": _set_types,
    "--spec-draft-n-max": _set(_draft, "n_max", int),
    "--spec-draft-n-min": _set(_draft, "n_min", int),
    "--spec-draft-p-min": _set(_draft, "p_min", float),
    "-c": _set(lambda p: p, "n_ctx", int),
    "-np": _set(lambda p: p, "n_parallel", int),
    "-t": _set(lambda p: p.cpuparams, "n_threads", int),
}
_SWITCHES = {"--metrics": _set(lambda p: p, "endpoint_metrics", bool)}


def parse_command(command: str) -> list[tuple[str, str]]:
    """Options of a ``llama-server`` command line, in order; a switch has an empty value.

    Raises:
        DraftstillError: another program, or an option that is not known here.
    """
    program, *words = shlex.split(command.replace("\\\n", " "))
    found, rest = [], iter(words)
    for word in rest:
        if word not in _OPTIONS and word not in _SWITCHES:
            raise DraftstillError(
                "this llama-server option is not known to the embedded server",
                value=word,
                mend=f"known: {', '.join([*_OPTIONS, *_SWITCHES])}",
            )
        found.append((word, "" if word in _SWITCHES else next(rest, "")))
    if program != "llama-server":
        raise DraftstillError("only llama-server commands are run", value=program)
    return found


@contextlib.contextmanager
def llama_server(command: str, *, threads: int | None = None) -> Iterator[str]:
    """Run ``llama-server ...`` on a free loopback port inside the block; yields its address.

    Raises:
        DraftstillError: xllamacpp is not installed, or the server did not start.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        raise DraftstillError(
            "a real llama.cpp server comes with the xllamacpp package, which is not installed", mend="pip install 'draftstill[served]'"
        )
    options = parse_command(command) + ([("-t", str(threads))] if threads else [])
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen([sys.executable, "-m", "draftstill.evaluate.serving", json.dumps(options)], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, stderr=log, text=True)  # fmt: skip
        try:
            assert child.stdout and child.stdin
            address = next((line.split()[1] for line in child.stdout if line.startswith("LISTENING ")), None)
            if address is None:
                log.seek(0)
                told = [line for line in log.read().splitlines() if line.strip()][-3:]
                raise DraftstillError(f"llama.cpp's server did not start: {' / '.join(told) or 'no message'}", value=command)
            yield address
        finally:
            child.kill()  # its requests are answered; nothing of it is kept
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe:
                    pipe.close()


def served_acceptance(command: str, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, threads: int | None = None) -> dict[str, Any]:
    """Decode prompts greedily in a llama.cpp server started by ``command`` and read what it drafted and accepted.

    Args:
        prompts: token ids, sent as such, so that no tokenizer stands between the two decoders.
        max_new_tokens: written past EOS, as in the score.

    Returns:
        server, command, prompts, drafted, accepted, acceptance, tokens (ids by prompt), tokens_per_s.

    Raises:
        DraftstillError: the server reports no drafted tokens: it does not speculate, whatever its start said.
    """
    drafted = accepted = 0
    written, seconds = [], 0.0
    with llama_server(command, threads=threads) as address:
        for number, ids in enumerate(prompts):
            answer = _post(f"{address}/completion", {"prompt": list(ids), "n_predict": max_new_tokens, "temperature": 0.0, "ignore_eos": True,
                                                     "cache_prompt": False, "return_tokens": True, "top_k": 1})  # fmt: skip
            timings = answer.get("timings") or {}
            if not timings.get("draft_n"):
                raise DraftstillError(f"llama.cpp reports no drafted tokens for prompt {number}: it decodes without the draft", value=command,
                                      mend="check --spec-type draft-simple, and that the vocabulary fits (`draftstill publish RECIPE --check`)")  # fmt: skip
            drafted += timings["draft_n"]
            if "draft_n_accepted" not in timings:
                raise DraftstillError(f"llama.cpp reports drafted tokens for prompt {number}, but not how many it accepted", value=server_version(),
                                      mend="report this: the server's timings have changed")  # fmt: skip
            accepted += timings["draft_n_accepted"]
            written.append(answer["tokens"])
            seconds += timings["predicted_ms"] / 1000
    return {"server": server_version(), "command": command, "prompts": len(prompts), "max_new_tokens": max_new_tokens, "drafted": drafted,
            "accepted": accepted, "acceptance": accepted / drafted, "tokens": written, "tokens_per_s": sum(map(len, written)) / seconds}  # fmt: skip


def own_acceptance(
    recipe: Any, draft: Path, prompts: Sequence[Sequence[int]], *, gamma: int, max_new_tokens: int, dtype: str = "float32"
) -> dict[str, Any]:
    """The same prompts in our decoder, greedy, with the published draft and its whole head.

    Returns:
        proposed, accepted, acceptance, tokens (ids by prompt).
    """
    from draftstill.decode import Decoder, ModelDrafter, Request, Sampling, load_target, make_network
    from draftstill.evaluate.exporter import load_model_folder
    from draftstill.stages import resolved_device

    target = load_target(recipe, dtype=dtype)
    network = make_network(load_model_folder(draft, dtype).to(resolved_device(recipe)), vocab=target.vocab, key="draft.source")
    decoder = Decoder(target.network, ModelDrafter(network, gamma), sampling=Sampling(0.0), eos=target.eos)
    traces = decoder.run([Request(list(p), max_new_tokens, ignore_eos=True) for p in prompts])
    proposed = sum(r.proposed for t in traces for r in t.rounds)
    accepted = sum(r.accepted for t in traces for r in t.rounds)
    return {
        "proposed": proposed,
        "accepted": accepted,
        "acceptance": accepted / proposed,
        "tokens": [list(t.tokens) for t in traces],
        "dtype": dtype,
    }


def same_start(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens until two texts part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def server_version() -> str:
    import xllamacpp

    return f"llama.cpp in xllamacpp {xllamacpp.__version__}"


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_REQUEST_S) as answer:
            return json.load(answer)
    except OSError as error:
        raise DraftstillError(f"llama.cpp's server did not answer: {error}", value=url) from error


def _main(options: list[list[str]]) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.hostnames, params.port, params.warmup, params.n_parallel = ["127.0.0.1"], 0, False, 1
    for name, value in options:
        _SWITCHES[name](params, "1") if name in _SWITCHES else _OPTIONS[name](params, value)
    server = xllamacpp.Server(params)
    print(f"LISTENING {server.listening_address}", flush=True)
    sys.stdin.read()  # until the parent goes


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
