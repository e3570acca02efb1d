"""Speed and memory of the input pipeline, on one core.

    python experiments/benchmarks/input_cpu.py speed                     # tokens/s of tokenizing, preparing and reading
    python experiments/benchmarks/input_cpu.py memory --megabytes 10 30 100 1000 # peak resident memory against the size of a text

The text is drawn from the paragraphs of the embedded reference, in documents of about 1,000 tokens (`speed`) or as one file
(`memory`), in a temporary folder. Each command prints a table and appends JSON lines to `--out`: one of rates, or one for each
text and tokenizer. Rates are tokens per second of
the process's CPU time, on all its threads, so they are those of one core, and other work on the machine changes them less.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import numpy as np

LENGTH, BATCH, VOCABULARY = 4096, 8, 8000


def paragraphs():
    from atlasjax.data import DataConfig, load_text

    return load_text(DataConfig(), "train").split("\n\n")


def write_documents(path, count, seed=0):
    """JSON lines of about a thousand BPE tokens each."""
    rng, parts = random.Random(seed), paragraphs()
    with open(path, "w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": "\n\n".join(rng.choices(parts, k=rng.randint(1, 40)))}) + "\n")


def write_text(path, num_bytes, seed=0):
    """One text of that size."""
    rng, parts = random.Random(seed), paragraphs()
    with open(path, "w") as file:
        while file.tell() < num_bytes:
            file.write("\n\n".join(rng.choices(parts, k=1000)) + "\n\n")


def rate(make, rounds=3):
    """The best of a few rounds of (tokens of `make()`) per second of CPU time."""
    best = 0.0
    for _ in range(rounds):
        start = time.process_time()
        tokens = make()
        best = max(best, tokens / (time.process_time() - start))
    return best


def batches(config, tokenizer, count, **more):
    """Tokens in the first `count` batches."""
    from atlasjax.data import make_pipeline

    pipeline = make_pipeline(config, tokenizer, "train", **more)
    return sum(int(np.count_nonzero(batch["weights"])) for batch in itertools.islice(pipeline, count))


def array_record(folder, documents):
    """The same documents as ArrayRecord, one record each: a source of their tokens."""
    from array_record.python import array_record_data_source, array_record_module

    path = str(folder / "documents.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1,uncompressed")
    for ids in documents:
        writer.write(ids.tobytes())
    writer.close()
    return array_record_data_source.ArrayRecordDataSource([path])


def speed(args, folder):
    from atlasjax.data import DataConfig, load_documents, make_tokenizer, prepare
    from atlasjax.data.prepared import open_prepared

    write_documents(folder / "a.jsonl", args.documents)
    base = DataConfig(source="jsonl", paths=(str(folder),), tokenizer=f"bpe:{VOCABULARY}", validation_fraction=0)
    tokenizer = make_tokenizer(base)
    tokenizer.save(folder / "tokenizer")
    base = dataclasses.replace(base, tokenizer=f"bpe:{folder / 'tokenizer/bpe.json'}")
    texts = load_documents(base, "train").texts
    tokens = sum(len(tokenizer.encode(text)) for text in texts)
    sizes = {"sequence_length": LENGTH, "batch_size": BATCH}
    few = max(4, tokens // LENGTH // BATCH // 2)  # batches, of half an epoch
    found = {
        "BPE of a document": rate(lambda: sum(len(tokenizer.encode(text)) for text in texts[: args.documents // 4]))
    }
    fly = dataclasses.replace(base, packing="documents", **sizes)
    found["on the fly, documents"] = rate(lambda: batches(fly, tokenizer, few // 2))
    rows = {}
    for packing in ("contiguous", "documents"):
        config = dataclasses.replace(base, packing=packing)
        start = time.process_time()
        prepare(config, folder / packing)
        rows[packing] = tokens / (time.process_time() - start)
        read = DataConfig(source="prepared", paths=(str(folder / packing),), packing=packing, **sizes)
        start = time.perf_counter()
        batches(read, tokenizer, 1)
        rows[f"{packing}, seconds to the first batch"] = time.perf_counter() - start
        found[f"prepared, {packing}"] = rate(lambda read=read: batches(read, tokenizer, 4 * few))
    found["prepare, tokenizing and shuffling"] = rows["documents"]
    files, _ = open_prepared(read, tokenizer, "train")
    spans = [files.document(i) for i in range(files.num_documents)]
    source = array_record(folder, [files[a:b] for a, b in spans])
    order = random.Random(0).sample(range(len(spans)), len(spans))
    dtype = files[:1].dtype
    found["token files, a document at random"] = rate(lambda: sum(len(files[slice(*files.document(i))]) for i in order))
    found["ArrayRecord, a document at random"] = rate(lambda: sum(len(np.frombuffer(source[i], dtype)) for i in order))
    found["token files, a window at random"] = rate(
        lambda: sum(len(files[i * LENGTH : (i + 1) * LENGTH]) for i in range(len(files) // LENGTH))
    )
    print(f"{len(texts):,} documents, {tokens:,} tokens, {VOCABULARY:,} ids; tokens/s of one core")
    for name, value in found.items():
        print(f"  {name:40s} {value:14,.0f}")
    seconds = {name: value for name, value in rows.items() if "seconds" in name}
    for name, value in seconds.items():
        print(f"  {name:40s} {value:14.2f}")
    append(args, {"documents": len(texts), "tokens": tokens, "tokens_per_second": found, "seconds": seconds})


def peak(code, *arguments):
    """Megabytes of resident memory at most, of a child that runs `code`, beyond its imports."""
    program = (
        "import json, resource, sys; import grain, numpy, tokenizers; from atlasjax.data import *\n"
        "from atlasjax.data import preparation, pipeline, tokenizers\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        f"before = peak(); {code}\nprint(json.dumps([before, peak()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    before, after = json.loads(done.stdout.splitlines()[-1])
    return round(before), round(after)


_PREPARE = """
config = DataConfig(source="text", paths=(sys.argv[1],), packing=sys.argv[3], tokenizer=sys.argv[4], validation_fraction=0.01)
prepare(config, sys.argv[2])
"""
_READ = """
config = DataConfig(source="prepared", paths=(sys.argv[2],), packing=sys.argv[3], sequence_length=4096, batch_size=8)
for batch in make_pipeline(config, make_tokenizer(config), "train", repeat=False): pass
"""
_FLY = """
config = DataConfig(source="text", paths=(sys.argv[1],), packing="documents", tokenizer=sys.argv[4], validation_fraction=0)
next(iter(make_pipeline(config, make_tokenizer(config), "train")))
"""


def memory(args, folder):
    bpe = folder / "tokenizer"
    from atlasjax.data import DataConfig, make_tokenizer

    make_tokenizer(DataConfig(tokenizer=f"bpe:{VOCABULARY}")).save(bpe)
    print("one text file: MB of resident memory at most (MB after the imports)")
    for megabytes in args.megabytes:
        text = folder / f"{megabytes}.txt"
        write_text(text, megabytes * 10**6)
        for name, tokenizer in (("byte", "byte"), ("bpe", f"bpe:{bpe / 'bpe.json'}")):
            if name == "bpe" and megabytes > args.bpe_megabytes:
                continue
            rows = {}
            for packing in ("contiguous", "documents"):
                out = folder / f"{megabytes}-{name}-{packing}"
                rows[f"prepare, {packing}"] = peak(_PREPARE, text, out, packing, tokenizer)
                rows[f"read all, {packing}"] = peak(_READ, text, out, packing, tokenizer)
            if name == "bpe":
                rows["on the fly, documents"] = peak(_FLY, text, "", "", tokenizer)
            append(args, {"megabytes": megabytes, "tokenizer": name, "peak": rows})
            for row, (before, after) in rows.items():
                print(f"  {megabytes:5d} MB  {name:5s} {row:24s} {after:6d} ({before})", flush=True)
        text.unlink()


def append(args, row):
    """Appends a row to `--out`."""
    if args.out:
        with open(args.out, "a") as file:
            file.write(json.dumps({"command": args.command, **row}) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["speed", "memory"])
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 30, 100, 1000])
    parser.add_argument("--bpe-megabytes", type=int, default=30, help="largest text that is measured with a BPE too")
    parser.add_argument("--out", help="file to which one JSON line is appended")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"speed": speed, "memory": memory}[args.command](args, pathlib.Path(folder))


if __name__ == "__main__":
    main()
