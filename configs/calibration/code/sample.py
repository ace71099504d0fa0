#!/usr/bin/env python3
"""Write fixtures/micro-llama: a random-weight Llama small enough for fast end-to-end tests.

Two layers, hidden 128, intermediate 256, two heads over one key-value head, 384 tokens, bf16, two
shards with an index. The tokenizer is a byte-level BPE whose merges are counted on the start of
fixtures/corpus/northanger.txt. Standard library only; the same bytes on every machine: the normal
deviates are sums of uniforms, so no libm is involved.

usage: scripts/make_micro_llama.py [OUT]
"""

import collections
import json
import pathlib
import random
import re
import struct
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 128, 256, 2, 384
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"]
# Channels of the hidden state that trained models grow: a few norm weights far above the rest.
OUTLIERS = {7: 6.0, 50: -4.0, 101: 9.0}


def byte_alphabet():
    """The 256 printable stand-ins of byte-level BPE, by byte value."""
    keep = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars, spare = {b: chr(b) for b in keep}, 256
    for b in range(256):
        if b not in chars:
            chars[b] = chr(spare)
            spare += 1
    return chars


def learn_merges(text, alphabet, count):
    words = collections.Counter(re.findall(r" ?[A-Za-z]+|[^A-Za-z]", text))
    pieces = {w: [alphabet[b] for b in w.encode()] for w in words}
    merges = []
    while len(merges) < count:
        pairs = collections.Counter()
        for word, times in words.items():
            for pair in zip(pieces[word], pieces[word][1:]):
                pairs[pair] += times
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for word, split in pieces.items():
            at = 0
            while at + 1 < len(split):
                if (split[at], split[at + 1]) == best:
                    split[at : at + 2] = ["".join(best)]
                at += 1
    return merges


def tokenizer():
    alphabet = byte_alphabet()
    text = (ROOT / "fixtures/corpus/northanger.txt").read_text(encoding="utf-8")[:60_000]
    merges = learn_merges(text, alphabet, VOCAB - 256 - len(SPECIAL))
    tokens = SPECIAL + sorted(alphabet.values()) + ["".join(pair) for pair in merges]
    assert len(tokens) == len(set(tokens)) == VOCAB
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bos = SPECIAL[0]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for i, t in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}


def bf16(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def normal(rng):
    return sum(rng.random() for _ in range(12)) - 6.0


def matrix(rng, rows, cols, std):
    """[rows, cols]; rows of unequal size, as in trained weights."""
    out = []
    for _ in range(rows):
        scale = std * (0.6 + 0.8 * rng.random())
        out.extend(bf16(scale * normal(rng)) for _ in range(cols))
    return [rows, cols], b"".join(out)


def norm(rng, outliers):
    values = [1.0 + 0.1 * normal(rng) for _ in range(HIDDEN)]
    for channel, weight in outliers.items():
        values[channel] = weight
    return [HIDDEN], b"".join(map(bf16, values))


def tensors():
    rng = random.Random(20240229)
    wide, narrow = HIDDEN**-0.5, INTERMEDIATE**-0.5
    yield "model.embed_tokens.weight", matrix(rng, VOCAB, HIDDEN, 0.5)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", norm(rng, OUTLIERS)
        yield at + "self_attn.q_proj.weight", matrix(rng, HEADS * HEAD_DIM, HIDDEN, wide)
        yield at + "self_attn.k_proj.weight", matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN, wide)
        yield at + "self_attn.v_proj.weight", matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN, wide)
        yield at + "self_attn.o_proj.weight", matrix(rng, HIDDEN, HEADS * HEAD_DIM, wide)
        yield at + "post_attention_layernorm.weight", norm(rng, OUTLIERS)
        yield at + "mlp.gate_proj.weight", matrix(rng, INTERMEDIATE, HIDDEN, wide)
        yield at + "mlp.up_proj.weight", matrix(rng, INTERMEDIATE, HIDDEN, wide)
        yield at + "mlp.down_proj.weight", matrix(rng, HIDDEN, INTERMEDIATE, narrow)
    yield "model.norm.weight", norm(rng, {})
    yield "lm_head.weight", matrix(rng, VOCAB, HIDDEN, 2 * wide)


def write_shard(path, part):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (shape, raw) in part:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "fixtures/micro-llama"
    out.mkdir(parents=True, exist_ok=True)
    everything = list(tensors())
    # The cut falls inside layer 1, so that one layer is spread over both shards.
    cut = [name for name, _ in everything].index("model.layers.1.mlp.gate_proj.weight")
    weight_map = {}
    for number, part in enumerate((everything[:cut], everything[cut:]), 1):
        shard = f"model-{number:05}-of-00002.safetensors"
        write_shard(out / shard, part)
        weight_map.update({name: shard for name, _ in part})
    total = sum(len(raw) for _, (_, raw) in everything)
    write_json(out / "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    write_json(out / "tokenizer.json", tokenizer())
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2], "add_bos_token": True, "model_max_length": 512})


if __name__ == "__main__":
    main()


class RunningStatistics:
    """Mean and variance of a stream of numbers, one pass, by Welford's method."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self._squares += delta * (value - self.mean)

    @property
    def variance(self) -> float:
        if self.count < 2:
            raise ValueError("variance needs at least two values")
        return self._squares / (self.count - 1)

    def __repr__(self) -> str:
        return f"RunningStatistics(count={self.count}, mean={self.mean:.6g})"


async def fetch_all(client, urls, *, limit=8):
    semaphore = asyncio.Semaphore(limit)

    async def fetch(url):
        async with semaphore:
            for attempt in range(3):
                try:
                    response = await client.get(url, timeout=10.0)
                    response.raise_for_status()
                    return response.json()
                except (TimeoutError, ConnectionError) as error:
                    if attempt == 2:
                        raise RuntimeError(f"{url}: gave up after 3 attempts") from error
                    await asyncio.sleep(2**attempt)

    return await asyncio.gather(*(fetch(url) for url in urls))


def softmax(logits: np.ndarray, axis: int = -1) -> np.ndarray:
    shifted = logits - logits.max(axis=axis, keepdims=True)
    weights = np.exp(shifted)
    return weights / weights.sum(axis=axis, keepdims=True)


@pytest.mark.parametrize("values, expected", [([1, 2, 3], 1.0), ([4, 4], 0.0), ([0.5, -0.5], 0.5)])
def test_variance(values, expected):
    statistics = RunningStatistics()
    for value in values:
        statistics.add(value)
    assert statistics.variance == pytest.approx(expected)
