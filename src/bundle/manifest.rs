//! `config.json`, `quantization_config.json` and the shard index.

use std::path::Path;

use safetensors::Dtype;
use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Map, Value, json};

use crate::format::{Bits, Codebook};

use super::layout::{Module, ShardPlan};
use super::{BundleContent, BundleError};

/// The version of the reference format that is written: loaders compare against it.
pub const FORMAT_VERSION: &str = "1.6.5";
pub const QUANT_METHOD: &str = "exl3";
/// `head_bits` of a head that is left as it is.
const HEAD_AS_SOURCE_BITS: u32 = 16;

/// The source's configuration with the section `quantization_config`.
pub(super) fn config(content: &BundleContent<'_>) -> Map<String, Value> {
    let mut config = content.checkpoint.config().as_object().cloned().unwrap_or_default();
    let original = config.shift_remove("quantization_config").filter(|section| !section.is_null());
    if content.head.is_some() {
        untie(&mut config);
    }
    if let Some(layers) = content.mtp_layers {
        let text = match config.get_mut("text_config") {
            Some(Value::Object(text)) => text,
            _ => &mut config,
        };
        text.insert("mtp_num_hidden_layers".into(), json!(layers));
    }
    config.insert("quantization_config".into(), Value::Object(section(content, original)));
    config
}

/// A quantized head is a tensor of its own, so nothing may say that it is the embedding.
fn untie(config: &mut Map<String, Value>) {
    for (key, value) in config.iter_mut() {
        match value {
            Value::Object(inner) if key == "text_config" => untie(inner),
            Value::Bool(_) if key == "tie_word_embeddings" => *value = Value::Bool(false),
            _ => {}
        }
    }
}

fn section(content: &BundleContent<'_>, original: Option<Value>) -> Map<String, Value> {
    let mut section = Map::new();
    let head_bits = content.head_bits.map_or(json!(HEAD_AS_SOURCE_BITS), shortest);
    section.insert("quant_method".into(), json!(QUANT_METHOD));
    section.insert("version".into(), json!(FORMAT_VERSION));
    section.insert("bits".into(), json!(content.bits.as_f64()));
    section.insert("head_bits".into(), head_bits);
    section.insert("calibration".into(), json!({ "rows": content.rows, "cols": content.cols }));
    section.insert("out_scales".into(), json!(content.out_scales));
    section.insert("codebook".into(), json!(content.codebook.name()));
    if let Some(original) = original {
        section.insert("original_quantization_config".into(), original);
    }
    section
}

/// Whole rates as integers, as the reference writes them.
fn shortest(bits: Bits) -> Value {
    if bits.is_half_integer() { json!(bits.as_f64()) } else { json!(bits.as_f64() as u32) }
}

/// The section of `config` with every leaf module's stored tensors.
pub(super) fn quantization_config(config: &Map<String, Value>, modules: &[Module<'_>]) -> Value {
    let mut section = match config.get("quantization_config") {
        Some(Value::Object(section)) => section.clone(),
        _ => Map::new(),
    };
    let storage: Map<String, Value> = modules.iter().map(|m| (m.key.clone(), storage_of(m))).collect();
    section.insert("tensor_storage".into(), Value::Object(storage));
    Value::Object(section)
}

fn storage_of(module: &Module<'_>) -> Value {
    let stored = |e: &super::layout::Entry<'_>| {
        let entry = json!({ "shape": e.shape, "n_bytes": e.bytes, "dtype": torch_name(e.dtype) });
        (e.name.clone(), entry)
    };
    let tensors: Map<String, Value> = module.entries.iter().map(stored).collect();
    let mut storage = Map::new();
    storage.insert("stored_tensors".into(), Value::Object(tensors));
    if let Some((bits, codebook)) = module.quantized {
        storage.insert("quant_format".into(), json!(QUANT_METHOD));
        storage.insert("bits_per_weight".into(), shortest(bits));
        if let Some((leaf, value)) = codebook.marker() {
            storage.insert(multiplier_key(leaf), json!(value));
        }
    }
    Value::Object(storage)
}

/// The key of `tensor_storage` that repeats the codebook marker `leaf`.
pub fn multiplier_key(leaf: &str) -> String {
    format!("{leaf}_multiplier")
}

/// Codebooks that `tensor_storage` names by a multiplier, with that key.
pub fn multiplier_keys() -> impl Iterator<Item = (String, Codebook)> {
    Codebook::ALL.into_iter().filter_map(|c| c.marker().map(|(leaf, _)| (multiplier_key(leaf), c)))
}

/// The name of a dtype in `tensor_storage`.
pub fn torch_name(dtype: Dtype) -> String {
    let name = match dtype {
        Dtype::BOOL => "bool",
        Dtype::U8 => "uint8",
        Dtype::I8 => "int8",
        Dtype::F8_E5M2 => "float8_e5m2",
        Dtype::F8_E4M3 => "float8_e4m3fn",
        Dtype::F8_E8M0 => "float8_e8m0fnu",
        Dtype::F8_E4M3FNUZ => "float8_e4m3fnuz",
        Dtype::F8_E5M2FNUZ => "float8_e5m2fnuz",
        Dtype::F4 => "float4_e2m1fn_x2",
        Dtype::I16 => "int16",
        Dtype::U16 => "uint16",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        Dtype::I32 => "int32",
        Dtype::U32 => "uint32",
        Dtype::F32 => "float32",
        Dtype::C64 => "complex64",
        Dtype::F64 => "float64",
        Dtype::I64 => "int64",
        Dtype::U64 => "uint64",
        other => return format!("{other:?}"),
    };
    format!("torch.{name}")
}

/// `model.safetensors.index.json`, from what was written.
pub(super) fn index(shards: &[ShardPlan<'_>]) -> Value {
    let entries = || shards.iter().flat_map(|s| s.entries.iter().map(move |e| (e, &s.name)));
    let total_size: u64 = entries().map(|(e, _)| e.bytes).sum();
    let weight_map: Map<String, Value> = entries().map(|(e, file)| (e.name.clone(), json!(file))).collect();
    json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map })
}

/// JSON text indented by four spaces, as the reference writes it.
pub(super) fn render(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, BundleError> {
    let mut text = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut text, PrettyFormatter::with_indent(b"    "));
    value.serialize(&mut serializer).map_err(BundleError::json(path))?;
    Ok(text)
}
