"""A whole run on a tiny random target: shared by the tests of training, recording, scoring, killing and bad input.

Everything lies in one folder ("home"): ``target`` (a 4-layer Llama of 200 words), ``texts`` (generated documents), ``recipe.yaml``
and, once something ran, ``run``. The same arguments give the same bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from draftstill.recipe import Recipe
from draftstill.recipe_io import load_recipe
from draftstill.runfolder import RunFolder, hash_file

ORDER = ("corpus", "responses", "recording", "draft", "score", "published")
"""Stages of a recipe with one draft and a target taken as it is."""
REAL, PADDED = 200, 256
"""Real tokens, and the target's configured size."""
SPECIAL = ("<unk>", "<eos>", "<user>", "<assistant>")
SETTINGS: dict[str, Any] = {
    "seed": 0, "device": "cpu",
    "target": {"dtype": "float32"},
    "draft": {"layers": [0, 3]},
    "corpus": {"heldout_fraction": 0.4},
    "respond": {"prompts": 16, "heldout_prompts": 6, "prompt_tokens": 8, "max_new_tokens": 24, "batch_size": 6},
    "record": {"top_k": 16, "document_tokens": 1200, "sequence_length": 48, "batch_size": 4, "shard_sequences": 8},
    "train": {"learning_rate": 3e-3, "warmup_steps": 2, "max_steps": 24, "per_device_train_batch_size": 8, "bf16": False,
              "eval_steps": 6, "save_steps": 4, "logging_steps": 4},
    "evaluate": {"prompts": 3, "max_new_tokens": 12, "gamma": 2, "lookup_gamma": 3, "audit_prompts": 1, "bootstrap": 200},
    "publish": {"license": "apache-2.0"},
}  # fmt: skip


def words() -> list[str]:
    """All real tokens by id: special ones, punctuation, and short invented words."""
    made = [a + b + c for a in "bdfgklmnprstv" for b in "aeiou" for c in ("n", "r", "st")]
    return [*SPECIAL, ".", ";", *made[: REAL - len(SPECIAL) - 2]]


def make_tokenizer(vocabulary: Sequence[str] | None = None) -> Any:
    """Word-level, with a chat template and an EOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    by_id = list(vocabulary or words())
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(by_id)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", extra_special_tokens=["<user>", "<assistant>"]
    )
    made.chat_template = "{% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<assistant> . {% endif %}"
    return made


@functools.cache
def _model(seed: int, layers: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=PADDED, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(5.0)  # far from uniform, so that drafts can be right and wrong
        model.lm_head.weight.mul_(3.0)
        model.lm_head.weight[REAL:] *= 20  # padding that would win every argmax, were it ever scored
    return model


def make_model(seed: int = 0, layers: int = 4) -> Any:
    """A random target in float32."""
    return copy.deepcopy(_model(seed, layers))


def make_target(folder: Path, *, seed: int = 0, layers: int = 4, vocabulary: Sequence[str] | None = None) -> Path:
    """A transformers folder."""
    from draftstill.sources import quiet_transformers

    with quiet_transformers():
        make_model(seed, layers).save_pretrained(folder)
    make_tokenizer(vocabulary).save_pretrained(folder)
    return folder


def make_texts(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """Documents of 60 to 160 words in sentences and paragraphs; no two resemble each other."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, known = random.Random(seed), words()[len(SPECIAL) + 2 :]
    for n in range(count):
        favourites = rng.sample(known, 40)
        sentences = [
            " ".join(rng.choices(favourites, k=rng.randint(4, 9))) + rng.choice([".", ".", ";"]) for _ in range(rng.randint(12, 18))
        ]
        paragraphs = [" ".join(sentences[i : i + 4]) for i in range(0, len(sentences), 4)]
        (folder / f"text-{n:02d}.txt").write_text("\n\n".join(paragraphs) + "\n")
    return folder


def write_recipe(home: Path, **sections: Any) -> Path:
    """The recipe of a home; sections are laid over SETTINGS key by key, one section deep."""
    value: dict[str, Any] = copy.deepcopy(SETTINGS)
    value["run_dir"] = str(home / "run")
    value["target"]["source"], value["corpus"]["source"] = str(home / "target"), str(home / "texts")
    for name, keys in sections.items():
        value[name] = {**value.get(name, {}), **keys} if isinstance(keys, dict) else keys
    path = home / "recipe.yaml"
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    return path


def _own_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="draftstill-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def sources() -> Path:
    """A folder with target and texts, made once per process. Look, do not touch."""
    home = _own_folder()
    make_target(home / "target")
    make_texts(home / "texts")
    return home


def make_home(home: Path, **sections: Any) -> Path:
    """Target, texts and recipe in a folder; returns the recipe's path."""
    home.mkdir(parents=True, exist_ok=True)
    for name in ("target", "texts"):
        shutil.copytree(sources() / name, home / name)
    return write_recipe(home, **sections)


def opened(recipe: Path, *overrides: str) -> tuple[Recipe, RunFolder]:
    """Recipe and run folder, as a verb opens them."""
    loaded = load_recipe(recipe, overrides)
    return loaded, RunFolder(loaded.run_dir)


@functools.cache
def finished() -> Path:
    """A home whose run is whole, made once per process through the command line. Look, do not touch: ``borrowed`` gives a copy."""
    recipe = make_home(_own_folder())
    with contextlib.redirect_stdout(open(recipe.parent / "output.txt", "w")):  # noqa: SIM115
        assert command("run", recipe) == 0
    return recipe.parent


def borrowed(home: Path, *kept: str, **sections: Any) -> Path:
    """A home of one's own in which the named stages of the finished run are done; returns the recipe's path.

    The sources stay those of the finished home, since a stage's fingerprint names them.
    """
    source = finished()
    home.mkdir(parents=True, exist_ok=True)
    for name in kept:
        shutil.copytree(source / "run" / name, home / "run" / name)
    recipe = write_recipe(home, **sections)
    value = yaml.safe_load(recipe.read_text())
    value["target"]["source"], value["corpus"]["source"] = str(source / "target"), str(source / "texts")
    recipe.write_text(yaml.safe_dump(value, sort_keys=False))
    return recipe


def command(*arguments: object) -> int:
    """``draftstill ARGUMENTS`` in this process; returns the exit code."""
    from draftstill import cli

    before = sys.argv
    sys.argv = ["draftstill", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before
    raise AssertionError("main returns through SystemExit")


def environment(**extra: str) -> dict[str, str]:
    """For a process of its own: quiet threads, no network, no CUDA."""
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "", **extra}  # fmt: skip


def process(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """``draftstill ARGUMENTS`` in a process of its own."""
    # A suite started in the background by a shell inherits an ignored SIGINT; Ctrl-C is tested all the same.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from draftstill.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=environment(), stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, **options)  # fmt: skip


def hashes(folder: Path, pattern: str = "**/*") -> dict[str, str]:
    """SHA-256 of every file by relative path."""
    return {str(p.relative_to(folder)): hash_file(p) for p in sorted(folder.glob(pattern)) if p.is_file()}
