//! `exl3-candle verify`: whether a bundle is whole, consistent, and true to its source.

use std::path::PathBuf;

use clap::Args;
use exl3_candle::verify::{self, VerifyReport};

use super::{Status, Ui};

/// Check a bundle: manifest, index, tensor set, geometry, tiles, hashes, and the source's weights
#[derive(Args)]
pub struct VerifyArgs {
    /// The bundle's folder
    bundle: PathBuf,
    /// The checkpoint it was made from: compares what is passed through byte by byte, and decodes
    /// and compares every quantized tensor
    #[arg(long)]
    source: Option<PathBuf>,
}

pub fn run(args: &VerifyArgs, ui: &Ui) -> anyhow::Result<Status> {
    let report = verify::run(&args.bundle, args.source.as_deref())?;
    ui.result(&text(args, &report), &report)?;
    Ok(if report.is_ok() { Status::Done } else { Status::No })
}

fn text(args: &VerifyArgs, report: &VerifyReport) -> String {
    let mut lines: Vec<String> = report
        .failures
        .iter()
        .map(|f| format!("FAILED {}: {}: expected {}, found {}", f.check, f.name, f.expected, f.found))
        .collect();
    let errors: Vec<f64> = report.tensors.iter().filter_map(|t| t.rel_frobenius).collect();
    lines.push(format!("bundle     {}", args.bundle.display()));
    lines.push(format!("quantized  {} tensors", report.tensors.len()));
    if let Some(largest) = errors.iter().copied().reduce(f64::max) {
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        lines.push(format!("error      {mean:.4} mean, {largest:.4} largest (relative Frobenius)"));
    }
    lines.push(format!("checks     {}, {} failed", report.checks, report.failures.len()));
    lines.join("\n")
}
