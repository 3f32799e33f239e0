"""The end of a training: the best weights as a transformers folder, and what the stage has to tell."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from draftstill.decode import Sampling
from draftstill.runfolder import hash_weights, save_tensors, share_weights
from draftstill.sources import quiet_transformers
from draftstill.train.checkpoint import BEST, load_tensors
from draftstill.train.coverage import RANKING, coverage, coverage_table

if TYPE_CHECKING:
    from draftstill.train.loop import Job


def save_draft(job: Job, folder: Path) -> dict[str, Any]:
    """Write the best draft with the target's tokenizer, adapters merged; returns the stage's facts."""
    from transformers import GenerationConfig

    # The main process alone writes, so sharded weights stay where they are: the whole twin takes the best ones.
    draft, adapted = (job.module.model, job.adapted) if job.twin is None else (job.twin.model, job.twin.adapted)
    load_tensors(draft, load_file(job.work / BEST))
    model = draft if adapted is None else adapted.merge_and_unload()
    shutil.rmtree(folder, ignore_errors=True)
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    with quiet_transformers():
        model.to(getattr(torch, job.recording.manifest["dtype"])).save_pretrained(folder)
        job.draft.tokenizer.save_pretrained(folder)
    share_weights(folder)
    sampler = job.recipe.respond.sampler
    reached = coverage(job.heldout, job.ranking, job.target_head, Sampling(sampler.temperature, sampler.top_k, sampler.top_p))
    save_tensors(folder.parent / RANKING, {"ids": job.ranking.to(torch.int32), **reached})
    return {
        "name": job.draft.name, "parameters": sum(p.numel() for p in model.parameters()), "steps": job.step, "tokens": job.tokens, "learning_rate": job.peak,
        "sequences": {"learnt": len(job.kept), "refused": job.refused}, "train_seconds": round(job.seconds, 1), "curve": job.curve, "best": job.best,
        "heldout": {"mode": job.heldout.mode, "head_tokens": job.recipe.draft.head_tokens},  # what the curve's alpha is, and of which head
        "weights_sha256": hash_weights(folder), "coverage": coverage_table(reached, job.recipe.draft.head_tokens),
        **job.draft.facts,
    }  # fmt: skip
