"""Datasets of the Hugging Face Hub: ``datasets`` says which files make a split, and they are read like local ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftstill.errors import DraftstillError
from draftstill.readers.files import File, Meter, included, kind_of, local_file, name_of
from draftstill.recipe import Corpus

_REMOTE = "hf://datasets/"
_PREFIX = "hf:"


def is_hub(source: str) -> bool:
    return source.startswith(_PREFIX)


def hub_folder(source: str) -> Path | None:
    """The folder that ``hf:FOLDER`` names; None where it is a dataset of the Hub."""
    name = source.removeprefix(_PREFIX)
    folder = Path(name).expanduser()
    return folder if name.strip("/ ") and folder.is_dir() else None


def hub_files(corpus: Corpus, meter: Meter | None = None) -> list[File]:
    """The files of one split of a dataset, fetched unless ``corpus.streaming``; ``meter`` is told the commit that they come from.

    ``datasets`` itself is not asked for rows: its tables turn texts that look like dates into dates, and mix the arguments of tool calls.

    Raises:
        DraftstillError: no such dataset, configuration or split, no network, or files of another kind.
    """
    name = corpus.source.removeprefix(_PREFIX)
    if not name.strip("/ "):
        raise DraftstillError("names no dataset", key="corpus.source", value=corpus.source, mend="write hf:OWNER/NAME or hf:FOLDER")
    folder = hub_folder(corpus.source)
    found = [str(path) for path in _data_files(corpus, name if folder is None else str(folder))]
    if meter is not None:
        meter.revision = next((commit for path in found if (commit := _repository(path)[1])), None)
    named = [(path, _name(path, folder)) for path in found]
    chosen = [(path, inner, kind_of(inner, corpus.format)) for path, inner in named if included(inner, corpus.include)]
    strange = next((inner for path, inner, (kind, _) in chosen if kind is None or ("://" in path and not path.startswith(_REMOTE))), None)
    if strange is not None or not chosen:
        example = f"{strange} is neither JSONL, JSON, parquet nor text" if strange else "no file of the split is left"
        raise DraftstillError(
            example, key="corpus.source" if strange or not corpus.include else "corpus.include", value=corpus.source,
            mend="choose a revision with parquet files, such as dataset_revision: refs/convert/parquet; or write the dataset as .jsonl and give the file",
        )  # fmt: skip
    return [_file(path, inner, str(kind), packing, corpus) for path, inner, (kind, packing) in chosen]


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


def _repository(path: str) -> tuple[str, str | None]:
    """(dataset, commit) of hf://datasets/owner/name@commit/data/x.jsonl."""
    if not path.startswith(_REMOTE):
        return "", None
    owner, rest = path.removeprefix(_REMOTE).split("/", 1)
    dataset, _, commit = rest.split("/", 1)[0].partition("@")
    return f"{owner}/{dataset}", commit or None


def _name(path: str, folder: Path | None) -> str:
    """The path within the dataset: hf://datasets/owner/name@commit/data/x.jsonl is data/x.jsonl."""
    if path.startswith(_REMOTE):
        return path.removeprefix(_REMOTE).split("/", 2)[2]
    for root in () if folder is None else (folder.absolute(), folder.resolve()):
        if Path(path).is_relative_to(root):
            return name_of(Path(path).relative_to(root))
    return path


def _file(path: str, inner: str, kind: str, packing: str, corpus: Corpus) -> File:
    if not path.startswith(_REMOTE):
        return local_file(Path(path), inner, kind, packing)
    try:
        if corpus.streaming:
            import fsspec

            system, remote = fsspec.core.url_to_fs(path)
            return File(inner, kind, int(system.size(remote) or 0), lambda: system.open(remote, "rb"), packing)
        from huggingface_hub import hf_hub_download

        dataset, commit = _repository(path)
        local = hf_hub_download(dataset, inner, repo_type="dataset", revision=commit or corpus.dataset_revision)
    except Exception as error:  # errors of the Hub are OSErrors, those of the network its library's own
        raise _unreachable(corpus, error) from None
    return local_file(Path(local), inner, kind, packing)
