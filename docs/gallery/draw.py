"""Runs examples, and keeps what they print and draw for the gallery.

    python docs/gallery/draw.py lanes fixed_point    # without names, all: half an hour

A program is run with its own settings; what it prints goes to NAME.txt, its picture to NAME.webp.
The table of examples/README.md is written from gallery.toml.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from entries import EXAMPLES, Entry, entries, readme_table

TABLE = re.compile(r"^\| program \|.*?(?=\n\n)", re.M | re.S)
ASIDE = re.compile(r"drawn in|peer ranks")  # where the picture is; what JAX's processes print
WIDTH = 1350  # pixels of a picture, at most


def run(entry: Entry) -> None:
    """In a folder of its own."""
    print(f"{entry.name}: takes {entry.takes}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(entry.program), "--plot", f"{entry.name}.png"]
        ran = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
        with Image.open(Path(folder, f"{entry.name}.png")) as picture:
            picture = picture.convert("RGB")
            picture.thumbnail((WIDTH, 2 * WIDTH))
            picture.save(entry.drawn, quality=80, method=6)
    lines = [line.rstrip() for line in ran.stdout.splitlines() if not ASIDE.search(line)]
    entry.printed.write_text("\n".join(lines).strip("\n") + "\n")


def main() -> None:
    known = entries()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    names = parser.parse_args().names or list(known)
    readme = EXAMPLES / "README.md"
    before = readme.read_text()
    after = TABLE.sub(lambda _: readme_table(), before, count=1)
    if after != before:
        readme.write_text(after)
    for name in names:
        run(known[name])


if __name__ == "__main__":
    main()
