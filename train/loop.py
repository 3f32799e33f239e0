"""The training job: one readable loop on an Accelerator. ``accelerate launch -m draftstill.train RECIPE`` runs it on many devices."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from safetensors.torch import load_file

from draftstill.decode import Sampling
from draftstill.distill import STATS, Recording
from draftstill.errors import DraftstillError
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe
from draftstill.runfolder import read_json, save_tensors
from draftstill.stages import trains_in_bf16
from draftstill.train.averaging import Average
from draftstill.train.build import Draft, build_draft
from draftstill.train.checkpoint import BEST, checkpoint_name, checkpoints, load_checkpoint, model_tensors, save_checkpoint, warm_start
from draftstill.train.course import Course
from draftstill.train.data import learnable
from draftstill.train.devices import Twin, is_deepspeed, load_engine, prepare, refuse_engine_checkpoint, save_engine, sharded
from draftstill.train.heldout import HeldOut, measure
from draftstill.train.interrupts import terminated, termination
from draftstill.train.meter import Meter
from draftstill.train.module import DistilledDraft, attention_share
from draftstill.train.output import save_draft
from draftstill.train.schedule import stale
from draftstill.train.setup import attach, check_recording, checkpoint_layers, fits, groups
from draftstill.train.step import optimize


class Job:
    """What the loop holds: recording, draft, optimizer, and where it stands."""

    def __init__(self, recipe: Recipe, recorded: Path, work: Path, accelerator: Accelerator) -> None:
        self.recipe, self.settings, self.work, self.accelerator = recipe, recipe.train, work, accelerator
        settings, device = self.settings, accelerator.device
        self.recording, self.heldout = Recording(recorded / "train"), Recording(recorded / "heldout")
        self.draft: Draft = build_draft(recipe)
        check_recording(recipe, self.recording, self.draft)
        self.kept, self.refused = learnable(self.recording, chat=recipe.respond.chat_template)
        self._divide()
        self.course = Course(settings, recipe.seed, self.recording, self._learnt(), self.per_step,
                             self.recording.manifest.get("temperature", recipe.record.temperature))  # fmt: skip
        self.steps = self.course.steps
        if settings.init_from is not None:
            warm_start(self.draft.model, settings.init_from)
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
        self.reference_losses: dict[int, torch.Tensor] = {}
        if settings.tokens.keep < 1:
            self.reference = copy.deepcopy(self.module).eval().requires_grad_(False).to(device)
        optimizer = torch.optim.AdamW(groups(self.module, settings), lr=settings.learning_rate,
                                      betas=(settings.adam_beta1, settings.adam_beta2), fused=True)  # fmt: skip
        self.twin = Twin(self.draft.model, self.adapted) if sharded(accelerator) else None
        self.wrapped, self.optimizer = prepare(self, optimizer)
        self.average = Average(self.module.model, settings.ema_decay) if settings.ema_decay else None
        self.meter = Meter(device)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
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
            if not self.curve:
                self._measure()
            while self.step < self.steps and not self.stopped_early:
                stats, norm = self._optimize()
                sums, since = sums + stats, since + 1
                self.step += 1
                self.seconds = begun + time.monotonic() - started
                note = f"loss {sums[0] / sums[4]:.3f} alpha {sums[1] / sums[4]:.3f}"
                progress.update(self.tokens, note)
                if self.step % self.settings.logging_steps == 0 or self.step == self.steps:
                    self._log(sums, norm, since)
                    sums, since = torch.zeros_like(sums), 0
                if self.step % self.settings.eval_steps == 0 or self.step == self.steps:
                    self._measure()
                if self.ending or (self.step % self.settings.save_steps == 0 and self.step < self.steps):
                    self._save_checkpoint()
                if self.ending:
                    raise terminated(self.step, quiet=not main)
        if self.stopped_early and main:
            say(f"  train: no better held-out alpha in {stale(self.curve)} measurements; stopped after step {self.step} of {self.steps}")

    @property
    def stopped_early(self) -> bool:
        patience = self.settings.early_stopping_patience
        return patience > 0 and stale(self.curve) >= patience

    def _optimize(self) -> tuple[torch.Tensor, float]:
        with self.meter.stepping:
            return optimize(self)

    def set_objective(self) -> None:
        """The step's loss; where it changes, the reference's losses are those of another one."""
        objective = self.course.objective(self.step, self.curve)
        if objective != self.module.objective:
            self.module.objective = objective
            if self.reference is not None:
                self.reference.objective = objective
                self.reference_losses.clear()

    def sequences(self, step: int) -> list[int]:
        return self.course.sequences(step)

    def _measure(self) -> None:
        """Held-out alpha and tau; keeps the weights of the best so far."""
        main = self.accelerator.is_main_process
        with self.average.in_place() if self.average is not None else contextlib.nullcontext():
            found = self._agreed(self.held_out())
            self.curve.append({"step": self.step, "tokens": self.tokens, **{k: v for k, v in asdict(found).items() if k != "positions"}})
            if self.best is None or found.alpha_deploy > self.best["alpha_deploy"]:
                self.best = self.curve[-1]
                tensors = model_tensors(self.module.model)
                if main:
                    save_tensors(self.work / BEST, tensors)
        self.accelerator.log({f"heldout/{k}": v for k, v in self.curve[-1].items()}, step=self.step)
        if main:
            say(f"  step {self.step} of {self.steps}: held-out alpha {found.alpha_deploy:.3f} (deployment), {found.alpha:.3f} (T = 1), "
                f"top-1 {found.top1:.3f}, tau {found.tau:.2f} at gamma {found.gamma}")  # fmt: skip

    def _agreed(self, found: HeldOut) -> HeldOut:
        """The first process's measurement: what follows from it, such as stopping, must not differ between ranks by a rounding."""
        if self.accelerator.num_processes == 1:
            return found
        values = torch.tensor(list(asdict(found).values()), dtype=torch.float64, device=self.accelerator.device)
        alpha, deploy, top1, positions, tau, gamma = broadcast(values).tolist()
        return HeldOut(alpha, deploy, top1, int(positions), tau, int(gamma))

    def held_out(self) -> HeldOut:
        vocab = self.draft.vocab
        sampler = self.recipe.respond.sampler
        device = self.accelerator.device
        with self._whole() as model, torch.autocast(device.type, torch.bfloat16, enabled=self.compute == torch.bfloat16):
            hidden_of = lambda ids: model.model(input_ids=ids, use_cache=False).last_hidden_state  # noqa: E731
            head = model.lm_head.weight.detach()[:vocab].to(self.compute)
            found = measure(hidden_of, head, self.heldout, self.target_head, Sampling(sampler.temperature, sampler.top_k, sampler.top_p),
                            self.recipe.evaluate.gamma)  # fmt: skip
        return found

    @contextlib.contextmanager
    def _whole(self) -> Iterator[Any]:
        """The draft in evaluation mode with all its weights on this device: where they are sharded, the twin, which every rank fills."""
        model = self.module.model if self.twin is None else self.twin.filled(self.module.model, self.accelerator.device)
        model.eval()
        try:
            yield model
        finally:
            model.train()
            if self.twin is not None:
                model.to("cpu")

    def learning_rate(self, step: int) -> float:
        return self.course.learning_rate(step)

    def _log(self, sums: torch.Tensor, norm: float, steps: int) -> None:
        mean = dict(zip(STATS, (sums / sums[4].clamp_min(1)).tolist(), strict=True))
        values = {f"train/{k}": v for k, v in mean.items() if k != "weight"}
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
        }

    def _save_checkpoint(self) -> None:
        """Called by every rank: where weights are sharded, gathering them takes all."""
        if is_deepspeed(self.accelerator):
            save_engine(self, self.work / checkpoint_name(self.step), self._state())
            return
        save_checkpoint(self.work, self.module.model, self.optimizer.optimizer, self._state(), self.settings.save_total_limit,
                        average=None if self.average is None else self.average.tensors, write=self.accelerator.is_main_process)  # fmt: skip

    def _resume(self) -> None:
        found = checkpoints(self.work)
        if not found:
            return
        if is_deepspeed(self.accelerator):
            state = load_engine(self, found[-1])
        else:
            refuse_engine_checkpoint(found[-1])
            state = load_checkpoint(found[-1], self.module.model, self.optimizer.optimizer)
        if self.average is not None:
            self.average.load(load_file(found[-1] / "average.safetensors"))
        before = state.get("processes", self.accelerator.num_processes)
        if before != self.accelerator.num_processes and self.accelerator.is_main_process:
            say(f"  train: begun with {before} processes, goes on with {self.accelerator.num_processes}: the same sequences in the same steps, but sums "
                "round otherwise, so the weights will differ in their last bits")  # fmt: skip
        self.step, self.tokens, self.seconds, self.curve, self.best = (state[k] for k in ("step", "tokens", "seconds", "curve", "best"))

    def save(self, folder: Path) -> dict[str, Any]:
        """The best draft as a transformers folder with the target's tokenizer; returns what the stage has to tell."""
        return save_draft(self, folder)
