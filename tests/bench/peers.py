"""The two sides of the decoder benchmark, each behind the same call: run(prompts, new) -> Run.

Every side gets the same weights in the same dtype, decodes greedily, ignores EOS and writes exactly ``new`` tokens per row.
"""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from draftstill.decode import Decoder, ModelDrafter, Network, Request
from draftstill.decode.trace import Trace, metrics

PLAIN, SPECULATIVE = "ours, plain", "ours, speculative"
TRIMMED = "ours, trimmed head"
OURS_SPECULATIVE = (SPECULATIVE, TRIMMED)
DYNAMIC, STATIC, ASSISTED = "generate, dynamic", "generate, static", "generate, assisted"
FLASHSPEC = "flashspec"
RIVAL = {DYNAMIC: (PLAIN,), STATIC: (PLAIN,), ASSISTED: OURS_SPECULATIVE, FLASHSPEC: OURS_SPECULATIVE}
"""Which of our arms a peer is compared with."""

warnings.filterwarnings("ignore", category=FutureWarning)  # flashspec calls transformers by names of yesterday: once per forward
logging.getLogger("flashspec").setLevel(logging.ERROR)


@dataclass(slots=True)
class Run:
    """One call. The decode clock covers ``decode_tokens`` tokens of all rows together, and no prefill (see ``decode.py``)."""

    texts: list[list[int]]
    wall_s: float
    decode_s: float
    decode_tokens: int
    traces: list[Trace] = field(default_factory=list)

    @property
    def decode_rate(self) -> float:
        return self.decode_tokens / self.decode_s

    @property
    def wall_rate(self) -> float:
        return sum(map(len, self.texts)) / self.wall_s


class Arm(Protocol):
    name: str

    def run(self, prompts: list[list[int]], new: int) -> Run:
        """Continue all prompts, which are equally long, side by side."""


class Ours:
    """Our engine; the decode clock is the traces': it starts at the end of prefill and covers every token."""

    def __init__(self, name: str, target: Network, draft: Network | None = None, gamma: int = 0, rows: int = 1) -> None:
        self.name = name
        self.decoder = Decoder(target, ModelDrafter(draft, gamma) if draft is not None else None, rows=rows)
        self.accounted: list[float] = []
        """Share of each call's wall time that its traces account for."""

    def run(self, prompts: list[list[int]], new: int) -> Run:
        started = time.perf_counter()
        traces = self.decoder.run([Request(p, new, ignore_eos=True) for p in prompts])
        wall = time.perf_counter() - started
        m = metrics(traces)
        self.accounted.append(self.decoder.accounted or 0.0)
        return Run([t.tokens for t in traces], wall, m["decode_s"], m["emitted"], traces)


class _Clock(BaseStreamer):
    """Notes when the first new tokens come out, and how many. The prompt arrives before them."""

    def __init__(self) -> None:
        self.calls, self.first_at, self.first_tokens = 0, 0.0, 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first_at, self.first_tokens = time.perf_counter(), value.numel()

    def end(self) -> None: ...


class Transformers:
    """``generate``; with an assistant, assisted generation at a constant draft length that no confidence cuts short."""

    def __init__(self, name: str, model: Any, *, assistant: Any = None, gamma: int = 0, static: bool = False) -> None:
        self.name, self.model = name, model
        model.generation_config = GenerationConfig(pad_token_id=0)  # no EOS, and nothing else that a model may bring along
        # disable_compile: on some devices a static cache makes generate compile, which is minutes of warm-up.
        self.extra: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True} if static else {}
        if assistant is not None:
            assistant.generation_config = GenerationConfig(
                pad_token_id=0, num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
            )
            self.extra["assistant_model"] = assistant

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new: int) -> Run:
        clock = _Clock()
        started = time.perf_counter()
        ids = torch.tensor(prompts, device=self.model.device)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, streamer=clock, **self.extra
        )
        texts = out[:, ids.shape[1] :].tolist()
        ended = time.perf_counter()
        return Run(texts, ended - started, ended - clock.first_at, sum(map(len, texts)) - clock.first_tokens)


class Flashspec:
    """flashspec 0.3.1 with the same pair: its batch-1 fast path, one arm, the model drafter alone, at a fixed gamma.

    ``drafter_strategy="bandit"`` with one drafter is that; the default would mix prompt lookup in. ``compile="auto"`` is on with
    CUDA and Triton; on a CPU flashspec has no compiled path (compile=True only warns there), so it runs eagerly on a dynamic cache.
    """

    def __init__(self, name: str, target: Any, draft: Any, gamma: int) -> None:
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
        from flashspec.engine import HuggingFaceDrafter, TargetModel

        self.name, device, dtype = name, target.device, target.dtype
        config = FlashSpecConfig(
            device=str(device), dtype=str(dtype).removeprefix("torch."), drafter_strategy="bandit", bandit=BanditConfig(n_arms=1),
            sampling=SamplingConfig(gamma=gamma, temperature=0.0),
        )  # fmt: skip
        drafter = HuggingFaceDrafter("draft", device, dtype, temperature=0.0, model=draft)
        self.engine = SpeculativeEngine(config, [drafter], TargetModel("target", device, dtype, model=target))

    def run(self, prompts: list[list[int]], new: int) -> Run:
        started = time.perf_counter()
        result = self.engine.generate(torch.tensor(prompts, device=self.engine._device), max_new_tokens=new)
        text = result.output_ids[0].tolist()
        wall = time.perf_counter() - started
        # Its first step prefills both models, so the clock starts behind it.
        rest = result.arm_steps[1:]
        return Run([text], wall, sum(s.seconds for s in rest), sum(s.emitted for s in rest))
