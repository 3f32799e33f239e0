"""Commands that serve a target with a published draft. Written from the servers' sources; those of llama.cpp and transformers were run, too."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

TARGET_PATH, DRAFT_PATH, TARGET_GGUF, DRAFT_GGUF = "PATH/TO/TARGET", "PATH/TO/THIS/FOLDER", "TARGET.gguf", "draft-q8_0.gguf"


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


def llama_command(target_gguf: str, draft_gguf: str, gamma: int) -> str:
    """The llama-server command; what the card prints is what the served measurement runs."""
    return f"llama-server -m {_argument(target_gguf)} -md {_argument(draft_gguf)} --spec-type draft-simple --spec-draft-n-max {gamma} --metrics"


def snippets(target: str, draft: str, gamma: int, *, gguf: str | None = None, from_hub: bool = False) -> list[Snippet]:
    """Recipes for vLLM, SGLang, llama.cpp, transformers and TensorRT-LLM.

    Args:
        target: Hub id of the target, or a placeholder path.
        draft: Hub id of the draft, or a path.
        gamma: tokens proposed per round, as scored.
        gguf: the draft's GGUF file; None: it has none, and the snippet converts the folder.
        from_hub: ``draft`` is a Hub id, so that the GGUF is fetched first.
    """
    t, d = _argument(target), _argument(draft)
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": gamma, "draft_sample_method": "probabilistic"}
    if gguf is None:
        first = f"python convert_hf_to_gguf.py {d} --outfile draft.gguf\n"
    else:
        first = f"hf download {d} {_argument(Path(gguf).name)} --local-dir .\n" if from_hub else ""
    file = "draft.gguf" if gguf is None else Path(gguf).name if from_hub else gguf
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
            "llama.cpp", "b10359, xllamacpp 2026.10.11549", "bash",
            first + llama_command(TARGET_GGUF, file, gamma),
            (*(("`convert_hf_to_gguf.py` wants a local copy of the draft's folder.",) if gguf is None else ()),
             f"`{TARGET_GGUF}` is your GGUF of the target.",
             "Without `--spec-type draft-simple` the draft is loaded and never used; nothing is reported.",
             "A draft whose vocabulary does not fit is dropped with one log line: check that `draft_n` appears in a response's `timings`.",
             "The draft proposes greedily by default: expect a lower acceptance when sampling than the score says. Builds from October 2026 on take "
             "`--spec-draft-sampling probabilistic`."),
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
        Snippet(
            "TensorRT-LLM", "docs", "yaml",
            f"# trtllm-serve {t} --extra_llm_api_options this-file.yaml\nspeculative_config:\n  decoding_type: DraftTarget  # earlier releases: Draft_Target\n"
            f"  max_draft_len: {gamma}\n  speculative_model: {json.dumps(draft)}",
            ("No vocabulary is compared at start: a wrong draft only decodes slowly.", "Cannot be switched off per request."),
        ),
    ]  # fmt: skip


def snippets_text(target: str | None, repo: str | None, folder: Path, gamma: int) -> str:
    """What ``draftstill publish`` ends with: commands to copy for the folder as it lies here, or for the repository once sent."""
    files = sorted(folder.glob("draft-*.gguf"), reverse=True)
    found = snippets(target or TARGET_PATH, repo or str(folder), gamma, gguf=str(files[0]) if files else None, from_hub=repo is not None)
    return "serve it with\n" + "\n".join(f"\n# {s.server} ({s.read})\n{s.code}" for s in found if s.server != "TensorRT-LLM") + "\n"
