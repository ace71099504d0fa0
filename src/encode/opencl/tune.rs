//! Which variant was fastest, remembered per device, driver and trellis.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::super::TrellisSpec;
use super::device::DeviceInfo;
use super::source;
use super::variant::Variant;

/// A variant and its speed when it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    pub variant: Variant,
    pub tiles_per_second: f64,
}

/// Remembered choices, in a file if there is one. It is a cache: what cannot be read or written costs a
/// measurement and nothing else.
#[derive(Clone, Debug)]
pub struct Choices {
    file: Option<PathBuf>,
    choices: BTreeMap<String, Choice>,
}

impl Choices {
    pub fn load(file: Option<PathBuf>) -> Self {
        let bytes = file.as_ref().and_then(|file| std::fs::read(file).ok());
        let choices = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        Self { file, choices }
    }

    pub(super) fn remembered(&self, device: &DeviceInfo, spec: &TrellisSpec) -> Option<Choice> {
        self.choices.get(&key(device, spec)).copied()
    }

    pub(super) fn remember(&mut self, device: &DeviceInfo, spec: &TrellisSpec, choice: Choice) {
        self.choices.insert(key(device, spec), choice);
        if let (Some(file), Ok(text)) = (&self.file, serde_json::to_vec_pretty(&self.choices)) {
            if let Some(parent) = file.parent() {
                let _ = std::fs::create_dir_all(parent);
            }
            let new = file.with_extension(format!("{}.tmp", std::process::id()));
            let _ = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, file));
        }
    }
}

/// What a choice depends on: the device, its driver, the kernels and the trellis.
fn key(device: &DeviceInfo, spec: &TrellisSpec) -> String {
    let sources = Sha256::digest(source::forward() + &source::trace());
    let kernels: String = sources.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    let DeviceInfo { platform, name, driver, .. } = device;
    format!("{platform} / {name} / {driver} / {kernels} / {} {} {}", spec.codebook(), spec.bits(), spec.len())
}
