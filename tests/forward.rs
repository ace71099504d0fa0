//! The forward pass against transformers' and candle-transformers'.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use exl3_candle::model::{Model, NoTap, SourceWeights, Tap, WeightSource};
use exl3_candle::source;
use serde_json::json;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

fn max_difference(a: &Tensor, b: &Tensor) -> f32 {
    assert_eq!(a.dims(), b.dims());
    let difference = (a - b).unwrap().abs().unwrap().flatten_all().unwrap();
    // `max` would skip a NaN.
    let values: Vec<f32> = difference.to_vec1().unwrap();
    assert!(values.iter().all(|v| v.is_finite()));
    values.into_iter().fold(0.0, f32::max)
}

/// Hidden states 0 (embeddings) to N (after the final norm), and the logits.
fn run(model: &Model, w: &dyn WeightSource, ids: &[u32], tap: &mut dyn Tap) -> (Vec<Tensor>, Tensor) {
    let mut states = vec![model.embed(w, ids).unwrap()];
    for layer in 0..model.layer_count() {
        let layer = model.layer(w, layer).unwrap();
        states.push(layer.forward(states.last().unwrap(), tap).unwrap());
    }
    let output = model.output(w).unwrap();
    let normed = output.norm(&states.pop().unwrap()).unwrap();
    let logits = output.logits(&normed).unwrap();
    states.push(normed);
    (states, logits)
}

#[test]
fn tiny_llama_agrees_with_transformers() {
    let dir = fixture("tiny-llama");
    let golden =
        candle_core::safetensors::load(dir.join("golden_forward.safetensors"), &Device::Cpu).unwrap();
    let ids: Vec<i64> = golden["input_ids"].flatten_all().unwrap().to_vec1().unwrap();
    let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();

    let checkpoint = source::open(&dir).unwrap();
    let model = Model::from_config(checkpoint.config()).unwrap();
    model.check(&checkpoint).unwrap();
    let (states, logits) = run(&model, &SourceWeights(&checkpoint), &ids, &mut NoTap);
    assert_eq!(states.len(), 7);
    for (i, state) in states.iter().enumerate() {
        let error = max_difference(state, &golden[&format!("hidden.{i}")]);
        println!("hidden.{i}: max error {error:e}");
        assert!(error < 2e-3, "hidden.{i} is off by {error}");
    }
    let error = max_difference(&logits, &golden["logits"]);
    println!("logits: max error {error:e}");
    assert!(error < 2e-3, "logits are off by {error}");
}

/// A small random Llama with grouped queries, as tensors under Hugging Face's names.
fn random_llama(config: &serde_json::Value) -> HashMap<String, Tensor> {
    let model = Model::from_config(config).unwrap();
    let mut seed = 7u32;
    let mut uniform = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut tensors = HashMap::new();
    for (key, shape) in model.expected_tensors() {
        let count = shape.iter().product();
        let (center, spread) = if key.contains("norm") { (1.0, 0.5) } else { (0.0, 0.3) };
        let data: Vec<f32> = (0..count).map(|_| center + spread * uniform()).collect();
        tensors.insert(key, Tensor::from_vec(data, shape, &Device::Cpu).unwrap());
    }
    tensors
}

fn small_config() -> serde_json::Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 48, "intermediate_size": 80, "vocab_size": 101, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": false, "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    })
}

fn write_checkpoint(dir: &Path, config: &serde_json::Value, tensors: &HashMap<String, Tensor>) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    candle_core::safetensors::save(tensors, dir.join("model.safetensors")).unwrap();
}

/// candle-transformers' Llama gives the logits of the last position only, so it runs once for
/// every prefix that is compared.
#[test]
fn a_random_llama_agrees_with_candle_transformers() {
    use candle_transformers::models::llama as oracle;

    let config = small_config();
    let tensors = random_llama(&config);
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config, &tensors);
    let checkpoint = source::open(dir.path()).unwrap();
    let model = Model::from_config(checkpoint.config()).unwrap();
    // Longer than a block of queries.
    let ids: Vec<u32> = (0..300u32).map(|i| i * i * 31 % 101).collect();
    let (_, logits) = run(&model, &SourceWeights(&checkpoint), &ids, &mut NoTap);

    let oracle_config: oracle::LlamaConfig = serde_json::from_value(config).unwrap();
    let oracle_config = oracle_config.into_config(false);
    let weights = candle_nn::VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let llama = oracle::Llama::load(weights, &oracle_config).unwrap();
    for t in [1, 2, 17, 64, 255, 256, 257, 300] {
        let mut cache = oracle::Cache::new(false, DType::F32, &oracle_config, &Device::Cpu).unwrap();
        let row = Tensor::new(&ids[..t], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let expected = llama.forward(&row, 0, &mut cache).unwrap();
        let error = max_difference(&logits.narrow(0, t - 1, 1).unwrap(), &expected);
        assert!(error < 1e-3, "logits after {t} tokens are off by {error}");
    }
}
