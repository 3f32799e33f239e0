import subprocess
import sys

import pytest

from draftstill.errors import DraftstillError
from draftstill.vocabulary import Vocabulary, check_vocabulary, template_hash, tokenizer_hash


class Tokenizer:
    """As much of a tokenizer as the contract looks at."""

    def __init__(self, tokens, name="some/tokenizer", template=None, bos=0, eos=1):
        self.vocabulary = dict(tokens) if isinstance(tokens, dict) else {t: i for i, t in enumerate(tokens)}
        self.name_or_path, self.chat_template = name, template
        self.bos_token_id, self.eos_token_id = bos, eos
        self.all_special_ids = [bos, eos]

    def get_vocab(self):
        return dict(self.vocabulary)


TOKENS = ["<s>", "</s>", "a", "b", "c"]


def test_equal_tokenizers_with_different_padding():
    assert check_vocabulary(Tokenizer(TOKENS), Tokenizer(TOKENS), 151_936, 152_064) == Vocabulary(5, 151_936, 152_064)


def test_exact_size_is_enough():
    assert check_vocabulary(Tokenizer(TOKENS), Tokenizer(TOKENS), 5, 5).real_size == 5


def test_holes_count_up_to_the_highest_id():
    holes = {"a": 0, "b": 9}
    assert check_vocabulary(Tokenizer(holes), Tokenizer(holes), 10, 16).real_size == 10


@pytest.mark.parametrize(("sizes", "key"), [((4, 8), "target.source"), ((8, 4), "draft.source")])
def test_model_smaller_than_its_tokenizer(sizes, key):
    with pytest.raises(DraftstillError, match="configured for 4 ids") as caught:
        check_vocabulary(Tokenizer(TOKENS), Tokenizer(TOKENS), *sizes)
    assert caught.value.key == key and caught.value.mend


def test_disagreement_names_both_counts_and_three_examples():
    other = Tokenizer([*reversed(TOKENS[:4]), "c", "extra"], "the/draft")  # ids 0-3 turned round, id 5 more
    with pytest.raises(DraftstillError) as caught:
        check_vocabulary(Tokenizer(TOKENS, "the/target"), other, 8, 8, key="draft.source")
    message = str(caught.value)
    assert "the/target (5 tokens)" in message and "the/draft (6 tokens)" in message and "differ at 5 ids" in message
    assert message.count(" to the target, ") == 3
    assert "id 0 is '<s>' to the target, 'b' to the draft" in message
    assert caught.value.key == "draft.source" and caught.value.mend


def test_a_token_that_one_side_lacks_differs():
    with pytest.raises(DraftstillError, match="differ at 1 ids: id 4 is 'c' to the target, no token to the draft"):
        check_vocabulary(Tokenizer(TOKENS), Tokenizer(TOKENS[:4]), 8, 8)


def test_swapped_tokens_differ_though_the_sets_are_equal():
    with pytest.raises(DraftstillError, match="differ at 2 ids"):
        check_vocabulary(Tokenizer(TOKENS), Tokenizer(["<s>", "</s>", "b", "a", "c"]), 8, 8)


def test_tokenizer_hash_ignores_order_and_sees_ids_and_specials():
    plain = tokenizer_hash(Tokenizer({"a": 0, "b": 1}))
    assert plain == tokenizer_hash(Tokenizer({"b": 1, "a": 0}, name="elsewhere")) and len(plain) == 64
    assert plain != tokenizer_hash(Tokenizer({"a": 1, "b": 0}))
    assert plain != tokenizer_hash(Tokenizer({"a": 0, "b": 1}, eos=0))
    assert tokenizer_hash(Tokenizer(["\ud800", "ü"]))  # a lone surrogate must not break it


def test_template_hash():
    hashes = {template_hash(Tokenizer(TOKENS, template=t)) for t in (None, "", "{{ x }}", "{{ y }}")}
    assert len(hashes) == 4


def test_no_torch():
    code = "import sys, draftstill.vocabulary, draftstill.sources, draftstill.corpus; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
