"""The training job: one readable loop on an Accelerator. ``accelerate launch -m draftstill.train RECIPE`` runs it on many devices.

Losses are sums; they are divided once per optimizer step by the number of supervised tokens of all ranks and accumulation
steps, so that the result does not depend on how a batch is split. What a step sees follows from (seed, step) alone.
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from draftstill.decode import Sampling
from draftstill.distill import STATS, Objective, Recording
from draftstill.errors import DraftstillError, NonFiniteLoss
from draftstill.progress import Progress, say
from draftstill.recipe import Recipe, Train
from draftstill.runfolder import hash_file, save_tensors
from draftstill.sources import quiet_transformers
from draftstill.stages import trains_in_bf16
from draftstill.train.build import Draft, build_draft, check_head_tokens
from draftstill.train.checkpoint import checkpoints, load_checkpoint, load_tensors, model_tensors, save_checkpoint
from draftstill.train.data import Batch, Order, collate, supervised, trim
from draftstill.train.heldout import HeldOut, measure
from draftstill.train.module import DistilledDraft
from draftstill.vocabulary import tokenizer_hash


class Job:
    """What the loop holds: recording, draft, optimizer, and where it stands."""

    def __init__(self, recipe: Recipe, recorded: Path, work: Path, accelerator: Accelerator) -> None:
        self.recipe, self.settings, self.work, self.accelerator = recipe, recipe.train, work, accelerator
        self.recording, self.heldout = Recording(recorded / "train"), Recording(recorded / "heldout")
        self.draft: Draft = build_draft(recipe)
        self._check()
        self.target_head = self.draft.target_head.to(accelerator.device)
        self.ranking = self.recording.token_weights(self.draft.vocab).argsort(descending=True, stable=True)
        self.compute = torch.bfloat16 if trains_in_bf16(recipe) else torch.float32
        manifest, loss = self.recording.manifest, self.settings.loss
        objective = Objective(loss.name, loss.eta, loss.temperature or manifest.get("temperature", recipe.record.temperature),
                              loss.beta, tuple(loss.mix.items()), loss.top_k, loss.top_p)  # fmt: skip
        self.module = DistilledDraft(self.draft.model, self.draft.vocab, objective, self.compute, self.settings.tokens).train()
        self.reference: DistilledDraft | None = None
        """The untrained draft, for selective distillation."""
        self.reference_losses: dict[int, torch.Tensor] = {}
        if self.settings.tokens.keep < 1:
            self.reference = copy.deepcopy(self.module).eval().requires_grad_(False).to(accelerator.device)
        optimizer = torch.optim.AdamW(_groups(self.module, self.settings), lr=self.settings.learning_rate,
                                      betas=(self.settings.adam_beta1, self.settings.adam_beta2), fused=True)  # fmt: skip
        self.wrapped, self.optimizer = accelerator.prepare(self.module, optimizer)
        self.order = Order(len(self.recording), recipe.seed)
        self.per_step = self.settings.per_device_train_batch_size * self.settings.gradient_accumulation_steps * accelerator.num_processes
        epochs = math.ceil(self.settings.num_train_epochs * len(self.recording) / self.per_step)
        self.steps = self.settings.max_steps if self.settings.max_steps > 0 else max(1, epochs)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None

    def _check(self) -> None:
        manifest = self.recording.manifest
        if manifest["vocab"] != self.draft.vocab:
            raise DraftstillError(f"the recording has {manifest['vocab']:,} tokens, the draft's vocabulary {self.draft.vocab:,}", key="draft.source",
                                  value=self.recipe.draft.source, mend="record with this recipe's target: draftstill distill RECIPE")  # fmt: skip
        for what, now in (("tokenizer_sha256", tokenizer_hash(self.draft.tokenizer)), ("revision", self.draft.revision)):
            if manifest[what] != now:
                raise DraftstillError(f"the target is not the one that was recorded: its {what} was {manifest[what]}, is {now}", key="target.source",
                                      value=self.recipe.target.source, mend="pin target.revision to the old commit, or record again")  # fmt: skip
        check_head_tokens(self.recipe, self.draft.vocab)

    def run(self) -> None:
        self._resume()
        main = self.accelerator.is_main_process
        sums, since, started = torch.zeros(len(STATS), dtype=torch.float64), 0, time.monotonic()
        if self.step == 0:
            self._measure()
        begun = self.seconds
        total = self._tokens_of(range(self.steps * self.per_step))
        with Progress("train", total, "tokens", done=self.tokens, quiet=not main) as progress:
            while self.step < self.steps:
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
                if self.step % self.settings.save_steps == 0 and self.step < self.steps and main:
                    self._save_checkpoint()

    def _optimize(self) -> tuple[torch.Tensor, float]:
        """One optimizer step; returns summed statistics and the gradient norm."""
        settings, accelerator = self.settings, self.accelerator
        device = accelerator.device
        start = self.step * self.per_step
        tokens = self._tokens_of(range(start, start + self.per_step))
        trimmed = settings.head_tokens > 0 and self.step < settings.full_head_from * self.steps
        cut = trim(self.ranking, settings.head_tokens, self.recipe.seed, self.step) if trimmed else None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(settings, self.step, self.steps)
        stats = torch.zeros(len(STATS), dtype=torch.float64)
        for batch, last in self._batches(start):
            with accelerator.no_sync(self.wrapped) if not last else _nothing():
                loss, part = self.wrapped(batch.to(device), None if cut is None else cut.to(device))
                # DDP averages gradients over ranks; the loss is a sum over all tokens of all ranks.
                accelerator.backward(loss * (accelerator.num_processes / tokens))
            stats += part.cpu()
        norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), settings.max_grad_norm)
        value = torch.as_tensor(norm).float() + float(stats[0])
        if not torch.isfinite(value):
            raise NonFiniteLoss(f"step {self.step}: the loss or its gradient is not finite (loss {stats[0] / tokens:.3g}, gradient norm {float(norm):.3g})",
                                key="train.learning_rate", value=settings.learning_rate,
                                mend="lower the learning rate and add --set-aside, which keeps this attempt beside the new one")  # fmt: skip
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += tokens
        return accelerator.reduce(stats.float().to(device), "sum").double().cpu(), float(norm)

    def _batches(self, start: int) -> Iterator[tuple[Any, bool]]:
        """This rank's micro-batches of one optimizer step, and whether it is the last."""
        size, accumulate = self.settings.per_device_train_batch_size, self.settings.gradient_accumulation_steps
        mine = start + self.accelerator.process_index * size * accumulate
        for i in range(accumulate):
            indices = self.order.take(mine + i * size, size)
            batch = collate(self.recording, indices, self.target_head)
            if self.reference is not None:
                batch.reference_N = self._reference_losses(self.reference, indices, batch)
            yield batch, i == accumulate - 1

    def _reference_losses(self, reference: DistilledDraft, indices: list[int], batch: Batch) -> torch.Tensor:
        """The untrained draft's loss at the batch's positions; each sequence is scored once."""
        if not all(i in self.reference_losses for i in indices):
            with self.accelerator.autocast():
                found = reference.losses(batch.to(self.accelerator.device)).cpu()
            self.reference_losses |= zip(indices, found.split([supervised(self.recording, i) for i in indices]), strict=True)
        return torch.cat([self.reference_losses[i] for i in indices])

    def _tokens_of(self, places: range) -> int:
        return sum(supervised(self.recording, i) for i in self.order.take(places.start, len(places)))

    def _measure(self) -> None:
        """Held-out alpha; keeps the weights of the best so far."""
        found = self.held_out()
        self.curve.append({"step": self.step, "tokens": self.tokens, **{k: v for k, v in asdict(found).items() if k != "positions"}})
        self.accelerator.log({f"heldout/{k}": v for k, v in self.curve[-1].items()}, step=self.step)
        if self.best is None or found.alpha_deploy > self.best["alpha_deploy"]:
            self.best = self.curve[-1]
            if self.accelerator.is_main_process:
                save_tensors(self.work / "best.safetensors", model_tensors(self.module.model))
        if self.accelerator.is_main_process:
            say(
                f"  step {self.step} of {self.steps}: held-out alpha {found.alpha_deploy:.3f} (deployment), {found.alpha:.3f} (T = 1), top-1 {found.top1:.3f}"
            )

    def held_out(self) -> HeldOut:
        model, vocab = self.module.model, self.draft.vocab
        sampler = self.recipe.respond.sampler
        device = self.accelerator.device
        model.eval()
        with torch.autocast(device.type, torch.bfloat16, enabled=self.compute == torch.bfloat16):
            hidden_of = lambda ids: model.model(input_ids=ids, use_cache=False).last_hidden_state  # noqa: E731
            head = model.lm_head.weight.detach()[:vocab].to(self.compute)
            found = measure(hidden_of, head, self.heldout, self.target_head, Sampling(sampler.temperature, sampler.top_k, sampler.top_p))  # fmt: skip
        model.train()
        return found

    def _log(self, sums: torch.Tensor, norm: float, steps: int) -> None:
        mean = dict(zip(STATS, (sums / sums[4].clamp_min(1)).tolist(), strict=True))
        values = {f"train/{k}": v for k, v in mean.items() if k != "weight"}
        values |= {"train/grad_norm": norm, "train/learning_rate": learning_rate(self.settings, self.step - 1, self.steps),
                   "train/tokens": self.tokens, "train/tokens_per_s": self.tokens / max(self.seconds, 1e-9), "train/steps": steps}  # fmt: skip
        self.accelerator.log(values, step=self.step)

    def _state(self) -> dict[str, Any]:
        return {
            "per_step": self.per_step,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "curve": self.curve,
            "best": self.best,
        }

    def _save_checkpoint(self) -> None:
        save_checkpoint(self.work, self.module.model, self.optimizer.optimizer, self._state(), self.settings.save_total_limit)

    def _resume(self) -> None:
        found = checkpoints(self.work)
        if not found:
            return
        state = load_checkpoint(found[-1], self.module.model, self.optimizer.optimizer)
        if state["per_step"] != self.per_step:
            problem = (
                f"the checkpoint was made with {state['per_step']} sequences per step over all processes, now it would be {self.per_step}"
            )
            raise DraftstillError(problem, key="accelerate launch", mend="go on with as many processes as before")
        self.step, self.tokens, self.seconds, self.curve, self.best = (state[k] for k in ("step", "tokens", "seconds", "curve", "best"))

    def save(self, folder: Path) -> dict[str, Any]:
        """The best draft as a transformers folder with the target's tokenizer; returns what the stage has to tell."""
        from safetensors.torch import load_file
        from transformers import GenerationConfig

        model = self.module.model
        load_tensors(model, load_file(self.work / "best.safetensors"))
        shutil.rmtree(folder, ignore_errors=True)
        config = model.config
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        dtype = getattr(torch, self.recording.manifest["dtype"])
        with quiet_transformers():
            model.to(dtype).save_pretrained(folder)
            self.draft.tokenizer.save_pretrained(folder)
        save_tensors(folder.parent / "token_ranking.safetensors", {"ids": self.ranking.to(torch.int32)})
        return {
            "name": self.draft.name, "parameters": sum(p.numel() for p in model.parameters()), "steps": self.steps, "tokens": self.tokens,
            "train_seconds": round(self.seconds, 1), "curve": self.curve, "best": self.best, "weights_sha256": hash_file(folder / "model.safetensors"),
        }  # fmt: skip


def learning_rate(settings: Train, step: int, steps: int) -> float:
    """Linear warm-up, then the recipe's shape down to 0 at the last step."""
    warm = min(settings.warmup_steps, max(0, steps - 1))
    if step < warm:
        return settings.learning_rate * (step + 1) / (warm + 1)
    share = (step - warm) / max(1, steps - warm)
    shape = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}[settings.lr_scheduler_type]
    return settings.learning_rate * shape


def _groups(module: torch.nn.Module, settings: Train) -> list[dict[str, Any]]:
    """Weight decay on matrices, none on norms and biases."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()
