"""Laws from a server: the most probable ids of every position of a given text with their log-probabilities, and the mass of all others.

vLLM and SGLang score a whole text in one request. llama.cpp scores no prompt: each position is a request for one token, whose prefix lies in the
server's cache. Ids are asked for, never strings: several tokens can read alike. What a server cannot tell is the log-normaliser, and
nothing that is recorded needs it: tails are 1 minus the sum of what was kept, exact to about 1e-6.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftstill.distill.dialects import Ask
from draftstill.distill.prompts import encode
from draftstill.distill.refusing import Unscored
from draftstill.distill.servers import OF_ONE_REQUEST, Client, ServerError, each
from draftstill.distill.sources import Text
from draftstill.distill.writing import REFUSED
from draftstill.errors import DraftstillError
from draftstill.progress import say
from draftstill.recipe import Record

Law = list[tuple[int, float]]
"""(id, log-probability) by falling probability."""
RAW = {"temperature": 1.0}
CUT = {"temperature": 0.3, "top_k": 2}
"""Two ways of sampling the token that nobody reads: log-probabilities that differ between them are not the model's."""
_SAME_NATS = 0.1
"""Batching and caching move a log-probability of a bfloat16 model by a few hundredths; a temperature of 0.3 moves it by nats."""
_PROBED = 12


@dataclass
class Served:
    """A scorer whose laws come from a server.

    Args:
        k: ids asked for at each position.
        vocab: real ids of the target. Padding among the listed ids is taken out, and the others share its mass: padding is never drawn.
    """

    client: Client
    k: int
    vocab: int
    rows: int = 0
    """The target's configured size, padding included; 0: no padding."""
    plain: int = 0
    """A token that is a whole character, for llama.cpp."""
    kept_mass: float = 1.0
    logp_bits: int = 8
    concurrency: int = 8

    @property
    def bits(self) -> dict[str, int | None]:
        return {"logp_bits": self.logp_bits, "vocab": self.vocab}

    @property
    def about(self) -> dict[str, Any]:
        """What the recording says of the server."""
        return {k: v for k, v in asdict(self.client.about).items() if k in ("kind", "version", "model")}

    def columns(self, texts: Sequence[Text]) -> list[dict[str, Tensor]]:
        """ids, logp [N, K], count, tail [N] of each text; positions that nothing is learnt from keep no id, and a tail of 1. A text that the
        server refuses is ``Unscored``."""
        found: list[dict[str, Tensor]] = [{}] * len(texts)
        for place, columns in each(texts, self._text, self.concurrency):
            found[place] = columns
        return found

    def _text(self, text: Text) -> dict[str, Tensor]:
        N = len(text.ids)
        ids, logp = torch.zeros(N, self.k, dtype=torch.int32), torch.full((N, self.k), -100.0)
        count, tail = torch.zeros(N, dtype=torch.int32), torch.ones(N)
        columns = {"ids": ids, "logp": logp, "count": count, "tail": tail}
        try:
            laws = self.laws(text.ids, text.supervised)
        except ServerError as error:
            if error.status not in OF_ONE_REQUEST:
                raise
            return Unscored(columns, f"{REFUSED} ({error.status})", error.problem)
        for at, law in zip(text.supervised, laws, strict=True):
            kept = self._kept(law)
            count[at] = len(kept)
            ids[at, : len(kept)] = torch.tensor([i for i, _ in kept], dtype=torch.int32)
            logp[at, : len(kept)] = torch.tensor([lp for _, lp in kept])
            tail[at] = max(0.0, 1.0 - math.fsum(math.exp(lp) for _, lp in kept))
        return columns

    def _kept(self, law: Law) -> Law:
        total = 0.0
        for n, (_, lp) in enumerate(law):
            total += math.exp(lp)
            if self.kept_mass < 1 and total >= self.kept_mass:
                return law[: n + 1]
        return law

    def laws(self, ids: Sequence[int], positions: Sequence[int], k: int | None = None, sampler: dict[str, Any] = RAW) -> list[Law]:
        """The law of the token behind each of these positions.

        Raises:
            DraftstillError: the server gives no, too few, or impossible log-probabilities.
        """
        k, kind = k or self.k, self.client.about.kind
        if kind == "llama.cpp":
            raws = [self.client.post("/completion", llama_body(ids[: at + 1], k, sampler, self.plain)) for at in positions]
            found = [llama_law(raw) for raw in raws]
        else:
            path, body = (vllm_body if kind == "vllm" else sglang_body)(self.client.about.model, ids, k, sampler)
            try:
                raw = self.client.post(path, body)
            except ServerError as error:
                if error.status == 400 and "logprobs" in error.problem:
                    raise DraftstillError(f"the server caps the ids per position ({error.problem})", key="record.top_k", value=k,
                                          mend=f"start it with --max-logprobs {k}, or lower record.top_k") from None  # fmt: skip
                raise
            every = vllm_laws(raw) if kind == "vllm" else sglang_laws(raw)
            if every is not None and len(every) != len(ids):
                raise self._refused(f"{len(every)} laws came back for {len(ids)} tokens")
            found = [None if every is None else every[at] for at in positions]
        return [self._checked(law, k) for law in found]

    def _checked(self, law: Law | None, k: int) -> Law:
        if not law:
            raise self._refused("it returned no log-probabilities", "log-probabilities must be on, and the server must not speculate")
        law = sorted(law, key=lambda x: (-x[1], x[0]))[:k]
        if len(law) < min(k, self.vocab):
            raise DraftstillError(
                f"the server gives {len(law)} ids per position, not {k}", key="record.top_k", value=k, mend=f"set record.top_k: {len(law)}"
            )
        if bad := [i for i, _ in law if not 0 <= i < max(self.vocab, self.rows)]:
            raise self._refused(
                f"it returned the token id {bad[0]}; the target has {self.vocab:,}", "serve the model that target.source names"
            )
        if any(not math.isfinite(lp) and lp != -math.inf for _, lp in law) or math.fsum(math.exp(lp) for _, lp in law) > 1.001:
            raise self._refused("its log-probabilities add up to more than 1")
        padding = math.fsum(math.exp(lp) for i, lp in law if i >= self.vocab)
        return [(i, lp - math.log1p(-padding)) for i, lp in law if i < self.vocab] if padding else law

    def _refused(self, problem: str, mend: str | None = None) -> DraftstillError:
        return DraftstillError(
            f"the server's laws cannot be recorded: {problem}", key="record.server.url", value=self.client.url, mend=mend
        )

    def probe(self, ids: Sequence[int]) -> None:
        """Score the start of a text in two ways before anything is recorded.

        Raises:
            DraftstillError: the server speculates, is of a kind that scores no ids, or returns laws that are cut, renormalised or at another temperature.
        """
        about = self.client.about
        if about.kind == "openai":
            raise self._refused(
                "it is neither vLLM, SGLang nor llama.cpp, and gives no ids", "set record.mode: text and train.loss.name: ce"
            )
        timings = self.client.complete(Ask(ids[:_PROBED], 8)).raw.get("timings") if about.kind == "llama.cpp" else None
        if about.speculates or (timings or {}).get("draft_n"):
            raise self._refused("it decodes speculatively", "start it without a draft for the recording")
        if about.speculates is None and timings is None:
            say("  record.server: this server does not say whether it decodes speculatively; see that it runs without a draft, behind whose tokens "
                "log-probabilities may be missing or another law's")  # fmt: skip
        ids = list(ids[:_PROBED])
        positions = range(len(ids))
        whole, cut = self.laws(ids, positions), self.laws(ids, positions, min(2, self.k), CUT)
        apart = [abs(a[0][1] - dict(b).get(a[0][0], -math.inf)) for a, b in zip(whole, cut, strict=True)]
        if statistics.median(apart) > _SAME_NATS:
            raise self._refused(
                f"they change with the sampler or with the number of ids asked for (by {statistics.median(apart):.2f} nats)",
                "turn off post-sampling probabilities (vLLM: --logprobs-mode raw_logprobs)",
            )


def make_served(settings: Record, vocab: int, rows: int, tokenizer: Any) -> Served:
    """The scorer of a recipe with ``record.server``."""
    assert settings.server is not None
    client = Client.of(settings.server, "record.server")
    client.health()
    return Served(client, min(settings.top_k, vocab), vocab, rows, encode(tokenizer, "a")[-1], settings.kept_mass, settings.logp_bits,
                  settings.server.concurrency)  # fmt: skip


# Adapters: a request that scores ids, and the laws in its answer. One more id stands behind the text, so that the law behind the text's
# last token is that of a prompt token, too.


def vllm_body(model: str, ids: Sequence[int], k: int, sampler: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {
        "model": model,
        "prompt": [*ids, ids[-1]],
        "max_tokens": 1,
        "prompt_logprobs": k,
        "add_special_tokens": False,
        **sampler,
    }


def vllm_laws(raw: dict[str, Any]) -> list[Law] | None:
    """One for each token of the text: entry t+1 of ``prompt_logprobs`` is the law behind token t. The text's own token is
    added where it is not among the k most probable: one entry too many, and the least probable."""
    choices = raw.get("choices") or [{}]
    entries = choices[0].get("prompt_logprobs") or raw.get("prompt_logprobs")
    if not entries:
        return None
    return [[(int(i), float(v["logprob"])) for i, v in (entry or {}).items()] for entry in entries[1:]]


def sglang_body(model: str, ids: Sequence[int], k: int, sampler: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "/generate", {"input_ids": [*ids, ids[-1]], "sampling_params": {"max_new_tokens": 1, **sampler}, "return_logprob": True,
                         "logprob_start_len": 0, "top_logprobs_num": k, "return_text_in_logprobs": False}  # fmt: skip


def sglang_laws(raw: dict[str, Any]) -> list[Law] | None:
    """Entry t+1 of ``input_top_logprobs``, a list of [log-probability, id, text], is the law behind token t; the first entry is empty."""
    entries = (raw.get("meta_info") or {}).get("input_top_logprobs")
    if not entries:
        return None
    return [[(int(i), float(lp)) for lp, i, *_ in entry or ()] for entry in entries[1:]]


def llama_body(ids: Sequence[int], k: int, sampler: dict[str, Any], plain: int) -> dict[str, Any]:
    """The token that is written is forced to be ``plain``: an end of text, or a token that is part of a character, comes without its law. What
    is reported are the model's log-probabilities before any bias."""
    return {"prompt": list(ids), "n_predict": 1, "n_probs": k, "post_sampling_probs": False, "cache_prompt": True, "top_k": 0, "top_p": 1.0,
            "min_p": 0.0, "logit_bias": [[plain, 1000.0]], **sampler}  # fmt: skip


def llama_law(raw: dict[str, Any]) -> Law | None:
    """Of the one token that was asked for. A drafted token comes with an empty list."""
    if (raw.get("timings") or {}).get("draft_n"):
        return None
    entries = raw.get("completion_probabilities")
    if not entries:
        return None
    return [(int(e["id"]), float(e["logprob"])) for e in entries[0].get("top_logprobs") or () if "logprob" in e]
