//! `config.json` against `quantization_config.json`.

use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::bundle::{CONFIG, MANIFEST, QUANT_METHOD};
use crate::format::{Bits, Codebook};

use super::VerifyReport;

const STORAGE: &str = "tensor_storage";
const HEAD_AS_SOURCE_BITS: f64 = 16.0;

/// What `tensor_storage` says of one leaf module.
#[derive(Debug, Default, Deserialize)]
pub(super) struct ModuleStorage {
    pub stored_tensors: Map<String, Value>,
    pub quant_format: Option<String>,
    pub bits_per_weight: Option<f64>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl ModuleStorage {
    pub fn is_quantized(&self) -> bool {
        self.quant_format.as_deref() == Some(QUANT_METHOD)
    }
}

/// What `tensor_storage` says of one tensor.
#[derive(Debug, Deserialize)]
pub(super) struct TensorStorage {
    pub shape: Vec<usize>,
    pub n_bytes: u64,
    pub dtype: String,
}

/// The modules of `tensor_storage`.
#[derive(Debug, Default)]
pub(super) struct Manifest {
    pub modules: Vec<(String, ModuleStorage)>,
    /// Whether there is such a section: only then can anything be said to be missing from it.
    pub is_known: bool,
}

impl Manifest {
    pub fn module(&self, key: &str) -> Option<&ModuleStorage> {
        self.modules.iter().find(|(k, _)| k == key).map(|(_, module)| module)
    }
}

pub(super) fn check(bundle: &Path, report: &mut VerifyReport) -> Manifest {
    let config = object(bundle, CONFIG, report);
    let Some(mut section) = object(bundle, MANIFEST, report) else { return Manifest::default() };
    let storage = section.shift_remove(STORAGE);
    check_section(&section, report);
    let manifest = modules(storage.clone().unwrap_or_default(), report);
    if let Some(config) = config {
        let mut in_config = config.get("quantization_config").cloned().unwrap_or_default();
        // An exported folder repeats it for runtimes that read no other file.
        let repeated = in_config.as_object_mut().and_then(|section| section.shift_remove(STORAGE));
        if let Some(repeated) = repeated {
            let name = format!("{CONFIG}: quantization_config.{STORAGE}");
            let expected = format!("what {MANIFEST} says");
            report.check("manifest", &name, Some(repeated) == storage, expected, "something else");
        }
        let name = format!("{CONFIG}: quantization_config");
        let section = Value::Object(section);
        report.check("manifest", &name, section == in_config, section, &in_config);
        check_tie(&config, &manifest, report);
    }
    manifest
}

fn object(bundle: &Path, name: &str, report: &mut VerifyReport) -> Option<Map<String, Value>> {
    let text = report.try_to("manifest", name, "a readable file", fs::read(bundle.join(name)))?;
    report.try_to("manifest", name, "a JSON object", serde_json::from_slice(&text))
}

fn modules(storage: Value, report: &mut VerifyReport) -> Manifest {
    let name = format!("{MANIFEST}: {STORAGE}");
    let Some(storage) =
        report.try_to("manifest", &name, "an object", serde_json::from_value::<Map<_, _>>(storage))
    else {
        return Manifest::default();
    };
    let mut manifest = Manifest { modules: Vec::new(), is_known: true };
    for (key, value) in storage {
        let module = serde_json::from_value::<ModuleStorage>(value);
        if let Some(module) = report.try_to("manifest", &key, "stored_tensors of a module", module) {
            manifest.modules.push((key, module));
        }
    }
    manifest
}

/// The fields a loader looks at.
fn check_section(section: &Map<String, Value>, report: &mut VerifyReport) {
    let text = |field: &str| section.get(field).map_or("nothing".to_owned(), Value::to_string);
    let mut check = |field: &str, passed: bool, expected: &str| {
        report.check("manifest", field, passed, expected, text(field));
    };
    check(
        "quant_method",
        section.get("quant_method").and_then(Value::as_str) == Some(QUANT_METHOD),
        "\"exl3\"",
    );
    check("version", section.get("version").is_some_and(Value::is_string), "a version");
    // A mixed bundle's average can be any number, so only its range is known.
    let rate = |field: &str| section.get(field).and_then(Value::as_f64);
    check("bits", rate("bits").is_some_and(|b| (1.0..=8.0).contains(&b)), "1 to 8");
    let is_head_rate = |bits: f64| bits == HEAD_AS_SOURCE_BITS || Bits::try_from(bits).is_ok();
    check("head_bits", rate("head_bits").is_some_and(is_head_rate), "a bit rate, or 16");
    // Bundles older than the field have no codebook.
    let is_codebook = |v: &Value| v.as_str().is_some_and(|name| name.parse::<Codebook>().is_ok());
    check("codebook", section.get("codebook").is_none_or(is_codebook), "mul1, mcg or 3inst");
}

/// A stored quantized head must not be taken for the embedding.
fn check_tie(config: &Map<String, Value>, manifest: &Manifest, report: &mut VerifyReport) {
    let has_head = manifest.modules.iter().any(|(key, m)| m.is_quantized() && is_head(key));
    let flag = |config: &Map<String, Value>| config.get("tie_word_embeddings").and_then(Value::as_bool);
    let text_config = config.get("text_config").and_then(Value::as_object);
    for (name, found) in [
        ("tie_word_embeddings", flag(config)),
        ("text_config.tie_word_embeddings", text_config.and_then(flag)),
    ] {
        let passed = !(has_head && found == Some(true));
        report.check("manifest", name, passed, "false, as the head is stored", "true");
    }
}

pub(super) fn is_head(module: &str) -> bool {
    module.rsplit('.').next() == Some("lm_head")
}
