//! The dense relatives of Llama: their forward pass against transformers', and their conversion.

mod support;

use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use exl3_candle::model::{Model, NoTap, SourceWeights};
use exl3_candle::source;
use serde_json::{Value, json};

use support::checkpoint::TestLlama;
use support::fixture;
use support::program::{Run, copy_dir, edit_file, program, read_json};

const RELATIVES: [&str; 4] = ["qwen2", "qwen3", "mistral", "smollm"];

#[test]
fn logits_agree_with_transformers() {
    for name in RELATIVES {
        let dir = fixture("dense").join(name);
        let golden = candle_core::safetensors::load(dir.join("golden.safetensors"), &Device::Cpu).unwrap();
        let ids: Vec<i64> = golden["input_ids"].flatten_all().unwrap().to_vec1().unwrap();
        let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
        let checkpoint = source::open(&dir).unwrap();
        let model = Model::of(&checkpoint).unwrap();
        model.check(&checkpoint).unwrap();
        let weights = SourceWeights(&checkpoint);
        let mut x = model.embed(&weights, &ids).unwrap();
        for layer in 0..model.layer_count() {
            x = model.layer(&weights, layer).unwrap().forward(&x, &mut NoTap).unwrap();
        }
        let output = model.output(&weights).unwrap();
        let logits = output.logits(&output.norm(&x).unwrap()).unwrap();
        let error = max_difference(&logits, &golden["logits"]);
        println!("{name}: max error {error:e}");
        assert!(error < 1e-4, "{name}: logits are off by {error}");
    }
}

fn max_difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let difference = (a - b.to_dtype(DType::F32).unwrap()).unwrap().abs().unwrap().flatten_all().unwrap();
    let values: Vec<f32> = difference.to_vec1().unwrap();
    assert!(values.iter().all(|v| v.is_finite()));
    values.into_iter().fold(0.0, f32::max)
}

/// The first layer of a relative, with the tokenizer of `micro-llama`.
fn relative(name: &str, dir: &Path) {
    copy_dir(&fixture("dense").join(name), dir);
    fs::remove_file(dir.join("golden.safetensors")).unwrap();
    let mut tensors = candle_core::safetensors::load(dir.join("model.safetensors"), &Device::Cpu).unwrap();
    tensors.retain(|name, _| !name.starts_with("model.layers.1."));
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors")).unwrap();
    edit_config(dir, json!({ "num_hidden_layers": 1 }));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(fixture("micro-llama").join(file), dir.join(file)).unwrap();
    }
}

fn edit_config(dir: &Path, fields: Value) {
    edit_file(&dir.join("config.json"), |bytes| {
        let mut config: Value = serde_json::from_slice(bytes).unwrap();
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        *bytes = config.to_string().into_bytes();
    });
}

/// Converts, verifies against the source, and returns the KL divergence from it.
fn converted_kl(source: &Path, out: &Path, head_bits: &str) -> f64 {
    let mut command = program(["convert", "--json", "--rows", "8", "--cols", "64", "--no-verify"]);
    command.arg(source).arg("--output").arg(out).args(["--bits", "8", "--head-bits", head_bits]);
    command.arg("--calibration").arg(fixture("corpus/northanger.txt"));
    Run::of(&mut command).expect(0);
    let mut command = program(["verify", "--json"]);
    let verified = Run::of(command.arg(out).arg("--source").arg(source)).expect(0).json();
    assert_eq!(verified["failures"], json!([]));
    let mut command = program(["eval", "kl", "--json", "--rows", "4", "--cols", "64"]);
    command.arg(source).arg(out).arg("--text").arg(fixture("corpus/persuasion.txt"));
    Run::of(&mut command).expect(0).json()["kl"]["mean"].as_f64().unwrap()
}

/// At 8 bits the bundle computes what its source computes.
#[test]
fn relatives_are_converted_verified_and_measured() {
    for name in RELATIVES {
        let dir = tempfile::tempdir().unwrap();
        let (source, out) = (dir.path().join("source"), dir.path().join("out"));
        relative(name, &source);
        let kl = converted_kl(&source, &out, "8");
        println!("{name}: kl {kl}");
        assert!(kl < 0.01, "{name}: {kl}");
        let config = read_json(&out.join("config.json"));
        assert_eq!(config["tie_word_embeddings"], false, "the stored head is its own");
        assert_eq!(stored_heads(&out), ["suh", "svh", "mul1", "trellis"], "{name}");
    }
}

/// The names of the stored tensors of the head.
fn stored_heads(bundle: &Path) -> Vec<String> {
    let manifest = read_json(&bundle.join("quantization_config.json"));
    let stored = manifest["tensor_storage"]["lm_head"]["stored_tensors"].as_object().cloned();
    let names = stored.unwrap_or_default();
    names.keys().map(|key| key.trim_start_matches("lm_head.").to_owned()).collect()
}

/// Neither 200 nor 1000 is a multiple of 128, on either side of a linear, and biases are padded too.
#[test]
fn hidden_200_and_vocabulary_1000() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    let llama = TestLlama { hidden: 200, vocab: 1000, biases: true, ..TestLlama::nano() };
    llama.write(&source);
    let kl = converted_kl(&source, &dir.path().join("out"), "8");
    println!("kl {kl}");
    assert!(kl < 1e-3, "{kl}");
}

/// With the flag in `text_config` and a head in the source that is not the embedding: the bundle has
/// one head, its config does not contradict it, and it computes what the source does.
#[test]
fn one_head_comes_out() {
    for (is_tied, head_bits, leaves) in [
        (true, "16", vec![]),
        (true, "8", vec!["suh", "svh", "mul1", "trellis"]),
        (false, "16", vec!["weight"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (source, out) = (dir.path().join("source"), dir.path().join("out"));
        TestLlama::nano().with_config("tie_word_embeddings", Value::Null).write_edited(&source, |tensors| {
            // As a tied head, it gives logits that are not all on one token.
            let (_, embedding) = tensors.get_mut("model.embed_tokens.weight").unwrap();
            embedding.iter_mut().for_each(|value| *value *= 0.2);
        });
        edit_config(&source, json!({ "text_config": { "tie_word_embeddings": is_tied } }));
        let kl = converted_kl(&source, &out, head_bits);
        assert!(kl < 1e-3, "tied {is_tied}, head {head_bits}: {kl}");
        assert_eq!(stored_heads(&out), leaves, "tied {is_tied}, head {head_bits}");
        let config = read_json(&out.join("config.json"));
        assert_eq!(config["text_config"]["tie_word_embeddings"], leaves.is_empty());
    }
}

fn refusal(name: &str, changes: &[(&str, Value)]) -> String {
    let mut config = read_json(&fixture("dense").join(name).join("config.json"));
    for (field, value) in changes {
        config[field] = value.clone();
    }
    Model::from_config(&config).map(drop).map_err(|error| error.to_string()).err().unwrap_or_default()
}

/// A window that some row could leave is refused by name; one that is off, or as long as the
/// positions, does nothing.
#[test]
fn active_attention_windows_are_refused() {
    let windows = |size: u32| [("sliding_window", json!(size))];
    let switched = |size: u32| [("sliding_window", json!(size)), ("use_sliding_window", json!(true))];
    for name in ["mistral", "smollm"] {
        assert!(refusal(name, &windows(511)).contains("sliding_window 511 is not supported"), "{name}");
        assert_eq!(refusal(name, &windows(512)), "");
    }
    for name in ["qwen2", "qwen3"] {
        assert_eq!(refusal(name, &windows(64)), "", "{name}: the flag is off");
        assert!(refusal(name, &switched(64)).contains("sliding_window 64 is not supported"), "{name}");
        assert_eq!(refusal(name, &switched(512)), "");
        let layers = [("layer_types", json!(["full_attention", "sliding_attention"]))];
        assert!(refusal(name, &layers).contains("layer_types \"sliding_attention\""), "{name}");
    }
}

/// What is not computed is refused with the list of what is.
#[test]
fn other_architectures_are_refused_by_name() {
    let error = refusal("mistral", &[("architectures", json!(["Qwen3_5MoeForCausalLM"]))]);
    for word in ["Qwen3_5MoeForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"] {
        assert!(error.contains(word), "{error}");
    }
    let error = refusal("mistral", &[("model_type", json!("llama"))]);
    assert!(error.contains("model_type \"llama\" is not supported; expected \"mistral\""), "{error}");
}

/// The flag is read at either level, and two levels that contradict each other are an error.
#[test]
fn the_tie_is_read_at_either_level() {
    let dir = fixture("dense").join("smollm");
    let mut config = read_json(&dir.join("config.json"));
    let tied = |config: &Value| Model::from_config(config).map(|model| model.tied_head());
    config["text_config"] = json!({ "tie_word_embeddings": true });
    assert!(tied(&config).unwrap());
    config.as_object_mut().unwrap().shift_remove("tie_word_embeddings");
    assert!(tied(&config).unwrap());
    config["tie_word_embeddings"] = json!(false);
    let error = tied(&config).unwrap_err().to_string();
    assert!(error.contains("tie_word_embeddings: expected true, as in text_config"), "{error}");
}
