"""Number of kernels that a program launches on a GPU, from its compiled text."""

import re

# Instructions that run as a separate kernel or library call. The other instructions of a compiled program launch nothing.
_LAUNCHED = {
    "fusion", "custom-call", "copy", "copy-start", "dot", "reduce", "scatter", "gather", "convolution", "transpose", "concatenate",
    "dynamic-slice", "dynamic-update-slice", "pad", "broadcast", "iota", "sort", "triangular-solve", "cholesky",
}  # fmt: skip


def launches(text: str) -> int:
    """Number of kernels and library calls that one run of a compiled program launches, with loop bodies counted per iteration."""
    bodies: dict[str, list[str]] = {}
    entry = current = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line):
            current = found[2]
            bodies[current] = []
            entry = current if found[1] else entry
        elif line.startswith("}"):
            current = ""
        elif current:
            bodies[current].append(line)

    def count(name: str) -> int:
        total = 0
        for line in bodies[name]:
            found = re.search(r"= (?:\([^=]*\)|\S+) ([\w\-]+)\(", line)
            if found is None:
                continue
            called = [x for x in re.findall(r"%([\w.\-]+)", line.partition(f" {found[1]}(")[2]) if x in bodies]
            if found[1] == "while":
                trips = re.search(r"known_trip_count[^0-9]*(\d+)", line)
                body = re.search(r"body=%?([\w.\-]+)", line)
                if trips is None or body is None:
                    raise ValueError(f"a loop with an unknown number of iterations: {line.strip()[:200]}")
                total += int(trips[1]) * count(body[1])
            elif found[1] == "call":
                total += sum(map(count, called))
            elif found[1] == "conditional":
                total += max(map(count, called))
            else:
                total += found[1] in _LAUNCHED
        return total

    return count(entry)
