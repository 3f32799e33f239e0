"""The training job: one readable loop on an Accelerator. ``accelerate launch -m draftstill.train RECIPE`` runs it on many devices."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from draftstill.distill import LOSS_TERMS, STATS, Recording
from draftstill.errors import DraftstillError
from draftstill.progress import Progress, duration, say
from draftstill.recipe import Recipe
from draftstill.runfolder import read_json, save_tensors
from draftstill.stages import trains_in_bf16
from draftstill.train.agreement import together
from draftstill.train.averaging import Average
from draftstill.train.build import Draft, build_draft
from draftstill.train.checkpoint import BEST, checkpoint_name, checkpoints, load_checkpoint, model_tensors, save_checkpoint, warm_start
from draftstill.train.course import Course
from draftstill.train.data import learnable
from draftstill.train.devices import Twin, is_deepspeed, load_engine, prepare, refuse_engine_checkpoint, save_engine, sharded
from draftstill.train.heldout import MEASURED, HeldOut, told
from draftstill.train.interrupts import anywhere, terminated, termination
from draftstill.train.live import live_target
from draftstill.train.measuring import agreed, held_out, refuse_not_finite
from draftstill.train.meter import Meter
from draftstill.train.module import DistilledDraft, attention_share
from draftstill.train.output import save_draft
from draftstill.train.rate import peak_rate
from draftstill.train.schedule import stale
from draftstill.train.setup import attach, check_recording, checkpoint_layers, fits, groups, templated
from draftstill.train.step import optimize

_ESTIMATES = {"alpha_low": "alpha_estimate_low", "alpha_high": "alpha_estimate_high", "top1": "top1_estimate"}
"""Names in the log while the head is cut: over a sample of the ids nothing bounds alpha."""


class Job:
    """What the loop holds: recording, draft, optimizer, and where it stands."""

    def __init__(self, recipe: Recipe, recorded: Path, work: Path, accelerator: Accelerator) -> None:
        self.recipe, self.settings, self.work, self.accelerator = recipe, recipe.train, work, accelerator
        settings, device = self.settings, accelerator.device
        with together():
            # Checksums were compared before the first candidate and the first rank came here.
            self.recording, self.heldout = (Recording(recorded / side, verify=False) for side in ("train", "heldout"))
            check_recording(recipe, self.recording, self.heldout)
            self.draft: Draft = build_draft(recipe)
            if settings.init_from is not None:
                warm_start(self.draft.model, settings.init_from)
            self.peak = peak_rate(recipe, self.draft.model, self.draft.vocab, quiet=not accelerator.is_main_process)
            """Learning rate."""
            self.kept, self.refused = learnable(self.recording, chat=templated(recipe, recorded.parent / "responses"))
            self._divide()
            self.course = Course(settings, self.peak, recipe.seed, self.recording, self._learnt(), self.per_step,
                                 self.recording.manifest.get("temperature", recipe.record.temperature))  # fmt: skip
            self.steps = self.course.steps
            self.adapted = attach(self.draft.model, settings, recipe.seed)
            """peft's wrapper, where adapters are trained in place of all weights."""
            self.target_head = self.draft.target_head.to(device)
            self.ranking = self.recording.token_weights(self.draft.vocab).argsort(descending=True, stable=True)
            self.compute = torch.bfloat16 if trains_in_bf16(recipe) else torch.float32
            self.attention = attention_share(self.draft.model.config) if settings.packing else None
            fits(self)
            if settings.gradient_checkpointing:
                checkpoint_layers(self.draft.model)
            self.module = DistilledDraft(
                self.draft.model, self.draft.vocab, self.course.objective(0, []), self.compute, settings.tokens
            ).train()
            self.reference: DistilledDraft | None = None
            """The untrained draft, for selective distillation."""
            if settings.tokens.keep < 1:
                self.reference = copy.deepcopy(self.module).eval().requires_grad_(False).to(device)
            optimizer = torch.optim.AdamW(groups(self.module, settings), lr=self.peak,
                                          betas=(settings.adam_beta1, settings.adam_beta2), fused=True)  # fmt: skip
            self.twin = Twin(self.draft.model, self.adapted) if sharded(accelerator) else None
        self.wrapped, self.optimizer = prepare(self, optimizer)
        self.average = Average(self.module.model, settings.ema_decay) if settings.ema_decay else None
        self.live = live_target(recipe, device, accelerator.num_processes) if self.recording.mode == "live" else None
        """The target, where no laws are recorded."""
        self.meter = Meter(device)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.saved: int | None = None
        """Step of the newest checkpoint."""
        self.told = threading.Event()
        """SIGTERM came to this process."""
        self.ending = False
        """It came to any process, as all of them know since the last step."""

    def _divide(self) -> None:
        """Sequences per step and forwards per step: the recipe's, or in a launch of another size those that keep the step as it was begun with."""
        settings, processes = self.settings, self.accelerator.num_processes
        self.accumulate = settings.gradient_accumulation_steps
        self.per_step = settings.per_device_train_batch_size * self.accumulate * processes
        if not (found := checkpoints(self.work)):
            return
        state = read_json(found[-1] / "state.json")
        if state["per_step"] == self.per_step:
            return
        self.accumulate, rest = divmod(state["per_step"], settings.per_device_train_batch_size * processes)
        if rest:
            raise DraftstillError(
                f"the checkpoint was made with {state['per_step']} sequences per step over all processes, which {processes} processes of "
                f"{settings.per_device_train_batch_size} cannot share evenly", key="accelerate launch",
                mend="go on with as many processes as before, or a divisor of them")  # fmt: skip
        self.per_step = state["per_step"]

    def _learnt(self) -> list[int]:
        if self.refused and self.accelerator.is_main_process:
            told = ", ".join(f"{count:,} ({reason})" for reason, count in self.refused.items())
            say(f"  train: sequences refused: {told}; {len(self.kept):,} are learnt from")
        if not self.kept:
            raise DraftstillError(f"no sequence of the recording can be learnt from: {self.refused}", key="run_dir", value=self.recipe.run_dir,
                                  mend="look at it with: draftstill inspect; then mend respond or record, and record again")  # fmt: skip
        return self.kept

    def run(self) -> None:
        """To the last step, or to where early stopping ends it.

        Raises:
            Terminated: SIGTERM came; the step it came in is finished, and saved.
        """
        self._resume()
        main = self.accelerator.is_main_process
        sums, since, started = torch.zeros(len(STATS), dtype=torch.float64), 0, time.monotonic()
        begun = self.seconds
        total = sum(self.recording.supervised(i) for step in range(self.steps) for i in self.course.sequences(step))
        with termination() as self.told, Progress("train", total, "tokens", done=self.tokens, quiet=not main) as progress:
            self._measure_if_due()
            while self.step < self.steps and not self.stopped_early:
                stats, norm = self._optimize()
                sums, since = sums + stats, since + 1
                self.step += 1
                self.seconds = begun + time.monotonic() - started
                about = "about " if self.trimmed(self.step - since) else ""
                note = f"loss {sums[0] / sums[4]:.3f} alpha {about}{sums[1] / sums[4]:.3f}"
                progress.update(self.tokens, note)
                if self.step % self.settings.logging_steps == 0 or self.step == self.steps:
                    self._log(sums, norm, since)
                    sums, since = torch.zeros_like(sums), 0
                if self.ending:
                    self._end()
                # Before the measurement, which may take longer than a scheduler's patience: an attempt that goes on here makes up for it.
                if self.step % self.settings.save_steps == 0 and self.step < self.steps:
                    self._save_checkpoint()
                self._measure_if_due()
        # Outside of ``termination``, so that none is lost: SIGTERM ends the process by itself from here on.
        if anywhere(self.accelerator, self.told):
            self._end()
        if self.live is not None and main:
            self.meter.scoring.settle()
            say(
                f"  train: the target's own forwards took {duration(self.meter.scoring.seconds)} of this attempt's {duration(self.seconds - begun)}"
            )
        if self.stopped_early and main:
            say(f"  train: no better held-out {MEASURED[self.heldout.mode]} in {stale(self.curve)} measurements; stopped after step {self.step} of "
                f"{self.steps}")  # fmt: skip

    def release_target(self) -> None:
        """Let a live target go: what comes behind the last step, such as decoding a sample, loads one of its own."""
        self.live = None
        gc.collect()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def _end(self) -> NoReturn:
        """SIGTERM came: save, and end. Every rank calls it; none ends before the one that writes is through, or its launcher would kill that one."""
        if self.saved != self.step:
            self._save_checkpoint()
        self.accelerator.wait_for_everyone()
        raise terminated(self.step, quiet=not self.accelerator.is_main_process)

    @property
    def stopped_early(self) -> bool:
        patience = self.settings.early_stopping_patience
        return patience > 0 and stale(self.curve) >= patience

    def _optimize(self) -> tuple[torch.Tensor, float]:
        with self.meter.stepping:
            return optimize(self)

    def set_objective(self) -> None:
        """The step's loss, for the draft and for the reference."""
        objective = self.course.objective(self.step, self.curve)
        if objective != self.module.objective:
            self.module.objective = objective
            if self.reference is not None:
                self.reference.objective = objective

    def sequences(self, step: int) -> list[int]:
        return self.course.sequences(step)

    def trimmed(self, step: int) -> bool:
        """Whether a step trains against a sample of the ids."""
        return self.settings.head_tokens > 0 and step < self.settings.full_head_from * self.steps

    def _measure_if_due(self) -> None:
        """At the start, every ``eval_steps`` and at the end; once, however often a restart comes to the same step."""
        due = self.step % self.settings.eval_steps == 0 or self.step == self.steps
        if due and not (self.curve and self.curve[-1]["step"] == self.step):
            self._measure()

    def _measure(self) -> None:
        """Held-out alpha and tau; keeps the weights of the best so far."""
        main = self.accelerator.is_main_process
        with self.average.in_place() if self.average is not None else contextlib.nullcontext():
            found = agreed(self, self.held_out())
            refuse_not_finite(self, found)
            self.curve.append({"step": self.step, "tokens": self.tokens, **{k: v for k, v in asdict(found).items() if k != "positions"}})
            if self.best is None or found.alpha_deploy > self.best["alpha_deploy"]:
                self.best = self.curve[-1]
                tensors = model_tensors(self.module.model, keep=main)
                if main:
                    save_tensors(self.work / BEST, tensors)
        self.accelerator.log({f"heldout/{k}": v for k, v in self.curve[-1].items()}, step=self.step)
        if main:
            say(f"  step {self.step} of {self.steps}: held-out {told(found, self.heldout.mode, self.recipe.draft.head_tokens)}")

    def held_out(self) -> HeldOut:
        return held_out(self)

    def learning_rate(self, step: int) -> float:
        return self.course.learning_rate(step)

    def _log(self, sums: torch.Tensor, norm: float, steps: int) -> None:
        mean = dict(zip(STATS, (sums / sums[4].clamp_min(1)).tolist(), strict=True))
        estimated = self.trimmed(self.step - steps)  # the first of these steps: a cut head comes before the whole one
        values = {f"train/{_ESTIMATES.get(k, k) if estimated else k}": v for k, v in mean.items() if k not in ("weight", *LOSS_TERMS)}
        values |= {f"train/loss_{k}": mean[k] for k in LOSS_TERMS if mean[k]}  # a term that the loss does not hold is exactly 0
        values |= {"train/grad_norm": norm, "train/learning_rate": self.learning_rate(self.step - 1),
                   "train/tokens": self.tokens, "train/tokens_per_s": self.tokens / max(self.seconds, 1e-9), "train/steps": steps,
                   **self.meter.read()}  # fmt: skip
        self.accelerator.log(values, step=self.step)

    def _state(self) -> dict[str, Any]:
        return {
            "per_step": self.per_step,
            "processes": self.accelerator.num_processes,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "curve": self.curve,
            "best": self.best,
            "head_tokens": self.recipe.draft.head_tokens,
        }

    def _save_checkpoint(self) -> None:
        """Called by every rank: where weights are sharded, gathering them takes all."""
        self.saved = self.step
        if is_deepspeed(self.accelerator):
            save_engine(self, self.work / checkpoint_name(self.step), self._state())
            return
        save_checkpoint(self.work, self.module.model, self.optimizer.optimizer, self._state(), self.settings.save_total_limit,
                        average=None if self.average is None else self.average.tensors, write=self.accelerator.is_main_process)  # fmt: skip

    def _resume(self) -> None:
        found = checkpoints(self.work)
        if not found:
            return
        heads = self.recipe.draft.head_tokens
        if (begun := read_json(found[-1] / "state.json").get("head_tokens", heads)) != heads:
            raise DraftstillError(f"the measurements so far are of a draft that guesses among {begun or 'all'} ids", key="draft.head_tokens", value=heads,
                                  mend=f"go on with draft.head_tokens={begun}; the finished draft can be scored with any")  # fmt: skip
        if is_deepspeed(self.accelerator):
            state = load_engine(self, found[-1])
        else:
            refuse_engine_checkpoint(found[-1])
            state = load_checkpoint(found[-1], self.module.model, self.optimizer.optimizer, write=self.accelerator.is_main_process)
        if self.average is not None:
            self.average.load(load_file(found[-1] / "average.safetensors"))
        before = state.get("processes", self.accelerator.num_processes)
        if before != self.accelerator.num_processes and self.accelerator.is_main_process:
            # One process alone is the engine's forward, several sharing a target are transformers': in bfloat16 their laws differ by more than bits.
            other = self.live is not None and self.settings.live == "shard" and 1 in (before, self.accelerator.num_processes)
            why = (
                "another forward scores the texts, so the weights will differ"
                if other
                else "sums round otherwise, so the weights will differ in their last bits"
            )
            say(
                f"  train: begun with {before} processes, goes on with {self.accelerator.num_processes}: the same sequences in the same steps, but {why}"
            )
        self.step, self.tokens, self.seconds, self.curve, self.best = (state[k] for k in ("step", "tokens", "seconds", "curve", "best"))
        self.saved = self.step

    def save(self, folder: Path) -> dict[str, Any]:
        """The best draft as a transformers folder with the target's tokenizer; returns what the stage has to tell."""
        return save_draft(self, folder)
