"""Speed of `atlasjax serve` on this machine: tokens per second and latency against the number of conversations.

    python -m experiments.benchmarks.serving_cpu                     # the rows of serving_cpu.jsonl that are missing
    python -m experiments.benchmarks.serving_cpu --preset titans-tiny --slots 32 --conversations 1 32
    python -m experiments.benchmarks.serving_cpu --preset gated-deltanet-tiny --slots 32 --conversations 32 --shared 512
    python -m experiments.benchmarks.serving_cpu --preset gated-deltanet-tiny --slots 32 --conversations 32 --shared 512 --forget

A server with parameters as they are initialized runs in a process of its own. OpenAI's client streams from it: each conversation
sends two requests, one after the other, of 64 prompt tokens and 96 generated ones, all conversations at once. A round of one
request per conversation before that is not measured. With `--shared` all prompts begin with so many more equal tokens, as with a
system prompt; with `--forget` the server keeps no states of common beginnings. Only ratios between rows of one run are meaningful;
the rows of a run have its number. A stopped command goes on with the row where it was, in the same run.
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import pathlib
import statistics
import tempfile
import time

from experiments.rows import append_row, read_rows

ROWS = pathlib.Path(__file__).with_suffix(".jsonl")
PROMPT, TOKENS, TURNS = 64, 96, 2
SLOTS = CONVERSATIONS = (1, 8, 32)


def serve(preset, slots, forget, pipe):
    """The server's process: sends the address of the server, and serves until it is killed."""
    from flax import nnx

    from atlasjax.data.tokenizers import ByteTokenizer
    from atlasjax.generate import ContextFiles
    from atlasjax.nn import LanguageModel
    from atlasjax.presets import get_preset
    from atlasjax.serve import BatchConfig, Batcher, Worker
    from atlasjax.serve.app import Service
    from atlasjax.serve.chat import PlainChat
    from atlasjax.serve.memories import Memories
    from atlasjax.serve.server import Address, Server, listen

    model = LanguageModel(get_preset(preset), rngs=nnx.Rngs(0))
    sizes = BatchConfig(slots=slots)
    batcher = Batcher(model, ByteTokenizer(), dataclasses.replace(sizes, prefix_gigabytes=0.0) if forget else sizes)
    batcher.warm_up()
    with tempfile.TemporaryDirectory() as folder:
        memories = Memories(ContextFiles(model), folder)
        service = Service(Worker(batcher), ByteTokenizer(), preset, PlainChat(), memories)
        opened, address = listen(Address("127.0.0.1", 0))
        about = {"state_bytes": batcher.slots.no_text.num_bytes}
        Server(service, grace_seconds=1, ready=lambda: pipe.send((address.url, about))).run([opened])


async def conversation(client, preset, number, shared, turns):
    """(seconds to the first text, seconds per token after it, tokens) of each turn."""
    measured = []
    for turn in turns:
        # No two prompts are equal, for the server would read only the first one.
        prompt = (
            [i % 89 + 32 for i in range(shared)] + [32 + turn] + [(7 * number + i) % 96 + 32 for i in range(1, PROMPT)]
        )
        start, first, usage = time.perf_counter(), None, None
        stream = await client.completions.create(
            model=preset, prompt=prompt, max_tokens=TOKENS, seed=turn,
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        async for part in stream:
            if part.choices and part.choices[0].text and first is None:
                first = time.perf_counter() - start
            usage = part.usage or usage
        seconds = time.perf_counter() - start
        measured.append((first, (seconds - first) / max(1, usage.completion_tokens - 1), usage.completion_tokens))
    return measured


async def load(url, preset, shared, count):
    """Tokens per second of `count` conversations, and their latencies."""
    import openai

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600) as client:
        await asyncio.gather(*(conversation(client, preset, i, shared, [0]) for i in range(count)))
        start = time.perf_counter()
        found = await asyncio.gather(
            *(conversation(client, preset, i, shared, range(1, TURNS + 1)) for i in range(count))
        )
        seconds = time.perf_counter() - start
    turns = [turn for one in found for turn in one]
    first = sorted(turn[0] for turn in turns)
    return {
        "tokens_per_second": sum(turn[2] for turn in turns) / seconds,
        "first_seconds": statistics.median(first),
        "first_seconds_longest": first[-1],
        "token_seconds": statistics.median(turn[1] for turn in turns),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="atlas-tiny")
    parser.add_argument("--slots", nargs="*", type=int, default=SLOTS)
    parser.add_argument("--conversations", nargs="*", type=int, default=CONVERSATIONS)
    parser.add_argument("--shared", type=int, default=0, help="tokens at the beginning of all prompts")
    parser.add_argument("--forget", action="store_true", help="keep no states of common beginnings")
    parser.add_argument("--out", type=pathlib.Path, default=ROWS)
    parser.add_argument("--again", action="store_true", help="a new run, instead of going on with the last one")
    args = parser.parse_args()
    rows = read_rows(args.out)
    last = max((row["run"] for row in rows), default=0)
    run = last + 1 if args.again else max(last, 1)
    same = {"preset": args.preset, "shared": args.shared, "forget": args.forget}
    rows = [{"shared": 0, "forget": False} | row for row in rows if row["run"] == run]
    done = {(row["slots"], row["conversations"]) for row in rows if same.items() <= row.items()}
    for slots in args.slots:
        missing = [count for count in args.conversations if (slots, count) not in done]
        if not missing:
            continue
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        server = context.Process(target=serve, args=(args.preset, slots, args.forget, there), daemon=True)
        server.start()
        url, about = here.recv()
        try:
            for count in missing:
                row = {"run": run, **same, "slots": slots, "conversations": count, **about}
                row |= asyncio.run(load(url, args.preset, args.shared, count))
                append_row(args.out, row)
                print(row, flush=True)
        finally:
            server.kill()
            server.join()


if __name__ == "__main__":
    main()
