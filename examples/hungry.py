#!/usr/bin/env python3
"""A program that needs about 1 GiB of memory: records like those of a log, looked up, changed, and counted.

    uzram run --limit 300M -- python3 examples/hungry.py [MIB]

It knows what each record must be, and ends with a nonzero status if one is not.
"""

import random
import sys

WORDS = "memory page slot handle fault thread queue device block limit cold idle".split()
# What a record takes in CPython, with its list's place and its dictionary's entry.
RECORD_BYTES = 400


def record(number, version):
    """Returns a record: every one is another, and compresses as text does."""
    rng = number * 2654435761 + version * 40503
    text = " ".join(WORDS[(rng >> shift) % len(WORDS)] for shift in range(0, 40, 4))
    return {"id": number, "version": version, "text": text, "size": rng % 100_003}


def main():
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    count = mib * (1 << 20) // RECORD_BYTES
    records = [record(number, 0) for number in range(count)]
    by_size = {}
    for entry in records:
        by_size.setdefault(entry["size"] % 1000, []).append(entry["id"])

    # Nine of ten lookups go to a tenth of the records.
    rng = random.Random(1)
    versions = {}
    for _ in range(count):
        number = rng.randrange(count // 10 if rng.random() < 0.9 else count)
        if records[number] != record(number, versions.get(number, 0)):
            sys.exit(f"record {number} is wrong")
        if rng.random() < 0.1:
            versions[number] = versions.get(number, 0) + 1
            records[number] = record(number, versions[number])

    for number, entry in enumerate(records):
        if entry != record(number, versions.get(number, 0)):
            sys.exit(f"record {number} is wrong")
    total = sum(len(numbers) for numbers in by_size.values())
    if total != count:
        sys.exit(f"{total} records are listed, not {count}")
    print(f"{count} records, {sum(versions.values())} changes: all as they should be")


if __name__ == "__main__":
    main()
