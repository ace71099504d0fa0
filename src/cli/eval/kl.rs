//! `eval kl`: divergence of a quantized model from its source.

use std::path::{Path, PathBuf};

use clap::Args;
use exl3_candle::eval::{self, Bucket, Distribution, KlReport, Subject, TopK};
use serde::Serialize;

use super::within;
use crate::cli::measured::{Measured, Opened, SourceArgs, Window, perplexity_line};
use crate::cli::{Status, Ui, values};

/// KL divergence of a quantized model from its source on a text
#[derive(Args)]
pub struct KlArgs {
    /// Folder of the source model
    source: PathBuf,
    /// Folder of the quantized model
    model: PathBuf,
    #[command(flatten)]
    window: Window,
    #[command(flatten)]
    logits: SourceArgs,
    /// Exit with status 1 if the mean divergence, in nats, is above this
    #[arg(long, value_name = "LIMIT", allow_negative_numbers = true, value_parser = values::amount)]
    max_kl: Option<f64>,
}

#[derive(Serialize)]
struct KlOutput<'a> {
    source: &'a Path,
    model: &'a Path,
    kl: &'a Distribution,
    reverse_kl: &'a Distribution,
    bf16_floor: &'a Distribution,
    excess_kl: f64,
    top1: f64,
    top_k: &'a TopK,
    perplexity: f64,
    source_perplexity: f64,
    positions: usize,
    perplexity_positions: usize,
    by_position: &'a [Bucket<usize>],
    by_confidence: &'a [Bucket<f64>],
    #[serde(flatten)]
    measured: &'a Measured,
}

pub fn run(args: &KlArgs, ui: &Ui) -> anyhow::Result<Status> {
    let source = Opened::new(&args.source)?;
    let opened = Opened::new(&args.model)?;
    // One text, one encoding: the source's.
    let (corpus, measured) = args.window.read(&source)?;
    let reference = args.logits.reference(&source, &corpus)?;
    let weights = opened.weights()?;
    let model = Subject { model: &opened.model, weights: weights.as_ref() };
    let report = eval::kl(&reference, model, corpus.rows(), args.logits.top_k)?;
    let output = KlOutput {
        source: &args.source,
        model: &args.model,
        kl: &report.kl,
        reverse_kl: &report.reverse,
        bf16_floor: &report.floor,
        excess_kl: report.excess(),
        top1: report.top1,
        top_k: &report.top_k,
        perplexity: report.quantized.perplexity,
        source_perplexity: report.source.perplexity,
        positions: report.positions,
        perplexity_positions: report.quantized.tokens_scored,
        by_position: &report.by_position,
        by_confidence: &report.by_confidence,
        measured: &measured,
    };
    ui.result(&text(&report, &measured), &output)?;
    Ok(within(report.kl.mean, args.max_kl))
}

fn text(report: &KlReport, measured: &Measured) -> String {
    let KlReport { kl, reverse, floor, top_k, .. } = report;
    let quantiles = |d: &Distribution| {
        let Distribution { median, p90, p99, max, .. } = d;
        format!("median {median:.5}, 90 % below {p90:.4}, 99 % below {p99:.4}, max {max:.4}")
    };
    let mut lines = vec![
        format!(
            "kl          {:.5} +- {:.5} nats, mean of {} positions of KL(source || model)",
            kl.mean, kl.standard_error, report.positions
        ),
        format!("            {}", quantiles(kl)),
        format!(
            "reverse kl  {:.5} +- {:.5} nats of KL(model || source)",
            reverse.mean, reverse.standard_error
        ),
        format!("            {}", quantiles(reverse)),
        format!(
            "bf16 floor  {:.6} nats, the source computed in bf16; excess {:.5}",
            floor.mean,
            report.excess()
        ),
        format!("top-1       {:.4}", report.top1),
        format!("{:<11} {:.4}", format!("top-{}", top_k.k), top_k.agreement),
        perplexity_line("perplexity", &report.quantized),
        perplexity_line("source", &report.source),
        measured.line(),
        String::new(),
        row("position", "tokens", "kl", "top-1"),
    ];
    lines.extend(report.by_position.iter().map(|b| bucket_row(format!("{} to {}", b.from, b.to - 1), b)));
    lines.extend([String::new(), row("confidence", "tokens", "kl", "top-1")]);
    lines.extend(report.by_confidence.iter().map(|b| bucket_row(format!("{} to {}", b.from, b.to), b)));
    lines.join("\n")
}

fn bucket_row<T>(range: String, bucket: &Bucket<T>) -> String {
    let number = |x: f64, digits: usize| if x.is_nan() { "-".to_owned() } else { format!("{x:.digits$}") };
    row(&range, &bucket.positions.to_string(), &number(bucket.kl, 5), &number(bucket.top1, 4))
}

fn row(range: &str, tokens: &str, kl: &str, top1: &str) -> String {
    format!("{range:<14} {tokens:>7} {kl:>9} {top1:>7}")
}
