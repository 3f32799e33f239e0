"""Datasets of the Hugging Face Hub: ``datasets`` says which files make a split, and they are read like local ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.readers.files import File, included, kind_of, local_file
from draftstill.recipe import Corpus

_REMOTE = "hf://datasets/"


def is_hub(source: str) -> bool:
    return source.startswith("hf:")


def hub_files(corpus: Corpus) -> list[File]:
    """The files of one split of a dataset, fetched unless ``corpus.streaming``.

    ``datasets`` itself is not asked for rows: its tables turn texts that look like dates into dates, and mix the arguments of tool calls.

    Raises:
        DraftstillError: no such dataset, configuration or split, no network, or files of another kind.
    """
    name = corpus.source.removeprefix("hf:")
    if not name.strip("/ "):
        raise DraftstillError("names no dataset", key="corpus.source", value=corpus.source, mend="write hf:OWNER/NAME or hf:FOLDER")
    found = _data_files(corpus, name)
    files = [_file(str(path), corpus) for path in found if included(_name(str(path)), corpus.include)]
    strange = [path for path, file in zip(found, files, strict=False) if file is None]
    kept = [file for file in files if file is not None]
    if strange or not kept:
        example = f"{_name(str(strange[0]))} is neither JSONL, JSON, parquet nor text" if strange else "no file of the split is left"
        raise DraftstillError(
            example, key="corpus.source" if strange or not corpus.include else "corpus.include", value=corpus.source,
            mend="choose a revision with parquet files, such as dataset_revision: refs/convert/parquet; or write the dataset as .jsonl and give the file",
        )  # fmt: skip
    return kept


def _data_files(corpus: Corpus, name: str) -> list[Any]:
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(name, corpus.dataset_config, revision=corpus.dataset_revision)
    except FileNotFoundError as error:
        raise DraftstillError(f"there is no such dataset: {_first_line(error)}", key="corpus.source", value=corpus.source,
                              mend="write hf:OWNER/NAME or hf:FOLDER; a gated dataset needs `hf auth login`") from None  # fmt: skip
    except ConnectionError as error:
        raise _unreachable(corpus, error) from None
    except (ValueError, RuntimeError) as error:
        raise DraftstillError(_first_line(error), key="corpus.dataset_config", value=corpus.dataset_config,
                              mend="choose one of the configurations that the message names, or another corpus.source") from None  # fmt: skip
    splits = builder.config.data_files or {}
    if corpus.dataset_split not in splits:
        raise DraftstillError("the dataset has no such split", key="corpus.dataset_split", value=corpus.dataset_split,
                              mend=f"choose from {', '.join(map(str, splits)) or 'none: it names no files'}")  # fmt: skip
    return list(splits[corpus.dataset_split])


def _unreachable(corpus: Corpus, error: Exception) -> DraftstillError:
    return DraftstillError(f"the Hub cannot be reached: {_first_line(error)}", key="corpus.source", value=corpus.source,
                           mend="check the network; or give hf:FOLDER, a copy on disk")  # fmt: skip


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _name(path: str) -> str:
    """The path within the dataset: hf://datasets/owner/name@revision/data/x.jsonl is data/x.jsonl."""
    return path.removeprefix(_REMOTE).split("/", 2)[2] if path.startswith(_REMOTE) else Path(path).name


def _file(path: str, corpus: Corpus) -> File | None:
    kind, packing = kind_of(path, corpus.format)
    if kind is None:
        return None
    if not path.startswith(_REMOTE):
        return local_file(Path(path), _name(path), kind, packing)
    if corpus.streaming:
        import fsspec

        system, inner = fsspec.core.url_to_fs(path)
        return File(_name(path), kind, int(system.size(inner) or 0), lambda: system.open(inner, "rb"), packing)
    from huggingface_hub import hf_hub_download

    owner, rest = path.removeprefix(_REMOTE).split("/", 1)
    dataset, _, revision = rest.split("/", 1)[0].partition("@")
    try:
        local = hf_hub_download(f"{owner}/{dataset}", _name(path), repo_type="dataset", revision=revision or corpus.dataset_revision)
    except OSError as error:  # as all of its errors are
        raise _unreachable(corpus, error) from None
    return local_file(Path(local), _name(path), kind, packing)
