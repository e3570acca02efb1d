"""What peers make of exported folders: `python -m … FOLDER NAME…` reads FOLDER/NAME and writes FOLDER/NAME.json.

A process of its own. FOLDER/asked.json has the prompts, the number of tokens to generate, and texts to encode.
"""

import json
import pathlib
import sys

from tests.interop import peer_models


def answer(folder: pathlib.Path, asked: dict) -> dict:
    """The peer's ids, its tokenizer, and its greedy tokens."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = torch.tensor(asked["prompts"])
    with torch.no_grad():
        greedy = model.generate(prompts, max_new_tokens=asked["more"], do_sample=False)
        logits = model(prompts, use_cache=False).logits
    own = model.generation_config
    encoded = [tokenizer(text).input_ids for text in asked["texts"]]
    return {
        "ids": [[x.bos_token_id, x.eos_token_id, x.pad_token_id] for x in (model.config.get_text_config(), own)],
        "greedy": greedy[:, prompts.shape[1] :].tolist(),
        "logits": logits.tolist(),
        "size": len(tokenizer),
        "encoded": encoded,
        "decoded": [tokenizer.decode(ids) for ids in encoded],
        "named": [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token],
    }


if __name__ == "__main__":
    place, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    kinds = {json.loads((place / name / "config.json").read_text())["model_type"] for name in names}
    if kinds & {"gated_deltanet", "delta_net", "gla", "rwkv7", "kda", "gated_deltaproduct", "comba"}:
        peer_models.interpret_triton()
        import fla.models  # noqa: F401  # registers its classes
    else:
        sys.modules["fla"] = None  # transformers would call its kernels, which need a GPU
    question = json.loads((place / "asked.json").read_text())
    for name in names:
        (place / f"{name}.json").write_text(json.dumps(answer(place / name, question)))
