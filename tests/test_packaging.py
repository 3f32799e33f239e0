"""The wheel and the editable install: folders at the top level, packages under ``draftstill``, and no bare names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("decode", "distill", "train", "evaluate")


def python(code: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves a build folder beside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("draftstill", "configs", *FOLDERS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_wheel_installs_only_draftstill(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names}
    assert tops == {"draftstill", next(t for t in tops if t.endswith(".dist-info"))}
    assert {f"draftstill/{f}/__init__.py" for f in FOLDERS} <= set(names)
    assert {"draftstill/configs/demo.yaml", "draftstill/configs/contracts.yaml", "draftstill/configs/accelerate/ddp.yaml"} <= set(names)
    assert any(n.endswith("/LICENSE") for n in names)
    for path in ROOT.glob("draftstill/*.py"):
        assert f"draftstill/{path.name}" in names


def test_installed_wheel_imports_and_finds_its_recipe(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import draftstill.decode.theory, draftstill.distill, draftstill.train, draftstill.evaluate, draftstill.cli as c;"
        "from draftstill.recipe_io import load_recipe; load_recipe(c.config_path('demo.yaml'));"
        "print(draftstill.decode.theory.__file__, c.config_path('demo.yaml'))"
    )
    for path in python(code, tmp_path, PYTHONPATH=str(site)).split():
        assert Path(path).is_relative_to(site)


@pytest.mark.parametrize("place", ["source tree", "elsewhere"])
def test_packages_import_from_anywhere(place: str, tmp_path: Path) -> None:
    """In the source tree ``draftstill`` is the folder in the current directory; its sub-packages come from the editable install."""
    cwd = ROOT if place == "source tree" else tmp_path
    code = "import draftstill.decode, draftstill.distill, draftstill.train, draftstill.evaluate, draftstill.decode.theory as t; print(t.__file__)"
    assert Path(python(code, cwd)).name == "theory.py"


def test_no_bare_package_is_installed(tmp_path: Path) -> None:
    code = f"import importlib.util as u; print(*[s.origin for s in map(u.find_spec, {FOLDERS!r}) if s])"
    assert str(ROOT) not in python(code, tmp_path)
