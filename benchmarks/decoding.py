"""Beam search under a generous bound, and scans that grow: the program of beams.py.

    python benchmarks/decoding.py

A file of its own because the examples have a package called `decoding`, which beams.py imports.
"""

from beams import main

if __name__ == "__main__":
    main()
