"""Draftstill: distil a target's token distributions into a small draft for speculative decoding, and prove what it is worth."""

__version__ = "0.1.0"

# In a source tree the stage folders stand beside this one (pyproject.toml maps them in); with the tree itself on sys.path, as
# under ``python -m`` at its root, this package would otherwise hide an installed one and find no draftstill.decode.
from pathlib import Path as _Path

_root = _Path(__file__).resolve().parents[1]
if (_root / "pyproject.toml").is_file() and (_root / "decode" / "__init__.py").is_file():
    __path__.append(str(_root))
del _Path, _root
