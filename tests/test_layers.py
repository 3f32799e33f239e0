"""Imports point downwards only, the bare folder names are never imported, and the pure modules stay free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ["ground", "decode", "distill", "train", "evaluate", "front"]
FOLDERS = LAYERS[1:5]
FRONT = {"cli", "plan", "running"}
PURE = {"draftstill.decode.trace", "draftstill.decode.theory", "draftstill.evaluate.stats", "draftstill.evaluate.report"}
"""Import without torch. Those of decode and evaluate may also be imported past the folder's face."""
HEAVY = {"torch", "transformers", "accelerate", "peft", "datasets", "wandb"}

FILES = sorted(p for folder in ("draftstill", *FOLDERS) for p in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "draftstill" else ("draftstill", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p) for p in FILES}


def layer(module: str) -> str:
    part = (module.split(".") + [""])[1]
    return part if part in FOLDERS else "front" if part in FRONT else "ground"


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements that run when the module is imported: not function bodies, not ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_run_time(node)


def imports(nodes: Iterator[ast.AST], path: Path) -> Iterator[tuple[str, str | None, int]]:
    """(module, name or None, line) for every import; ``from package import submodule`` counts as the submodule."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full, None, node.lineno) if full in MODULES else (str(node.module), alias.name, node.lineno)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def everything(path: Path) -> list[tuple[str, str | None, int]]:
    return list(imports(iter(ast.walk(parsed(path))), path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    own = layer(module_name(path))
    for module, _, line in everything(path):
        assert module.split(".")[0] not in FOLDERS, f"{path.name}:{line}: the bare {module!r}; write draftstill.{module}"
        if module.split(".")[0] == "draftstill":
            other = layer(module)
            assert LAYERS.index(other) <= LAYERS.index(own), f"{path.name}:{line}: {own} imports {module} from the layer above"


def test_no_test_imports_a_bare_folder() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for module, _, line in everything(path):
            assert module.split(".")[0] not in FOLDERS, f"{path}:{line}: the bare {module!r}"


def exported(folder: str) -> set[str]:
    """Names that a folder's face hands out: defined, imported, or listed in ``__all__`` or a lazy table of names."""
    tree = parsed(ROOT / folder / "__init__.py")
    names = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {(a.asname or a.name) for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_folders_are_used_through_their_face(path: Path) -> None:
    own = layer(module_name(path))
    for module, name, line in everything(path):
        if module.split(".")[0] != "draftstill" or layer(module) not in FOLDERS or layer(module) == own or module in PURE:
            continue
        folder, *inner = module.split(".")[1:]
        # A function may share its module's name (draftstill.train.train): then the module is as good as the face.
        if inner == [name] or not inner:
            assert name is None or name in exported(folder) or inner == [name], f"{path.name}:{line}: {folder} does not export {name}"
        else:
            raise AssertionError(f"{path.name}:{line}: {module} is private to {folder}/; import from draftstill.{folder}")


LIGHT = [p for p in FILES if module_name(p) in PURE or layer(module_name(p)) in ("ground", "front")]


@pytest.mark.parametrize("path", LIGHT, ids=lambda p: str(p.relative_to(ROOT)))
def test_pure_modules_import_nothing_heavy(path: Path) -> None:
    for other, _, line in imports(at_run_time(parsed(path)), path):
        assert other.split(".")[0] not in HEAVY, f"{path.name}:{line}: {other} at module level"


def test_pure_modules_load_without_torch() -> None:
    ground = {m for m in MODULES if layer(m) in ("ground", "front") and m.count(".") < 2}
    names = sorted(ground | (PURE & MODULES))
    code = f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
