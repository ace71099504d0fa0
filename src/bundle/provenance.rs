//! `exl3-candle.json`: where a bundle comes from, how each tensor fared, what each file hashes to.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::{BundleError, MANIFEST, PROVENANCE};

/// Version of the file's form.
pub(super) const FORMAT: u32 = 1;

/// The content of `exl3-candle.json`; `docs/FORMAT.md` describes every key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of the file's form.
    pub format: u32,
    pub tool: Tool,
    /// What was converted; never a path.
    pub base: String,
    /// Everything the bytes of the bundle depend on, by name.
    pub recipe: Map<String, Value>,
    pub bpw: Bpw,
    pub tensors: Vec<TensorMetrics>,
    /// Every other file of the bundle.
    pub files: Vec<FileRecord>,
}

/// The program that wrote a bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    pub name: String,
    pub version: String,
}

/// Stored bits (trellis, `suh`, `svh`) per weight of the quantized linears, padding not counted as
/// weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bpw {
    pub all: f64,
    /// Without the head.
    pub decoder: Option<f64>,
    pub head: Option<f64>,
}

/// One file of a bundle, by its name relative to the bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub name: String,
    pub bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// How the quantization of one tensor went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorMetrics {
    pub key: String,
    pub bits: f64,
    /// in_features and out_features of the source, not padded.
    pub k: usize,
    pub n: usize,
    /// `tr(E^T H E) / tr(W^T H W)`.
    #[serde(deserialize_with = "nan_if_null")]
    pub proxy_error: f64,
    /// `|E|_F / |W|_F`.
    #[serde(deserialize_with = "nan_if_null")]
    pub rel_frobenius: f64,
    /// Mean of the squared error of a weight.
    #[serde(deserialize_with = "nan_if_null")]
    pub mse: f64,
    /// Global scale of the search.
    #[serde(deserialize_with = "nan_if_null")]
    pub g_scale: f64,
    /// Whether output scales were on.
    pub out_scales: bool,
    /// Whether the tensor was quantized without calibration.
    pub fallback: bool,
    /// Wall time spent, in seconds; in the journal only, because the finished bundle must not depend on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
}

/// JSON has no NaN; it is written as null.
fn nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

impl Provenance {
    /// The provenance of the bundle in `dir`; `None` if there is no such file.
    pub fn read(dir: &Path) -> Result<Option<Self>, BundleError> {
        let path = dir.join(PROVENANCE);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(BundleError::json(&path)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(BundleError::io("read", &path)(error)),
        }
    }

    /// The provenance of a finished bundle made by this program in `dir`.
    pub(super) fn of_finished(dir: &Path) -> Option<Self> {
        let provenance = Self::read(dir).ok().flatten()?;
        dir.join(MANIFEST).is_file().then_some(provenance)
    }
}
