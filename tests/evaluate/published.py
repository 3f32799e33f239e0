"""A run folder whose stages up to the score are done, with a tiny random Llama as target and draft: what the tests of publishing share."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from draftstill.evaluate.publishing import publish
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, atomic_write, hash_file, read_json, write_json
from draftstill.stages import stages

SAMPLE = json.loads((Path(__file__).parent / "sample_score.json").read_text())
SAMPLE.setdefault("costs", {"verify_s": {str(n): 0.03 + 0.001 * n for n in range(1, 8)}})
SENTENCE = "The Licensee shall not sublicense, rent or lend the Software to any third party without the prior written consent of Acme."
BYTES, MERGES = 256, 24
SPECIAL = ("<|bos|>", "<|end|>", "<|user|>")
REAL = BYTES + MERGES + len(SPECIAL)


def byte_tokenizer() -> Any:
    """Byte-level BPE split as GPT-2 does: a form that llama.cpp knows by name. 283 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "theran" for b in "eins"][:MERGES]
    vocabulary = {t: i for i, t in enumerate([*letters, *(a + b for a, b in pairs)])}
    made = Tokenizer(models.BPE(vocabulary, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[1], extra_special_tokens=[SPECIAL[2]])
    fast.chat_template = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    assert len(fast) == REAL
    return fast


def word_tokenizer(count: int = 96) -> Any:
    """Word-level: no server of GGUF files knows it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return fast


def make_draft(
    folder: Path, *, rows: int = 96, tied: bool = False, family: str = "llama", tokenizer: Any = None, spread: float = 1.0, layers: int = 2
) -> Path:
    """A transformers folder of a random model in bfloat16 values."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=rows, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128 if family == "qwen3" else 16,  # transformers reads Qwen3 from GGUF with its default only
        max_position_embeddings=512, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=2, pad_token_id=None, sliding_window=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(spread)
            elif spread != 1.0:
                p.add_(0.1 * torch.randn_like(p))  # norms and biases, too, must land in their places
    model.generation_config.repetition_penalty = 1.3
    model.to(torch.bfloat16).save_pretrained(folder)
    (tokenizer or word_tokenizer()).save_pretrained(folder)
    return folder


class Run:
    """Publishes ``model`` for a target that is the same folder with another configured size."""

    def __init__(self, path: Path, model: Path, *, rows: int = 96, **publish_keys: Any) -> None:
        self.path, self.model, self.target = path, model, path / "target"
        (path / "texts").mkdir(parents=True)
        (path / "texts" / "a.txt").write_text(SENTENCE)
        shutil.copytree(model, self.target)
        self.set_rows(rows)
        self.score = copy.deepcopy(SAMPLE)
        self.score["draft"]["weights_sha256"] = hash_file(model / "model.safetensors")
        self.score["corpus"]["source"] = str(path / "texts")
        self.score["conditions"]["command"] = f"draftstill evaluate {path}/my.yaml corpus.source={path}/texts"
        self.keys = publish_keys
        self.options: dict[str, Any] = {}
        self.documents = [{"id": "acme-7", "split": "train", "group": "g", "text": SENTENCE}]

    def set_rows(self, rows: int) -> None:
        """The target's configured vocabulary size; its weights are never loaded here."""
        write_json(self.target / "config.json", {**read_json(self.target / "config.json"), "vocab_size": rows})

    def recipe(self) -> Recipe:
        return Recipe.model_validate_json(json.dumps({"run_dir": str(self.path / "run"), "target": {"source": str(self.target)}, "publish": self.keys,
                                                      "corpus": {"source": str(self.path / "texts")}, **self.options}))  # fmt: skip

    def make(self) -> RunFolder:
        run = RunFolder(self.recipe().run_dir)
        for name, stage in stages(self.recipe(), run).items():
            if name == "published" or stage.done:
                continue
            work = stage.begin()
            if name == "corpus":
                atomic_write(work / "documents.jsonl", "".join(json.dumps(d) + "\n" for d in self.documents))
            if name == "draft":
                shutil.copytree(self.model, work / "model")
            if name == "score":
                write_json(work / "score.json", self.score)
            stage.finish()
        return run

    def publish(self, **options: Any) -> Path:
        return publish(self.recipe(), self.make(), **options)
