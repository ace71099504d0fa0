//! Every kind of source, bit rate, codebook and calibration: converts, verifies, and computes what
//! its source computes.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::checkpoint::{Head, TestLlama};
use crate::support::fixture;
use crate::support::program::{Run, names, program, read_json};

/// A converted checkpoint.
struct Converted {
    dir: TempDir,
    report: Value,
    verified: Value,
}

enum Calibration {
    Text,
    JsonLines,
    Rows,
    InputIds,
    /// The one that comes with the program.
    Bundled,
}

impl Calibration {
    fn file(&self, dir: &Path) -> Option<PathBuf> {
        let text = fixture("corpus/northanger.txt");
        let (name, content) = match self {
            Calibration::Text => return Some(text),
            Calibration::Bundled => return None,
            Calibration::JsonLines => {
                let text = fs::read_to_string(text).unwrap();
                let lines = text.lines().filter(|l| !l.is_empty()).take(200);
                let lines: Vec<String> = lines.map(|l| json!({ "text": l }).to_string()).collect();
                ("text.jsonl", lines.join("\n").into_bytes())
            }
            Calibration::Rows => {
                let document = json!({ "format": "rows", "rows": rows(), "tokenizer": "nano" });
                ("rows.json", document.to_string().into_bytes())
            }
            Calibration::InputIds => {
                let ids: Vec<u8> =
                    rows().concat().iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
                let view = TensorView::new(Dtype::I64, vec![8, 64], &ids).unwrap();
                ("ids.safetensors", serialize([("input_ids", view)], None).unwrap())
            }
        };
        fs::write(dir.join(name), content).unwrap();
        Some(dir.join(name))
    }
}

/// Eight rows of 64 tokens.
fn rows() -> Vec<Vec<u32>> {
    (0..8).map(|row| (0..64).map(|at| 3 + (row * 577 + at * at * 31 + at) % 96).collect()).collect()
}

/// Converts, with a check against the source at the end, and verifies once more by the command.
fn convert(llama: &TestLlama, args: &str, calibration: Calibration) -> Converted {
    let dir = tempfile::tempdir().unwrap();
    let (source, out) = (dir.path().join("source"), dir.path().join("out"));
    llama.write(&source);
    let mut command = program(["convert", "--json", "--rows", "8", "--cols", "64"]);
    command.arg(&source).arg("--output").arg(&out).args(args.split(' '));
    if let Some(file) = calibration.file(dir.path()) {
        command.arg("--calibration").arg(file);
    }
    let report = Run::of(&mut command).expect(0).json();
    assert_eq!(report["verified"]["failures"], 0);
    let mut command = program(["verify", "--json"]);
    let verified = Run::of(command.arg(&out).arg("--source").arg(&source)).expect(0).json();
    assert_eq!(verified["failures"], json!([]));
    Converted { dir, report, verified }
}

impl Converted {
    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// `eval kl` against the source, on other text than that of the calibration.
    fn kl(&self) -> f64 {
        let mut command = program(["eval", "kl", "--json", "--rows", "4", "--cols", "64"]);
        command.arg(self.dir.path().join("source")).arg(self.out());
        command.arg("--text").arg(fixture("corpus/persuasion.txt"));
        let report = Run::of(&mut command).expect(0).json();
        println!("kl {} top1 {}", report["kl"]["mean"], report["top1"]);
        report["kl"]["mean"].as_f64().unwrap()
    }

    /// The relative error of every tensor is what the rate of its encoder gives.
    #[track_caller]
    fn assert_errors_fit_rates(&self) {
        // The mean square error of each rate on normal noise, as `bench encoder` measures it.
        let mse = [
            (1.0, 0.279),
            (1.5, 0.139),
            (2.0, 0.0687),
            (2.5, 0.0349),
            (3.0, 0.0178),
            (3.5, 0.0090),
            (4.0, 0.0046),
            (5.0, 0.00124),
            (6.0, 0.00038),
            (7.0, 0.00015),
            (8.0, 0.00009),
        ];
        let tensors = self.verified["tensors"].as_array().unwrap();
        assert!(tensors.len() >= 7);
        for tensor in tensors {
            let (bits, error) = (tensor["bits"].as_f64().unwrap(), tensor["rel_frobenius"].as_f64().unwrap());
            let (_, mse): &(f64, f64) = mse.iter().find(|(rate, _)| *rate == bits).unwrap();
            let ratio = error / mse.sqrt();
            println!("{} {bits} {ratio:.3}", tensor["key"]);
            assert!((0.6..1.6).contains(&ratio), "{tensor}: {ratio} of what {bits} bits give");
        }
    }

    fn config(&self) -> Value {
        read_json(&self.out().join("config.json"))
    }

    fn storage(&self) -> Value {
        read_json(&self.out().join("quantization_config.json"))["tensor_storage"].clone()
    }

    /// The keys of the stored tensors of a module, without its name.
    fn leaves(&self, module: &str) -> Vec<String> {
        let storage = self.storage();
        let Some(stored) = storage[module]["stored_tensors"].as_object() else { return Vec::new() };
        stored.keys().map(|key| key[module.len() + 1..].to_owned()).collect()
    }
}

#[test]
fn half_precision_in_one_file_with_a_tied_head() {
    let llama = TestLlama { dtype: Dtype::F16, head: Head::Tied, ..TestLlama::nano() };
    let converted = convert(&llama, "--bits 1 --head-bits 8", Calibration::JsonLines);
    assert_eq!(converted.config()["tie_word_embeddings"], false, "the head is its own now");
    assert_eq!(converted.leaves("lm_head"), ["suh", "svh", "mul1", "trellis"]);
    let embedding = &converted.storage()["model.embed_tokens"]["stored_tensors"]["model.embed_tokens.weight"];
    assert_eq!(embedding["dtype"], "torch.float16");
    converted.assert_errors_fit_rates();
    assert!(converted.kl() < 2.0);
}

#[test]
fn single_precision_with_a_tied_head_that_is_stored_too() {
    let llama = TestLlama { dtype: Dtype::F32, head: Head::TiedAndStored, ..TestLlama::nano() };
    let converted = convert(&llama, "--bits 2 --head-bits 7 --shard-size 40KB", Calibration::Rows);
    assert_eq!(converted.config()["tie_word_embeddings"], false);
    assert_eq!(converted.leaves("lm_head"), ["suh", "svh", "mul1", "trellis"], "one head");
    converted.assert_errors_fit_rates();
    assert!(converted.kl() < 1.0);

    let index = read_json(&converted.out().join("model.safetensors.index.json"));
    let shards = names(&converted.out()).into_iter().filter(|name| name.ends_with(".safetensors")).count();
    let mut named: Vec<&str> =
        index["weight_map"].as_object().unwrap().values().map(|v| v.as_str().unwrap()).collect();
    named.sort_unstable();
    named.dedup();
    assert!(shards > 2 && named.len() == shards, "{named:?}");
}

#[test]
fn a_tied_head_that_is_left_stays_tied() {
    let llama = TestLlama { head: Head::Tied, ..TestLlama::nano() };
    let converted = convert(&llama, "--bits 1.5 --head-bits 16", Calibration::InputIds);
    assert_eq!(converted.config()["tie_word_embeddings"], true);
    assert_eq!(converted.leaves("lm_head"), Vec::<String>::new());
    assert_eq!(converted.report["bpw_head"], Value::Null);
    assert_eq!(converted.report["tensors"].as_array().unwrap().len(), 7);
    converted.assert_errors_fit_rates();
    assert!(converted.kl() < 2.0);
}

#[test]
fn biases_are_kept() {
    let rope = json!({ "rope_type": "default", "rope_theta": 10000.0 });
    let llama = TestLlama { biases: true, shards: 3, ..TestLlama::nano() };
    let llama = llama.with_config("rope_theta", Value::Null).with_config("rope_parameters", rope);
    let converted = convert(&llama, "--bits 8 --head-bits 8", Calibration::Text);
    assert_eq!(converted.leaves("model.layers.0.mlp.down_proj").last().unwrap(), "bias");
    assert_eq!(converted.leaves("model.layers.0.self_attn.q_proj").last().unwrap(), "bias");
    converted.assert_errors_fit_rates();
    assert!(converted.kl() < 1e-3);
}

#[test]
fn llama3_positions() {
    let scaling = json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64 });
    let llama = TestLlama { shards: 2, ..TestLlama::nano() }.with_config("rope_scaling", scaling.clone());
    let converted = convert(&llama, "--bits 2.5 --head-bits 3.5 --out-scales never", Calibration::Text);
    assert_eq!(converted.config()["rope_scaling"], scaling);
    assert!(converted.report["tensors"].as_array().unwrap().iter().all(|t| t["out_scales"] == false));
    converted.assert_errors_fit_rates();
    assert!(converted.kl() < 0.5);
}

/// Neither the hidden size nor the intermediate one nor the vocabulary is a multiple of 128.
#[test]
fn sizes_that_need_padding() {
    let llama = TestLlama {
        hidden: 192,
        intermediate: 160,
        vocab: 200,
        heads: 3,
        biases: true,
        dtype: Dtype::F32,
        ..TestLlama::nano()
    };
    let converted = convert(&llama, "--bits 8 --head-bits 8 --out-scales always", Calibration::Text);
    let stored = &converted.storage()["model.layers.0.mlp.down_proj"]["stored_tensors"];
    let shape = |leaf: &str| stored[format!("model.layers.0.mlp.down_proj.{leaf}")]["shape"].clone();
    assert_eq!([shape("suh"), shape("svh"), shape("bias")], [json!([256]), json!([256]), json!([256])]);
    assert_eq!(shape("trellis"), json!([16, 16, 128]));
    let down = converted.report["tensors"].as_array().unwrap().iter().find(|t| t["k"] == 160).unwrap();
    assert_eq!(down["n"], 192, "sizes are those of the source");
    assert!(converted.report["tensors"].as_array().unwrap().iter().all(|t| t["out_scales"] == true));
    assert!(converted.kl() < 1e-3);
}

#[test]
fn the_mcg_codebook_and_the_bundled_calibration() {
    let llama = TestLlama { dtype: Dtype::F16, shards: 2, ..TestLlama::nano() };
    let converted = convert(&llama, "--bits 4 --head-bits 3 --codebook mcg", Calibration::Bundled);
    assert_eq!(converted.leaves("lm_head"), ["suh", "svh", "mcg", "trellis"]);
    converted.assert_errors_fit_rates();
    assert!(converted.kl() < 0.5);
}

#[test]
fn the_3inst_codebook() {
    let converted =
        convert(&TestLlama::nano(), "--bits 5 --head-bits 6 --codebook 3inst --seed 9", Calibration::Text);
    assert_eq!(converted.leaves("lm_head"), ["suh", "svh", "trellis"]);
    converted.assert_errors_fit_rates();
    assert!(converted.kl() < 0.02);
}

/// Weights and scales that no half can hold.
#[test]
fn weights_of_extreme_size() {
    for gain in [1e-7, 1e6] {
        let llama = TestLlama { dtype: Dtype::F32, gain, ..TestLlama::nano() };
        let converted = convert(&llama, "--bits 3 --head-bits 3", Calibration::Text);
        converted.assert_errors_fit_rates();
    }
    // What cannot be stored is named, and is no bundle of zeros.
    let dir = tempfile::tempdir().unwrap();
    TestLlama { dtype: Dtype::F32, gain: 1e-12, ..TestLlama::nano() }.write(&dir.path().join("source"));
    let run = Run::of(&mut crate::command(&dir.path().join("source"), dir.path())).expect(2);
    run.says(&["model.layers.0.self_attn.q_proj", "scale does not fit a half"]);
    assert!(!dir.path().join("out").exists());
}
