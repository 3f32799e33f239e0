"""A donor with another tokenizer: which rows go where, and that ids mean the target's tokens afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftstill.errors import DraftstillError
from draftstill.train.build import build_draft, preflight
from draftstill.train.transplant import donation, token_bytes
from tests.pipeline import REAL, make_tokenizer, words
from tests.train.drafts import recipe_of, saved, tiny

TEXT = ["Die Parteien vereinbaren naïve clauses: café, 42 °C, and “quoted” text.", "the quick brown fox — jumps; the lazy dog."]


def byte_level(vocabulary: int, *specials: str) -> Any:
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(TEXT * 4, vocab_size=vocabulary, min_frequency=1, special_tokens=list(specials), show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token=specials[0], unk_token=None)


def metaspace(prepend: str = "never") -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = [f"<0x{b:02X}>" for b in range(256)]
    made.train_from_iterator(
        TEXT * 4, trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>", *fallback], show_progress=False)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    return made


@pytest.mark.parametrize("tokenizer", [byte_level(330, "<eos>"), metaspace()], ids=["byte-level", "metaspace"])
def test_tokens_write_the_bytes_of_their_text(tokenizer: Any) -> None:
    """The whole text comes back from its tokens' bytes: spaces, accents and pieces of characters included."""
    written = token_bytes(tokenizer)
    for text in [*TEXT, "ÿ 漢字\t\n"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if getattr(tokenizer, "unk_token_id", None) in ids:
            continue
        assert b"".join(written[i] for i in ids) == text.encode()
    assert tokenizer.eos_token_id not in written


@pytest.mark.parametrize("pair", [(byte_level(330, "<eos>"), byte_level(300, "</s>")), (byte_level(330, "<eos>"), metaspace()),
                                  (byte_level(330, "<eos>"), metaspace("always")), (metaspace(), byte_level(330, "<eos>"))],
                         ids=["two of bytes", "from metaspace", "from one that sets a space before each text", "from bytes"])  # fmt: skip
def test_a_token_gets_the_donors_tokens_of_the_same_bytes(pair: tuple[Any, Any]) -> None:
    target, donor = pair
    mine, theirs, found = token_bytes(target), token_bytes(donor), donation(target, donor)
    single = 0
    for number, text in mine.items():
        rows = found.rows[number]
        if rows and all(r in theirs for r in rows):
            assert b"".join(theirs[r] for r in rows) == text, (number, text)
            single += len(rows) == 1
    assert single > 150 and found.copied >= single
    assert found.rows[target.eos_token_id] == [donor.eos_token_id], "end of text by its role"
    shares = found.facts
    assert shares["copied"] + shares["composed"] + shares["mean"] == pytest.approx(1)


def test_a_letter_of_its_own_goes_before_the_byte_that_stands_in_for_it() -> None:
    target, donor = byte_level(330, "<eos>"), metaspace()
    names = {number: token for token, number in donor.get_vocab().items()}
    letters = {
        text.decode(): number for number, text in token_bytes(target).items() if text.isalpha() and len(text) == 1 and text < b"\x80"
    }
    own = {letter: number for letter, number in letters.items() if letter in donor.get_vocab()}
    found = donation(target, donor)
    assert len(own) > 10 and all(names[found.rows[number][0]] == letter for letter, number in own.items())


@pytest.mark.parametrize("role", ["pad_token", "unk_token", "bos_token"])
def test_a_token_of_several_roles_is_an_end_of_text_first(role: str) -> None:
    """Many a target pads with its end of text, and many a donor has no padding."""
    target, donor = byte_level(330, "<eos>"), byte_level(300, "</s>", "<other>")
    setattr(target, role, "<eos>")
    assert donation(target, donor).rows[target.eos_token_id] == [donor.eos_token_id]
    setattr(donor, role, "<other>")
    assert donation(target, donor).rows[target.eos_token_id] == [donor.eos_token_id]


def test_all_byte_tokens_find_a_row() -> None:
    """A byte-level target from a byte-level donor: pieces of characters, which are no text, included."""
    found = donation(byte_level(330, "<eos>"), byte_level(300, "</s>"))
    assert all(found.rows) and found.facts["mean"] == 0


def test_rows_are_copied_averaged_or_the_mean_of_all(tmp_path: Path) -> None:
    donors = [*words()[:90], "zzz", *words()[90:150]]  # ids moved by one from 90 on; 150 to 199 unknown to it
    donor = tiny("llama", seed=4, layers=1, rows=160)
    saved(tmp_path / "donor", donor, donors)
    draft = build_draft(recipe_of(tmp_path / "home", recording=False, source=str(tmp_path / "donor"), transplant=True))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        now, before = draft.model.get_parameter(name).detach(), donor.get_parameter(name).detach()
        assert len(now) == REAL == draft.model.config.vocab_size
        assert torch.equal(now[:90], before[:90]) and torch.equal(now[90:150], before[91:151])
        assert torch.allclose(now[150:], before[: len(donors)].mean(0).expand(50, -1), atol=1e-6)
    assert draft.facts["transplant"] == {"tokens": 200, "copied": 0.75, "composed": 0.0, "mean": 0.25}
    assert draft.tokenizer.get_vocab() == make_tokenizer().get_vocab() and "the target's vocabulary" in draft.name
    assert draft.model.config.eos_token_id == 1


def test_without_the_key_it_is_refused_and_the_mend_names_it(tmp_path: Path) -> None:
    saved(tmp_path / "donor", tiny("llama", seed=4, layers=1, rows=160), words()[:150])
    for ask in (preflight, build_draft):
        with pytest.raises(DraftstillError, match="differ at 50 ids") as caught:
            ask(recipe_of(tmp_path / "home", recording=False, source=str(tmp_path / "donor")))
        assert caught.value.key == "draft.source" and "draft.transplant: true" in str(caught.value) and "prune" in str(caught.value)
    preflight(recipe_of(tmp_path / "home", recording=False, source=str(tmp_path / "donor"), transplant=True))


def test_equal_tokenizers_are_said_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tiny("llama", seed=4, layers=1)
    saved(tmp_path / "own", own)
    (tmp_path / "own" / "README.md").write_text("---\nlicense: mit\n---\n")
    recipe = recipe_of(tmp_path / "home", recording=False, source=str(tmp_path / "own"), transplant=True)
    preflight(recipe)
    assert "equal already" in capsys.readouterr().out
    draft = build_draft(recipe)
    assert draft.facts == {"start": {"name": "own", "revision": None, "licence": "mit"}}
    assert torch.equal(draft.model.lm_head.weight, own.lm_head.weight)
