//! The forward pass against transformers' and candle-transformers'.

mod support;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use exl3_candle::format::{Bits, Codebook, pack, packed_len, tile_position, unpack};
use exl3_candle::model::{BundleWeights, Model, ModelError, NoTap, SourceWeights, Tap, WeightSource};
use exl3_candle::source::{self, Checkpoint};
use half::f16;
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

/// Agreement with an f32 forward of transformers: some hidden states, and the logits of every eighth
/// position.
fn assert_golden(dir: &Path, golden: &Path, layers: usize, tolerance: f32) {
    let golden = candle_core::safetensors::load(golden, &Device::Cpu).unwrap();
    let ids: Vec<i64> = golden["input_ids"].flatten_all().unwrap().to_vec1().unwrap();
    let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();

    let checkpoint = source::open(dir).unwrap();
    let model = Model::of(&checkpoint).unwrap();
    model.check(&checkpoint).unwrap();
    let (states, logits) = run(&model, &SourceWeights(&checkpoint), &ids, &mut NoTap);
    assert_eq!(states.len(), layers + 1);
    let stored = (0..=layers).filter(|i| golden.contains_key(&format!("hidden.{i}")));
    let stored: Vec<usize> = stored.collect();
    assert_eq!((stored.len(), stored.last()), (3, Some(&layers)));
    for i in stored {
        let error = max_difference(&states[i], &golden[&format!("hidden.{i}")]);
        println!("hidden.{i}: max error {error:e}");
        assert!(error < tolerance, "hidden.{i} is off by {error}");
    }
    let positions: Vec<u32> = (7..ids.len() as u32).step_by(8).collect();
    let positions = Tensor::new(positions, &Device::Cpu).unwrap();
    let error = max_difference(&logits.index_select(&positions, 0).unwrap(), &golden["logits"]);
    println!("logits: max error {error:e}");
    assert!(error < tolerance, "logits are off by {error}");
}

#[test]
fn tiny_llama_agrees_with_transformers() {
    let dir = fixture("tiny-llama");
    assert_golden(&dir, &dir.join("golden_forward.safetensors"), 6, 2e-3);
}

#[test]
fn tiny_qwen3_5_agrees_with_transformers() {
    let dir = support::tiny_qwen3_5();
    assert_golden(&dir, &dir.join("golden_forward.safetensors"), 8, 5e-3);
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

struct Opened {
    checkpoint: Checkpoint,
    model: Model,
    _dir: tempfile::TempDir,
}

fn checkpoint_of(config: &serde_json::Value, tensors: &HashMap<String, Tensor>) -> Opened {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), config, tensors);
    let checkpoint = source::open(dir.path()).unwrap();
    let model = Model::from_config(checkpoint.config()).unwrap();
    model.check(&checkpoint).unwrap();
    Opened { checkpoint, model, _dir: dir }
}

const IDS: [u32; 7] = [3, 1, 4, 1, 5, 92, 65];

fn logits(opened: &Opened) -> Tensor {
    run(&opened.model, &SourceWeights(&opened.checkpoint), &IDS, &mut NoTap).1
}

/// A tied head is the embedding, whether or not the checkpoint holds another `lm_head.weight`.
#[test]
fn a_tied_head_is_the_embedding() {
    let mut config = small_config();
    let mut tensors = random_llama(&config);
    let untied = logits(&checkpoint_of(&config, &tensors));
    config["tie_word_embeddings"] = json!(true);
    let redundant = logits(&checkpoint_of(&config, &tensors));
    tensors.remove("lm_head.weight");
    let tied = logits(&checkpoint_of(&config, &tensors));
    assert_eq!(max_difference(&tied, &redundant), 0.0);
    assert!(max_difference(&tied, &untied) > 0.1);

    let embedding = tensors["model.embed_tokens.weight"].clone();
    tensors.insert("lm_head.weight".to_owned(), embedding);
    config["tie_word_embeddings"] = json!(false);
    assert_eq!(max_difference(&tied, &logits(&checkpoint_of(&config, &tensors))), 0.0);
}

/// Keeps what a layer shows.
#[derive(Default)]
struct Recorder {
    inputs: Vec<(Vec<String>, Tensor)>,
    gated: Vec<(String, String, Tensor, Tensor)>,
}

impl Tap for Recorder {
    fn input(&mut self, linears: &[String], x: &Tensor) -> Result<(), ModelError> {
        self.inputs.push((linears.to_vec(), x.clone()));
        Ok(())
    }

    fn gated(&mut self, gate: &str, up: &str, g: &Tensor, u: &Tensor) -> Result<(), ModelError> {
        self.gated.push((gate.to_owned(), up.to_owned(), g.clone(), u.clone()));
        Ok(())
    }
}

#[test]
fn taps_see_the_input_of_every_group_in_order() {
    let config = small_config();
    let tensors = random_llama(&config);
    let opened = checkpoint_of(&config, &tensors);
    let mut tap = Recorder::default();
    run(&opened.model, &SourceWeights(&opened.checkpoint), &IDS, &mut tap);

    let groups: Vec<_> = (0..2).flat_map(|layer| opened.model.layer_groups(layer)).collect();
    assert_eq!(tap.inputs.len(), groups.len());
    for ((linears, x), group) in tap.inputs.iter().zip(&groups) {
        let keys: Vec<_> = group.linears.iter().map(|linear| linear.key.clone()).collect();
        assert_eq!(*linears, keys);
        assert!(group.linears.iter().all(|linear| x.dims() == [IDS.len(), linear.k]));
    }
    for (layer, (gate, up, g, u)) in tap.gated.iter().enumerate() {
        let x = &tap.inputs[layer * 4 + 2].1;
        for (key, seen) in [(gate, g), (up, u)] {
            let weight = &tensors[&format!("{key}.weight")];
            assert!(max_difference(seen, &x.matmul(&weight.t().unwrap()).unwrap()) < 1e-5);
        }
        let inner = (g.silu().unwrap() * u).unwrap();
        assert!(max_difference(&inner, &tap.inputs[layer * 4 + 3].1) < 1e-5);
    }
}

/// Biases asked for by the config and biases merely present in the checkpoint.
#[test]
fn biases_are_added() {
    let plain = small_config();
    let mut config = plain.clone();
    config["attention_bias"] = json!(true);
    config["mlp_bias"] = json!(true);
    let tensors = random_llama(&config);
    let mut without: HashMap<_, _> = tensors.clone();
    without.retain(|key, _| !key.ends_with(".bias"));
    assert_eq!(tensors.len() - without.len(), 2 * 7);

    let record = |config: &serde_json::Value, tensors: &HashMap<String, Tensor>| {
        let opened = checkpoint_of(config, tensors);
        let mut tap = Recorder::default();
        let x = opened.model.embed(&SourceWeights(&opened.checkpoint), &IDS).unwrap();
        let layer = opened.model.layer(&SourceWeights(&opened.checkpoint), 0).unwrap();
        let y = layer.forward(&x, &mut tap).unwrap();
        (tap, y)
    };
    let (_, asked_for) = record(&config, &tensors);
    let (_, present) = record(&plain, &tensors);
    assert_eq!(max_difference(&asked_for, &present), 0.0);

    // One bias at a time, where its effect is a plain shift.
    let (bare_tap, bare) = record(&plain, &without);
    let with = |module: &str| {
        let key = format!("model.layers.0.{module}.bias");
        let mut one = without.clone();
        one.insert(key.clone(), tensors[&key].clone());
        (record(&plain, &one), tensors[&key].clone())
    };
    let assert_shift = |shifted: &Tensor, bare: &Tensor, bias: &Tensor| {
        assert!(max_difference(shifted, &bare.broadcast_add(bias).unwrap()) < 1e-4);
    };
    let ((_, y), bias) = with("mlp.down_proj");
    assert_shift(&y, &bare, &bias);
    let ((tap, _), bias) = with("mlp.gate_proj");
    assert_shift(&tap.gated[0].2, &bare_tap.gated[0].2, &bias);
    // Attention shares sum to 1, so the values' bias arrives whole, once for each of 3 query heads.
    let ((tap, _), bias) = with("self_attn.v_proj");
    let heads = bias.reshape((2, 1, 8)).unwrap().broadcast_as((2, 3, 8)).unwrap();
    assert_shift(&tap.inputs[1].1, &bare_tap.inputs[1].1, &heads.flatten_all().unwrap());
    let ((_, y), _) = with("self_attn.q_proj");
    assert!(max_difference(&y, &bare) > 1e-3);

    // A bias that the config asks for and the checkpoint lacks.
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config, &without);
    let checkpoint = source::open(dir.path()).unwrap();
    let error = Model::from_config(&config).unwrap().check(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("14 of the model's tensors"), "{error}");
}

/// `diag(suh) Had(tiles) Had diag(svh)` by the definition, in f64.
fn decoded(states: &[Vec<u16>], codebook: Codebook, suh: &[f16], svh: &[f16], i: usize, j: usize) -> f64 {
    let tiles_n = svh.len() / 16;
    let value = |row: usize, col: usize| {
        let p = (0..256).find(|&p| tile_position(p) == (row % 16, col % 16)).unwrap();
        codebook.value(states[row / 16 * tiles_n + col / 16][p]).to_f64()
    };
    let sign = |a: usize, b: usize| if (a & b).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    let mut sum = 0.0;
    for a in 0..128 {
        for b in 0..128 {
            sum += sign(i % 128, a) * value(i / 128 * 128 + a, j / 128 * 128 + b) * sign(b, j % 128);
        }
    }
    sum / 128.0 * suh[i].to_f64() * svh[j].to_f64()
}

/// The sizes of `small_config` are no multiples of 128: stored padded, seen without padding.
#[test]
fn padded_linears_of_a_bundle_are_decoded_and_cropped() {
    let mut config = small_config();
    config["vocab_size"] = json!(150);
    config["quantization_config"] = json!({"quant_method": "exl3"});
    for (codebook, bits) in
        [(Codebook::Mul1, "2.5"), (Codebook::Mcg, "3"), (Codebook::ThreeInst, "1"), (Codebook::Mul1, "8")]
    {
        let bits: Bits = bits.parse().unwrap();
        let mut tensors = random_llama(&config);
        let (k, n) = (128, 256); // of 48 and 150
        let mut seed = 99u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 16) as u16
        };
        let tiles = k / 16 * n / 16;
        let packed: Vec<Vec<u16>> =
            (0..tiles).map(|_| (0..packed_len(bits, 256)).map(|_| random()).collect()).collect();
        let states: Vec<Vec<u16>> = packed.iter().map(|words| unpack(words, bits, 256)).collect();
        assert_eq!(pack(&states[0], bits), packed[0]);
        let mut scales = |len: usize| -> Vec<f16> {
            (0..len).map(|_| f16::from_f32(f32::from(random()) / 65536.0 - 0.5)).collect()
        };
        let (suh, svh, bias) = (scales(k), scales(n), scales(n));

        tensors.remove("lm_head.weight");
        let vector = |v: &[f16]| Tensor::new(v, &Device::Cpu).unwrap();
        tensors.insert("lm_head.suh".to_owned(), vector(&suh));
        tensors.insert("lm_head.svh".to_owned(), vector(&svh));
        tensors.insert("lm_head.bias".to_owned(), vector(&bias));
        let words: Vec<i16> = packed.concat().into_iter().map(|word| word as i16).collect();
        let shape = (k / 16, n / 16, packed_len(bits, 256));
        let trellis = Tensor::from_vec(words, shape, &Device::Cpu).unwrap();
        tensors.insert("lm_head.trellis".to_owned(), trellis);
        if let Some((leaf, value)) = codebook.marker() {
            let marker = Tensor::new(value as i32, &Device::Cpu).unwrap();
            tensors.insert(format!("lm_head.{leaf}"), marker);
        }

        let opened = checkpoint_of(&config, &tensors);
        let weights = BundleWeights::new(&opened.checkpoint, &opened.model);
        let linear = weights.linear("lm_head").unwrap().to_vec2::<f32>().unwrap();
        assert_eq!((linear.len(), linear[0].len()), (150, 48));
        for (i, j) in [(0, 0), (47, 149), (5, 128), (31, 17)] {
            let expected = decoded(&states, codebook, &suh, &svh, i, j);
            let found = f64::from(linear[j][i]);
            assert!((found - expected).abs() < 1e-5, "{codebook} {bits}: {found}, expected {expected}");
        }
        let cropped = weights.tensor("lm_head.bias").unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(cropped, bias[..150].iter().map(|b| b.to_f32()).collect::<Vec<_>>());
        assert!(weights.has_linear("lm_head") && !weights.has("lm_head.weight"));
        run(&opened.model, &weights, &IDS, &mut NoTap);
    }
}

/// A quantized linear that does not fit the model, or whose marker is another one.
#[test]
fn broken_quantized_linears_are_named() {
    let config: serde_json::Value = {
        let text = std::fs::read(fixture("bundles/tiny-llama-exl3-3.0bpw/config.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    };
    let path = fixture("bundles/tiny-llama-exl3-3.0bpw/model.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let module = "model.layers.2.mlp.up_proj";
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    for (leaf, replacement, expected) in [
        ("suh", None, "up_proj.suh\": expected F16 [256], found nothing"),
        ("svh", Some(zeros(&[640], DType::F16)), "up_proj.svh\": expected F16 [768], found F16 [640]"),
        ("trellis", Some(zeros(&[16, 48, 48], DType::F16)), "expected I16 [16, 48, 16*bits], found F16"),
        ("trellis", Some(zeros(&[48, 16, 48], DType::I16)), "found I16 [48, 16, 48]"),
        ("trellis", Some(zeros(&[16, 48, 72], DType::I16)), "4.5 bits per weight do not exist"),
        ("mul1", Some(zeros(&[], DType::I32)), "up_proj.mul1\": expected the multiplier 0x83dcd12d"),
        ("mcg", Some(zeros(&[], DType::I32)), "up_proj.mcg\": expected the multiplier 0xcbac1fed"),
    ] {
        let mut tensors = tensors.clone();
        tensors.remove(&format!("{module}.{leaf}"));
        if let Some(replacement) = replacement {
            tensors.insert(format!("{module}.{leaf}"), replacement);
        }
        let dir = tempfile::tempdir().unwrap();
        write_checkpoint(dir.path(), &config, &tensors);
        let checkpoint = source::open(dir.path()).unwrap();
        let model = Model::from_config(checkpoint.config()).unwrap();
        let weights = BundleWeights::new(&checkpoint, &model);
        let result = model.check(&checkpoint).and_then(|()| weights.linear(module));
        let error = result.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
}
