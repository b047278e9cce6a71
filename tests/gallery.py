"""docs/gallery/ and examples/, whose modules are imported by their names."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, GALLERY = ROOT / "examples", ROOT / "docs" / "gallery"
sys.path[:0] = [str(EXAMPLES), str(GALLERY)]

from entries import entries  # noqa: E402

__all__ = ["EXAMPLES", "GALLERY", "entries"]
