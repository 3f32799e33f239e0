"""Serving commands, each parsed against the option names of that server at a stored version (data/server_options.json)."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftstill.errors import DraftstillError
from draftstill.evaluate.card import card
from draftstill.evaluate.serving import parse_command
from draftstill.evaluate.snippets import llama_command, snippets
from tests.evaluate.published import Run

KNOWN: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "server_options.json").read_text())
DRAFTS = ["jo/draft's name", "PATH/TO/THIS/FOLDER"]


def by_server(draft: str, **more: Any) -> dict[str, str]:
    return {s.server: s.code for s in snippets("org/target", draft, 3, **more)}


def options(words: list[str], server: str) -> dict[str, str]:
    """Option to value, every name checked against the stored list, every value with known choices against those."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-"):
            assert word in KNOWN[server]["options"], f"{server} has no option {word}"
            name = word
            found[name] = ""
        else:
            assert name and not found[name], f"{server}: {word} belongs to no option"
            found[name] = word
    for option, value in found.items():
        assert value in KNOWN[server].get("values", {}).get(option, [value]), f"{server}: {option} takes no {value}"
    return found


def test_every_server_has_a_source_and_a_version() -> None:
    for server, code in by_server("jo/d").items():
        assert KNOWN[server]["source"] and KNOWN[server]["version"] and code


@pytest.mark.parametrize("draft", DRAFTS)
def test_vllm(draft: str) -> None:
    words = shlex.split(by_server(draft)["vLLM"].replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "org/target"]
    config = json.loads(options(words[3:], "vLLM")["--speculative-config"])
    assert set(config) <= set(KNOWN["vLLM"]["speculative_config"])
    assert all(config[k] in KNOWN["vLLM"]["values"][k] for k in ("method", "draft_sample_method"))
    assert config == {"method": "draft_model", "model": draft, "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}


@pytest.mark.parametrize("draft", DRAFTS)
def test_sglang(draft: str) -> None:
    words = shlex.split(by_server(draft)["SGLang"].replace("\\\n", " "))
    assert words[:3] == ["python", "-m", KNOWN["SGLang"]["module"]]
    found = options(words[3:], "SGLang")
    assert (
        found["--speculative-num-steps"] == "3"
        and found["--speculative-num-draft-tokens"] == "4"
        and found["--speculative-draft-model-path"] == draft
    )


@pytest.mark.parametrize("gguf", [None, "draft-q8_0.gguf"])
def test_llama_cpp(gguf: str | None) -> None:
    lines = by_server("jo/d", gguf=gguf, from_hub=True)["llama.cpp"].splitlines()
    found = options(shlex.split(lines[1])[1:], "llama.cpp")
    assert found == {
        "-m": "TARGET.gguf",
        "-md": gguf or "draft.gguf",
        "--spec-type": "draft-simple",
        "--spec-draft-n-max": "3",
        "--metrics": "",
    }
    if gguf:
        words = shlex.split(lines[0])
        assert words[:4] == ["hf", "download", "jo/d", gguf] and set(words[4::2]) <= set(KNOWN["hf"]["options"])
    assert dict(parse_command(lines[1])) == found, "what the card prints is what the served measurement runs"


def test_options_that_llama_cpp_removed_are_not_used() -> None:
    code = " ".join(by_server("jo/d").values()).split()
    assert not set(KNOWN["llama.cpp"]["removed"]) & set(code)
    with pytest.raises(DraftstillError, match="not known to the embedded server"):
        parse_command("llama-server -m x --draft-max 3")
    assert parse_command(llama_command("a b.gguf", "d.gguf", 2))[0] == ("-m", "a b.gguf")


def test_transformers() -> None:
    tree = ast.parse(by_server("jo/draft")["transformers"])
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "generate"]
    assert {k.arg for k in calls[0].keywords if k.arg} <= set(KNOWN["transformers"]["generate"])
    set_keys = [n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assert set_keys and set(set_keys) <= set(KNOWN["transformers"]["generation_config"])
    from transformers import GenerationConfig

    assert all(hasattr(GenerationConfig(), k) for k in set_keys)


def test_tensorrt() -> None:
    config = yaml.safe_load(by_server("jo/d")["TensorRT-LLM"])["speculative_config"]
    assert set(config) == set(KNOWN["TensorRT-LLM"]["speculative_config"]) and config["max_draft_len"] == 3


def test_the_card_carries_them_with_versions_and_says_what_was_run(byte_run: Run) -> None:
    folder = byte_run.publish()
    text = (folder / "README.md").read_text()
    assert "only llama.cpp and transformers were run" in text
    for server in ("vLLM", "SGLang", "llama.cpp", "transformers", "TensorRT-LLM"):
        assert f"### {server} (read: " in text
    assert "PATH/TO/THIS/FOLDER/draft-q8_0.gguf" in text
    byte_run.keys = {"repo_id": "jo/d"}
    text = card(byte_run.score, byte_run.recipe(), export={"gguf": [{"file": "draft-q8_0.gguf", "bytes": 1, "tokens_from": "x"}]})
    assert "hf download jo/d draft-q8_0.gguf --local-dir ." in text and "-md draft-q8_0.gguf" in text


def test_publishing_ends_with_commands_for_the_folder_here(byte_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = byte_run.publish()
    told = capsys.readouterr().out
    for word in ("vllm serve", "sglang.launch_server", "llama-server -m TARGET.gguf", "assistant_model", str(folder / "draft-q8_0.gguf")):
        assert word in told


def test_the_transformers_snippet_runs_and_writes_the_targets_text(byte_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, target = byte_run.publish(), str(byte_run.model)
    code = next(s.code for s in snippets(target, str(folder), 3) if s.server == "transformers")
    capsys.readouterr()
    exec(compile(code, "snippet", "exec"), {})
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target)
    alone = model.generate(**tokenizer("Your text", return_tensors="pt"), max_new_tokens=64, do_sample=False)
    assert tokenizer.decode(alone[0]) in capsys.readouterr().out
