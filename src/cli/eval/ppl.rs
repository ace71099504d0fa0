//! `eval ppl`: perplexity of a model on a text, by a named protocol.

use std::path::{Path, PathBuf};

use clap::Args;
use exl3_candle::corpus::{self, Shape};
use exl3_candle::eval::{self, PplReport, Protocol, Subject, Windows};
use serde::Serialize;

use super::within;
use crate::cli::measured::{Measured, Opened, perplexity_line};
use crate::cli::{Status, Ui, values};

/// Perplexity of a model on a text
#[derive(Args)]
pub struct PplArgs {
    /// Folder of the model, plain or quantized
    model: PathBuf,
    /// Text to measure on: plain text, JSONL with a "text" field, or pre-tokenized rows
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// How the text is cut and which tokens are scored: rows, exllamav3 or llama.cpp
    #[arg(long, value_name = "NAME", default_value = "rows", value_parser = protocol)]
    protocol: Protocol,
    /// Rows of tokens [default: 16 of rows, up to 100 of exllamav3, all of llama.cpp]
    #[arg(long, allow_negative_numbers = true, value_parser = values::whole::<usize>)]
    rows: Option<usize>,
    /// Tokens of a row [default: 512; exllamav3: 2048]
    #[arg(long, allow_negative_numbers = true, value_parser = values::whole::<usize>)]
    cols: Option<usize>,
    /// Exit with status 1 if the perplexity is above this
    #[arg(long, value_name = "LIMIT", allow_negative_numbers = true, value_parser = values::amount)]
    max_perplexity: Option<f64>,
}

fn protocol(name: &str) -> Result<Protocol, String> {
    let names = Protocol::ALL.map(Protocol::name).join(", ");
    let found = Protocol::ALL.into_iter().find(|protocol| protocol.name() == name);
    found.ok_or_else(|| format!("expected one of {names}, found \"{name}\""))
}

#[derive(Serialize)]
struct PplOutput<'a> {
    model: &'a Path,
    protocol: &'static str,
    perplexity: f64,
    perplexity_standard_error: f64,
    nll_mean: f64,
    nll_standard_error: f64,
    bits_per_byte: Option<f64>,
    positions: usize,
    /// First position of a row whose next token is scored.
    first_scoring: usize,
    #[serde(flatten)]
    measured: Measured,
}

pub fn run(args: &PplArgs, ui: &Ui) -> anyhow::Result<Status> {
    let protocol = args.protocol;
    let opened = Opened::new(&args.model)?;
    let (windows, measured, bytes) = args.windows(&opened)?;
    let weights = opened.weights()?;
    let report = eval::perplexity(Subject { model: &opened.model, weights: weights.as_ref() }, &windows)?;
    let bits_per_byte = report.bits_per_byte(bytes);
    let PplReport { perplexity, perplexity_standard_error, nll_mean, nll_standard_error, .. } = report;
    let output = PplOutput {
        model: &args.model,
        protocol: protocol.name(),
        perplexity,
        perplexity_standard_error,
        nll_mean,
        nll_standard_error,
        bits_per_byte,
        positions: report.tokens_scored,
        first_scoring: protocol.first_scoring(measured.cols),
        measured,
    };
    ui.result(&text(&report, &output), &output)?;
    Ok(within(perplexity, args.max_perplexity))
}

impl PplArgs {
    /// The rows, what they are, and the bytes of the scored tokens.
    fn windows(&self, opened: &Opened) -> anyhow::Result<(Windows, Measured, usize)> {
        let tokenizer = opened.tokenizer()?;
        let protocol = self.protocol;
        let (least, rows) = self.rows.map_or(protocol.rows(), |rows| (rows, rows));
        let shape = Shape { rows, cols: self.cols.unwrap_or(protocol.cols()) };
        let vocab = opened.model.vocab_size();
        let corpus = corpus::from_file_within(&tokenizer, &self.text, least, shape, vocab)?;
        let mut measured = Measured::new(&self.text, &corpus)?;
        if let Some(bos) = tokenizer.bos_id().filter(|_| protocol.replaces_first_token()) {
            measured.bos = Some(bos);
            measured.bos_rule = format!("token {bos} in place of the first token of every row");
        }
        let windows = Windows::new(protocol, corpus.rows().to_vec(), tokenizer.bos_id());
        let bytes = windows.targets().map(|id| tokenizer.text_bytes(id)).sum();
        Ok((windows, measured, bytes))
    }
}

fn text(report: &PplReport, output: &PplOutput<'_>) -> String {
    let scored = match output.first_scoring {
        0 => "all tokens of a row but the first".to_owned(),
        first => format!("tokens {} to {} of a row", first + 1, output.measured.cols - 1),
    };
    let bits = output.bits_per_byte.map_or("-".to_owned(), |bits| format!("{bits:.5}"));
    [
        perplexity_line("perplexity", report),
        format!("nll         {:.5} +- {:.5} nats", report.nll_mean, report.nll_standard_error),
        format!("bits/byte   {bits}"),
        format!("protocol    {}, scored: {scored}", output.protocol),
        output.measured.line(),
    ]
    .join("\n")
}
