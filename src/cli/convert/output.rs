//! What `convert` reports at its end.

use std::path::{Path, PathBuf};

use anyhow::Context;
use exl3_candle::bundle::{Bpw, FileRecord, PROVENANCE, Provenance, TensorMetrics};
use exl3_candle::pipeline::Conversion;
use serde::Serialize;

use crate::cli::ui::{bytes_text, seconds_text};

/// The keys are documented in `docs/JSON.md`.
#[derive(Serialize)]
pub struct Report {
    output: PathBuf,
    already_done: bool,
    output_bytes: u64,
    bpw: f64,
    bpw_decoder: Option<f64>,
    bpw_head: Option<f64>,
    mean_proxy_error: f64,
    resumed_units: usize,
    seconds: Option<f64>,
    encoder_seconds: Option<f64>,
    encoder_share: Option<f64>,
    pub verified: Option<Verified>,
    /// Tensors of the source that are not in the bundle.
    pub left_out: Vec<String>,
    peaks: Vec<Peak>,
    tensors: Vec<TensorMetrics>,
    files: Vec<FileRecord>,
}

#[derive(Serialize)]
pub struct Verified {
    pub checks: usize,
    pub failures: usize,
}

/// Largest magnitude of any linear's input in a unit.
#[derive(Serialize)]
struct Peak {
    unit: String,
    peak: f32,
}

impl Report {
    pub fn converted(conversion: &Conversion) -> Self {
        let bundle = &conversion.bundle;
        Self {
            seconds: Some(conversion.seconds),
            encoder_seconds: Some(conversion.encoder_seconds),
            encoder_share: Some(conversion.encoder_seconds / conversion.seconds),
            resumed_units: conversion.resumed_units,
            output_bytes: bundle.output_bytes,
            peaks: conversion
                .peaks
                .iter()
                .map(|(unit, peak)| Peak { unit: unit.clone(), peak: *peak })
                .collect(),
            ..Self::new(bundle.dir.clone(), bundle.bpw, bundle.tensors.clone(), bundle.files.clone())
        }
    }

    /// The numbers of a bundle that was there.
    pub fn already_done(dir: &Path) -> anyhow::Result<Self> {
        let provenance =
            Provenance::read(dir)?.with_context(|| format!("{}: {PROVENANCE} is gone", dir.display()))?;
        let own = std::fs::metadata(dir.join(PROVENANCE))?.len();
        let output_bytes = own + provenance.files.iter().map(|file| file.bytes).sum::<u64>();
        let report = Self::new(dir.to_owned(), provenance.bpw, provenance.tensors, provenance.files);
        Ok(Self { already_done: true, output_bytes, ..report })
    }

    fn new(output: PathBuf, bpw: Bpw, tensors: Vec<TensorMetrics>, files: Vec<FileRecord>) -> Self {
        let mean = tensors.iter().map(|t| t.proxy_error).sum::<f64>() / tensors.len() as f64;
        Self {
            output,
            already_done: false,
            output_bytes: 0,
            bpw: bpw.all,
            bpw_decoder: bpw.decoder,
            bpw_head: bpw.head,
            mean_proxy_error: mean,
            resumed_units: 0,
            seconds: None,
            encoder_seconds: None,
            encoder_share: None,
            verified: None,
            left_out: Vec::new(),
            peaks: Vec::new(),
            tensors,
            files,
        }
    }

    /// Whether nothing speaks against the bundle.
    pub fn is_sound(&self) -> bool {
        self.verified.as_ref().is_none_or(|v| v.failures == 0)
    }

    pub fn text(&self) -> String {
        let verb = if self.already_done { "already converted" } else { "converted" };
        let mut lines = vec![format!("{verb}: {}", self.output.display())];
        let head = self.bpw_head.map_or(String::new(), |head| format!(", head {head:.3}"));
        let decoder = self.bpw_decoder.map_or(String::new(), |bpw| format!("decoder {bpw:.3}{head}"));
        lines.push(format!(
            "size: {}, {:.3} bits per weight ({decoder})",
            bytes_text(self.output_bytes),
            self.bpw
        ));
        lines.push(format!(
            "mean proxy error: {:.6} over {} tensors",
            self.mean_proxy_error,
            self.tensors.len()
        ));
        if let (Some(seconds), Some(share)) = (self.seconds, self.encoder_share) {
            lines.push(format!("time: {}, {:.0} % in the encoder", seconds_text(seconds), 100.0 * share));
        }
        let left_out = if self.left_out.is_empty() { "nothing".to_owned() } else { self.left_out.join(", ") };
        lines.push(format!("left out: {left_out}"));
        match &self.verified {
            Some(Verified { checks, failures: 0 }) => {
                lines.push(format!("verified: {checks} checks, no failure"))
            }
            Some(Verified { checks, failures }) => {
                lines.push(format!(
                    "NOT verified: {failures} of {checks} checks failed; see exl3-candle verify"
                ));
            }
            None => {}
        }
        lines.join("\n")
    }
}
