"""Commands that serve a target with a published draft. Written from the servers' sources, not validated against a running server."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class Snippet:
    """One server's recipe. ``read`` is the version whose source it was written from."""

    server: str
    read: str
    language: str
    code: str
    traps: tuple[str, ...]
    """What fails, or silently does nothing."""


def _argument(text: str) -> str:
    # A placeholder such as PATH/TO/TARGET needs no quotes; anything a shell would read does.
    return shlex.quote(" ".join(text.split()))


def snippets(target: str, draft: str, gamma: int) -> list[Snippet]:
    """Recipes for vLLM, SGLang, llama.cpp and transformers.

    Args:
        target: Hub id of the target, or a placeholder path.
        draft: Hub id of the draft, or a placeholder path.
        gamma: tokens proposed per round, as scored.
    """
    t, d = _argument(target), _argument(draft)
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": gamma, "draft_sample_method": "probabilistic"}
    return [
        Snippet(
            "vLLM", "0.33.0", "bash",
            f"vllm serve {t} \\\n  --speculative-config {shlex.quote(json.dumps(speculative))} \\\n  --per-request-spec-decode-metrics summary",
            ("Without `draft_sample_method: probabilistic` the draft proposes greedily, and acceptance when sampling is lower than the score says.",
             "Only vocabulary sizes are compared at start, not tokenizers.",
             "Requests beyond the draft's context run without speculation; requests with min_p or logit_bias are rejected."),
        ),
        Snippet(
            "SGLang", "0.5.23", "bash",
            f"python -m sglang.launch_server --model-path {t} \\\n  --speculative-algorithm STANDALONE --speculative-draft-model-path {d} \\\n"
            f"  --speculative-num-steps {gamma} --speculative-eagle-topk 1 --speculative-num-draft-tokens {gamma + 1}",
            ("The draft proposes greedily here: expect a lower acceptance when sampling than the score says.",
             "`num-draft-tokens` counts the target's own token too.",
             "The draft's context must reach the target's, else the start is refused."),
        ),
        Snippet(
            "llama.cpp", "b10359", "bash",
            f"python convert_hf_to_gguf.py {d} --outfile draft.gguf\n"
            f"llama-server -m target.gguf -md draft.gguf --spec-type draft-simple --spec-draft-n-max {gamma} --metrics",
            ("`convert_hf_to_gguf.py` wants a local copy of the draft's folder.",
             "Without `--spec-type draft-simple` the draft is loaded and never used; nothing is reported.",
             "A draft whose vocabulary does not fit is dropped with one log line: check that `draft_n` appears in a response's `timings`."),
        ),
        Snippet(
            "transformers", "5.24.0", "python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(target)})\n"
            f"target = AutoModelForCausalLM.from_pretrained({json.dumps(target)})\n"
            f"draft = AutoModelForCausalLM.from_pretrained({json.dumps(draft)})\n"
            f"draft.generation_config.num_assistant_tokens = {gamma}\n"
            'inputs = tokenizer("Your text", return_tensors="pt")\n'
            "print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, max_new_tokens=64)[0]))",
            ("One request at a time; no acceptance counters.",),
        ),
    ]  # fmt: skip
