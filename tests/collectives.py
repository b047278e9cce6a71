"""Counts what a compiled program sends between devices, with the trips of its loops."""

import re
from collections import Counter

KINDS = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
SIZES = {"f64": 8, "f32": 4, "s64": 8, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "pred": 1}
BEGINS = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
SENT = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-done)?\(")
ARRAY = re.compile(rf"({'|'.join(SIZES)})\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
CONDITION = re.compile(r" while\(.*condition=%?([\w.\-]+)")
LIMIT = re.compile(r"= s32\[\]\S* constant\((\d+)\)")


def sent(text: str) -> tuple[Counter, Counter]:
    """Return how often an optimised program runs each kind of collective, and their bytes."""
    lines: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if begins := BEGINS.match(line):
            name = begins[2]
            entry = name if begins[1] else entry
        lines.setdefault(name, []).append(line)
    counts, sizes = Counter(), Counter()

    def run(name: str, times: int) -> None:
        whole = "\n".join(lines.get(name, ()))
        # A TPU's program repeats one in the kernels that run meanwhile, and at its end.
        repeated = "chain_id=" in whole and "AsyncCollectiveStart" not in whole
        for line in lines.get(name, ()):
            if not repeated and (found := SENT.search(line)):
                counts[found[2]] += times
                sizes[found[2]] += times * sum(map(size, ARRAY.findall(found[1])))
            for called in CALLED.findall(line):
                run(called, times * trips(line, lines))

    run(entry, 1)
    return counts, sizes


def trips(line: str, lines: dict[str, list[str]]) -> int:
    """Return how often an instruction runs what it calls."""
    condition = CONDITION.search(line)
    if condition is None:
        return 1
    if known := TRIPS.search(line):
        return int(known[1])
    # A TPU's program does not say, but its counters go from zero to a constant.
    below = "\n".join(lines[condition[1]])
    limits = LIMIT.findall(below)
    assert (len(limits), below.count("direction=LT")) == (1, 1), f"unknown trips of a loop: {line}"
    return int(limits[0])


def size(array: tuple[str, str]) -> int:
    total = SIZES[array[0]]
    for n in filter(None, array[1].split(",")):
        total *= int(n)
    return total
