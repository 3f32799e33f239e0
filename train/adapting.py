"""The adapted stage: the target is tuned on the training documents by LoRA (Hu et al. 2021, arXiv 2106.09685), merged, and saved as a model of its own.

What a step sees follows from (seed, step) alone, and a checkpoint holds adapter and optimizer, so that a resumed run is bit-exact.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from safetensors.torch import load_file

from draftstill.corpus import iter_documents, prepare_corpus
from draftstill.decode import revision_of, set_threads
from draftstill.distill import Objective, fused_loss, fused_tokens, seed_of
from draftstill.errors import DraftstillError, NonFiniteLoss
from draftstill.progress import Progress, say
from draftstill.recipe import Adapt, Recipe
from draftstill.runfolder import RunFolder, atomic_write, hash_file, save_tensors, share_weights
from draftstill.sources import ModelSource, load_model, load_tokenizer, quiet_transformers, resolve_model
from draftstill.stages import resolved_device, resolved_dtype, stages
from draftstill.train.adapter import check_layers, with_adapter
from draftstill.train.build import refuse_untrainable
from draftstill.train.checkpoint import checkpoints, drop_checkpoints, load_checkpoint, load_tensors, model_tensors, save_checkpoint
from draftstill.train.data import Order
from draftstill.train.devices import repeatable
from draftstill.train.interrupts import terminated, termination
from draftstill.train.lessons import Piece, in_batches, lesson, packed, pieces
from draftstill.train.schedule import learning_rate
from draftstill.vocabulary import real_size

_CE = Objective("ce")


def adapt(recipe: Recipe, run: RunFolder) -> Path:
    """Tune the recipe's target and merge it; returns the stage's folder, with the tuned target as a transformers folder in ``model``.

    Raises:
        DraftstillError: no section ``adapt``, or a layer that cannot take an adapter.
        NonFiniteLoss: before the optimizer step that it would have poisoned.
        Terminated: SIGTERM came; the step it came in is finished, and saved.
    """
    if recipe.adapt is None:
        raise DraftstillError(
            "the recipe does not ask for a tuned target", key="adapt", mend="add a section adapt, for example adapt: {r: 16}"
        )
    set_threads()
    corpus = prepare_corpus(recipe, run)
    stage = stages(recipe, run)["adapted"]
    if stage.done:
        return stage.folder
    with repeatable(resolved_device(recipe)):
        tuning = Tuning(recipe, recipe.adapt, corpus, stage.begin())
        tuning.run()
        facts = tuning.save(stage.work / "model")
    folder = stage.finish(**facts)
    drop_checkpoints(folder)  # not before: after a kill the next attempt must still find them
    (folder / "best.safetensors").unlink()
    _tell(facts, folder)
    return folder


class Tuning:
    """What the loop holds: target, adapter, optimizer, lessons, and where it stands."""

    def __init__(self, recipe: Recipe, settings: Adapt, corpus: Path, work: Path) -> None:
        self.recipe, self.settings, self.work = recipe, settings, work
        self.source = resolve_model(recipe.target, "target.source")
        self.tokenizer = load_tokenizer(self.source)
        self.device, self.dtype = torch.device(resolved_device(recipe)), getattr(torch, resolved_dtype(recipe))
        # float16 has no room for gradients: such a target is tuned in float32 and rounded when it is merged.
        self.compute = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        model = load_model(self.source, str(self.compute).removeprefix("torch."), self.device.type)
        refuse_untrainable(model.config)
        check_layers(model, settings)
        self.vocab, self.revision = min(real_size(self.tokenizer), model.config.vocab_size), revision_of(model, self.source)
        self.refused: list[str] = []
        read = lambda split, limit, ends: pieces(  # noqa: E731
            iter_documents(corpus, split),
            self.tokenizer,
            settings.sequence_length,
            recipe.seed,
            limit=limit,
            ends=ends,
            refused=self.refused,
        )
        found, heldout = read("train", settings.max_tokens, True), read("validation", settings.eval_tokens, False)
        left_out = (
            f"{len(self.refused):,} conversations are not taken by the chat template, the first is {self.refused[0]}"
            if self.refused
            else ""
        )
        if not found or not heldout:
            side = "training" if not found else "validation"
            raise DraftstillError(f"the {side} documents hold nothing to tune on" + (f": {left_out}" if left_out else ""), key="corpus.source",
                                  value=recipe.corpus.source, mend="give more documents")  # fmt: skip
        if left_out:
            say(f"  left out: {left_out}")
        self.rows, self.heldout = packed(found, settings.sequence_length), packed(heldout, settings.sequence_length)
        self.order = Order(len(self.rows), recipe.seed)
        self.per_step = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
        epochs = math.ceil(settings.num_train_epochs * len(self.rows) / self.per_step)
        self.steps = settings.max_steps if settings.max_steps > 0 else max(1, epochs)
        self.adapted, self.model, self.adapter = with_adapter(model, settings, recipe.seed)
        self.optimizer = torch.optim.AdamW(self.adapter.parameters(), lr=settings.learning_rate, betas=(0.9, 0.999),
                                           weight_decay=settings.weight_decay, fused=True)  # fmt: skip
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.saved: int | None = None
        """Step of the newest checkpoint."""

    def run(self) -> None:
        """All steps that are left.

        Raises:
            Terminated: SIGTERM came; the step it came in is finished, and saved.
        """
        self._resume()
        started, begun = time.monotonic(), self.seconds
        total = sum(self._count(self._drawn(step)) for step in range(self.steps))
        with termination() as told, Progress("adapt", total, "tokens", done=self.tokens) as progress:
            self._measure_if_due()
            while self.step < self.steps:
                loss = self._optimize()
                self.step += 1
                self.seconds = begun + time.monotonic() - started
                progress.update(self.tokens, f"loss {loss:.3f}")
                if told.is_set():
                    self._end()
                # Before the measurement, which may take longer than a scheduler's patience: an attempt that goes on here makes up for it.
                if self.step % self.settings.save_steps == 0 and self.step < self.steps:
                    self._save_checkpoint()
                self._measure_if_due()
        # Outside of ``termination``, so that none is lost: SIGTERM ends the process by itself from here on.
        if told.is_set():
            self._end()

    def _end(self) -> NoReturn:
        """SIGTERM came: save, and end."""
        if self.saved != self.step:
            self._save_checkpoint()
        raise terminated(self.step, quiet=False)

    def _drawn(self, step: int) -> list[list[Piece]]:
        return [self.rows[i] for i in self.order.take(step * self.per_step, self.per_step)]

    @staticmethod
    def _count(rows: Sequence[Sequence[Piece]]) -> int:
        return sum(p.count for row in rows for p in row)

    def _optimize(self) -> float:
        """One optimizer step; returns its mean loss."""
        settings, drawn = self.settings, self._drawn(self.step)
        tokens = self._count(drawn)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(settings, settings.learning_rate, self.step, self.steps)
        torch.manual_seed(seed_of(self.recipe.seed, "dropout", self.step))
        self.model.train()
        total = 0.0
        for batch in in_batches(drawn, settings.per_device_train_batch_size):
            batch = batch.to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute == torch.bfloat16):
                hidden_NH = self._hidden(batch)
            loss, _ = fused_loss(hidden_NH, self._head(), batch.teacher(), _CE, compute=self.compute)
            (loss / tokens).backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), settings.max_grad_norm)
        if not math.isfinite(total + float(norm)):
            raise NonFiniteLoss(f"step {self.step}: the loss or its gradient is not finite (loss {total / tokens:.3g}, gradient norm {float(norm):.3g})",
                                key="adapt.learning_rate", value=settings.learning_rate,
                                mend="lower the learning rate and add --set-aside, which keeps this attempt beside the new one")  # fmt: skip
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += tokens
        return total / tokens

    def _hidden(self, batch: Any) -> torch.Tensor:
        out = self.model.model(input_ids=batch.ids_BT, position_ids=batch.positions_BT, use_cache=False)
        return out.last_hidden_state.flatten(0, 1)[batch.rows_N]

    def _head(self) -> torch.Tensor:
        return self.model.lm_head.weight[: self.vocab]

    @torch.no_grad()
    def nll(self) -> float:
        """Mean -log p of the validation tokens, in nats. Each row is measured alone: no other batch size can change it."""
        self.model.eval()
        total, count = 0.0, 0
        for row in self.heldout:
            batch = lesson([row]).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.compute == torch.bfloat16):
                hidden_NH = self._hidden(batch)
            found = fused_tokens(hidden_NH, self._head(), batch.teacher(), _CE, compute=self.compute)
            total, count = total + float(found["loss"].sum()), count + len(batch.token_N)
        return total / count

    def _measure_if_due(self) -> None:
        """At the start, every ``eval_steps`` and at the end; once, however often a restart comes to the same step."""
        due = self.step % self.settings.eval_steps == 0 or self.step == self.steps
        if due and not (self.curve and self.curve[-1]["step"] == self.step):
            self._measure()

    def _measure(self) -> None:
        """Held-out perplexity; keeps the adapter of the best so far."""
        value = self.nll()
        self.curve.append({"step": self.step, "tokens": self.tokens, "nll": value, "perplexity": math.exp(min(value, 700.0))})
        say(f"  step {self.step} of {self.steps}: perplexity of the validation text {self.curve[-1]['perplexity']:.2f}")
        if self.best is None or value < self.best["nll"]:
            self.best = self.curve[-1]
            save_tensors(self.work / "best.safetensors", model_tensors(self.adapter))

    def _state(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("step", "tokens", "seconds", "curve", "best")}

    def _save_checkpoint(self) -> None:
        self.saved = self.step
        save_checkpoint(self.work, self.adapter, self.optimizer, self._state(), 1)

    def _resume(self) -> None:
        if found := checkpoints(self.work):
            for name, value in load_checkpoint(found[-1], self.adapter, self.optimizer).items():
                setattr(self, name, value)
            self.saved = self.step

    def save(self, folder: Path) -> dict[str, Any]:
        """The merged target of the best step as a transformers folder; returns what the stage has to tell."""
        assert self.best is not None
        load_tensors(self.adapter, load_file(self.work / "best.safetensors"))
        with quiet_transformers():
            self.model = self.adapted.merge_and_unload(safe_merge=True).to(self.dtype)
            after = self.nll()
            shutil.rmtree(folder, ignore_errors=True)
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        atomic_write(folder / "README.md", _card(self.source, self.settings.r))
        share_weights(folder)
        before = self.curve[0]["nll"]
        return {
            "name": self.source.name, "source": self.recipe.target.source, "kind": self.source.origin["kind"], "licence": self.source.licence,
            "revision": self.revision, "dequantised": self.source.origin.get("gguf"), "r": self.settings.r, "steps": self.steps,
            "best_step": self.best["step"], "tokens": self.tokens, "seconds": round(self.seconds, 1),
            "parameters": sum(p.numel() for p in self.adapter.parameters()), "heldout_tokens": self._count(self.heldout),
            "nll": {"before": before, "after": after}, "perplexity": {"before": math.exp(before), "after": math.exp(after)},
            "refused_by_template": len(self.refused), "curve": self.curve,
            "weights_sha256": {p.name: hash_file(p) for p in sorted(folder.glob("*.safetensors"))},
        }  # fmt: skip


def _card(source: ModelSource, rank: int) -> str:
    """What a folder says of itself where it is opened later: its name and licence, and that it is not the model it came from."""
    head = {**({"license": source.licence} if source.licence else {}), "model_name": f"{source.name} (tuned)"}
    plain = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    return f"---\n{plain}---\n\n{source.name}, tuned by LoRA (rank {rank}) and merged by Draftstill.\n"


def _tell(facts: dict[str, Any], folder: Path) -> None:
    before, after = facts["perplexity"]["before"], facts["perplexity"]["after"]
    say(f"  adapted: rank {facts['r']}, {facts['tokens']:,} tokens in {facts['seconds']:,.0f} s; perplexity of the validation text "
        f"{before:.2f} -> {after:.2f}")  # fmt: skip
    if facts["best_step"] == 0:
        say("  no step made the validation text likelier: the target is kept as it was; give more text, or another adapt.learning_rate")
    if facts["dequantised"]:
        say(f"  {facts['dequantised']} was dequantised before it was tuned: the tuned target is a model of its own, in full precision")
    say(f"  serve this target, and no other, with the draft: {folder / 'model'}")
