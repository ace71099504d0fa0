//! `eval`: perplexity of a model, and the divergence of a quantized model from its source.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use exl3_candle::bundle::durable;
use exl3_candle::corpus::{self, Bos, Corpus, Shape};
use exl3_candle::eval::{self, KlReport, KlStats, PplReport, Subject};
use exl3_candle::model::{Model, WeightSource, open_weights};
use exl3_candle::source::{self, Checkpoint};
use serde::Serialize;

use super::{Status, Ui, judge, values};

/// Measure a model: a Hugging Face folder or an EXL3 bundle
#[derive(Subcommand)]
pub enum Command {
    /// Perplexity of a model on a text
    Ppl {
        /// Folder of the model, plain or quantized
        model: PathBuf,
        #[command(flatten)]
        window: Window,
        /// Exit with status 1 if the perplexity is above this
        #[arg(long, value_name = "LIMIT", allow_negative_numbers = true, value_parser = values::amount)]
        max_perplexity: Option<f64>,
    },
    /// KL divergence of a quantized model from its source on a text
    Kl {
        /// Folder of the source model
        source: PathBuf,
        /// Folder of the quantized model
        model: PathBuf,
        #[command(flatten)]
        window: Window,
        /// Exit with status 1 if the mean divergence, in nats, is above this
        #[arg(long, value_name = "LIMIT", allow_negative_numbers = true, value_parser = values::amount)]
        max_kl: Option<f64>,
    },
    Judge(judge::EvalJudgeArgs),
}

/// What is measured: the first `rows` x `cols` tokens of a text, in rows without overlap, each
/// from position 0.
#[derive(Args)]
pub struct Window {
    /// Text to measure on: plain text, JSONL with a "text" field, or pre-tokenized rows
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Rows of tokens
    #[arg(long, default_value_t = 16, allow_negative_numbers = true, value_parser = values::whole::<usize>)]
    rows: usize,
    /// Tokens of a row
    #[arg(long, default_value_t = 512, allow_negative_numbers = true, value_parser = values::whole::<usize>)]
    cols: usize,
}

pub fn run(command: Command, ui: &Ui) -> anyhow::Result<Status> {
    match command {
        Command::Ppl { model, window, max_perplexity } => ppl(&model, &window, max_perplexity, ui),
        Command::Kl { source, model, window, max_kl } => kl(&source, &model, &window, max_kl, ui),
        Command::Judge(args) => judge::run_eval(&args, ui),
    }
}

fn ppl(dir: &Path, window: &Window, limit: Option<f64>, ui: &Ui) -> anyhow::Result<Status> {
    let opened = Opened::new(dir)?;
    let (corpus, measured) = window.read(&opened)?;
    let report = eval::perplexity(&opened.model, opened.weights()?.as_ref(), corpus.rows())?;
    let output = PplOutput {
        model: dir,
        perplexity: report.perplexity,
        nll_mean: report.nll_mean,
        positions: report.tokens_scored,
        measured,
    };
    let text = format!("{}\n{}", perplexity_line("perplexity", &report), output.measured.line());
    ui.result(&text, &output)?;
    Ok(within(report.perplexity, limit))
}

fn kl(source: &Path, dir: &Path, window: &Window, limit: Option<f64>, ui: &Ui) -> anyhow::Result<Status> {
    let source_opened = Opened::new(source)?;
    let opened = Opened::new(dir)?;
    // One text, one encoding: the source's.
    let (corpus, measured) = window.read(&source_opened)?;
    let (p, q) = (source_opened.weights()?, opened.weights()?);
    let report = eval::kl(
        Subject { model: &source_opened.model, weights: p.as_ref() },
        Subject { model: &opened.model, weights: q.as_ref() },
        corpus.rows(),
    )?;
    let text = kl_text(&report, &measured);
    let output = KlOutput {
        source,
        model: dir,
        top1: report.top1,
        perplexity: report.quantized.perplexity,
        source_perplexity: report.source.perplexity,
        positions: report.positions,
        perplexity_positions: report.quantized.tokens_scored,
        kl: report.kl,
        measured,
    };
    ui.result(&text, &output)?;
    Ok(within(output.kl.mean, limit))
}

/// A value that is no number is within no limit.
fn within(value: f64, limit: Option<f64>) -> Status {
    if limit.is_none_or(|limit| value <= limit) { Status::Done } else { Status::No }
}

/// A model folder whose tensors have been checked.
pub struct Opened {
    checkpoint: Checkpoint,
    pub model: Model,
}

impl Opened {
    pub fn new(dir: &Path) -> anyhow::Result<Self> {
        let checkpoint = source::open(dir)?;
        let in_dir = || format!("{} cannot be evaluated", dir.display());
        let model = Model::of(&checkpoint).with_context(in_dir)?;
        // The quantization method is named before the tensors it would have renamed are missed.
        open_weights(&checkpoint, &model).with_context(in_dir)?;
        model.check(&checkpoint)?;
        Ok(Self { checkpoint, model })
    }

    pub fn weights(&self) -> anyhow::Result<Box<dyn WeightSource + Sync + '_>> {
        Ok(open_weights(&self.checkpoint, &self.model)?)
    }
}

impl Window {
    fn read(&self, opened: &Opened) -> anyhow::Result<(Corpus, Measured)> {
        let tokenizer = corpus::load_tokenizer(opened.checkpoint.dir())?;
        let shape = Shape { rows: self.rows, cols: self.cols };
        let corpus = corpus::from_file(&tokenizer, &self.text, shape, opened.model.vocab_size())?;
        let text_sha256 = durable::digest(&self.text)?.sha256;
        let measured = Measured {
            rows: self.rows,
            cols: self.cols,
            tokens: self.rows * self.cols,
            bos: match corpus.bos() {
                Bos::Once { id } | Bos::PerDocument { id } => Some(id),
                Bos::Absent | Bos::AsGiven => None,
            },
            bos_rule: corpus.bos().to_string(),
            text_sha256,
            tokens_sha256: corpus.fingerprint().to_owned(),
        };
        Ok((corpus, measured))
    }
}

/// What a number was measured on.
#[derive(Serialize)]
struct Measured {
    rows: usize,
    cols: usize,
    tokens: usize,
    /// Token id, where the tokenizer puts one in.
    bos: Option<u32>,
    bos_rule: String,
    text_sha256: String,
    tokens_sha256: String,
}

impl Measured {
    fn line(&self) -> String {
        let Measured { rows, cols, tokens, bos_rule, text_sha256, .. } = self;
        let text = &text_sha256[..12];
        format!(
            "window      {rows} x {cols} tokens without overlap ({tokens}), BOS: {bos_rule}, text sha256 {text}"
        )
    }
}

#[derive(Serialize)]
struct PplOutput<'a> {
    model: &'a Path,
    perplexity: f64,
    nll_mean: f64,
    positions: usize,
    #[serde(flatten)]
    measured: Measured,
}

#[derive(Serialize)]
struct KlOutput<'a> {
    source: &'a Path,
    model: &'a Path,
    kl: KlStats,
    top1: f64,
    perplexity: f64,
    source_perplexity: f64,
    positions: usize,
    perplexity_positions: usize,
    #[serde(flatten)]
    measured: Measured,
}

fn perplexity_line(name: &str, report: &PplReport) -> String {
    let PplReport { perplexity, nll_mean, tokens_scored } = report;
    format!("{name:<11} {perplexity:.4} (nll {nll_mean:.5} over {tokens_scored} predicted tokens)")
}

fn kl_text(report: &KlReport, measured: &Measured) -> String {
    let KlStats { mean, median, p99, max } = report.kl;
    [
        format!("kl          {mean:.5} nats, mean of {} positions", report.positions),
        format!("            median {median:.5}, 99 % below {p99:.4}, max {max:.4}"),
        format!("top-1       {:.4}", report.top1),
        perplexity_line("perplexity", &report.quantized),
        perplexity_line("source", &report.source),
        measured.line(),
    ]
    .join("\n")
}
