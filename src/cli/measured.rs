//! What measuring commands have in common: the model folders, and the text that is measured on.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use exl3_candle::bundle::durable;
use exl3_candle::corpus::{self, Bos, Corpus, Shape, Tokenizer};
use exl3_candle::eval::{Identity, PplReport, Reference, Subject};
use exl3_candle::model::{Model, WeightSource, open_weights};
use exl3_candle::source::{self, Checkpoint};
use serde::Serialize;

use super::values;

/// A model folder whose tensors have been checked.
pub struct Opened {
    pub checkpoint: Checkpoint,
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

    pub fn tokenizer(&self) -> anyhow::Result<Tokenizer> {
        Ok(corpus::load_tokenizer(self.checkpoint.dir())?)
    }
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

impl Window {
    /// The rows for a model, encoded with its own tokenizer.
    pub fn read(&self, opened: &Opened) -> anyhow::Result<(Corpus, Measured)> {
        let shape = Shape { rows: self.rows, cols: self.cols };
        let corpus = corpus::from_file(&opened.tokenizer()?, &self.text, shape, opened.model.vocab_size())?;
        let measured = Measured::new(&self.text, &corpus)?;
        Ok((corpus, measured))
    }
}

/// How the source is compared with.
#[derive(Args)]
pub struct SourceArgs {
    /// Take the source's logits from this file, or write it if there is none
    #[arg(long, value_name = "FILE")]
    source_logits: Option<PathBuf>,
    /// Compare the K most likely tokens too
    #[arg(long, value_name = "K", default_value_t = 5, value_parser = values::positive)]
    pub top_k: usize,
}

impl SourceArgs {
    /// The source's logits over the rows of `corpus`.
    pub fn reference(&self, source: &Opened, corpus: &Corpus) -> anyhow::Result<Reference> {
        let weights = source.weights()?;
        let subject = Subject { model: &source.model, weights: weights.as_ref() };
        let Some(file) = &self.source_logits else {
            return Ok(Reference::compute(subject, corpus.rows())?);
        };
        let Shape { rows, cols } = corpus.shape();
        let identity = Identity {
            source_sha256: source.checkpoint.check_finite_and_hash()?,
            tokens_sha256: corpus.fingerprint().to_owned(),
            rows,
            cols,
            vocab: source.model.vocab_size(),
        };
        Ok(if file.exists() {
            Reference::open(file, &identity)?
        } else {
            Reference::store(subject, corpus.rows(), file, &identity)?
        })
    }
}

/// What a number was measured on.
#[derive(Serialize)]
pub struct Measured {
    pub rows: usize,
    pub cols: usize,
    /// Tokens between the beginnings of two rows: they do not overlap.
    pub stride: usize,
    pub tokens: usize,
    /// Token id, where the tokenizer puts one in.
    pub bos: Option<u32>,
    pub bos_rule: String,
    pub text_sha256: String,
    pub tokens_sha256: String,
}

impl Measured {
    pub fn new(text: &Path, corpus: &Corpus) -> anyhow::Result<Self> {
        let Shape { rows, cols } = corpus.shape();
        Ok(Self {
            rows,
            cols,
            stride: cols,
            tokens: rows * cols,
            bos: match corpus.bos() {
                Bos::Once { id } | Bos::PerDocument { id } => Some(id),
                Bos::Absent | Bos::AsGiven => None,
            },
            bos_rule: corpus.bos().to_string(),
            text_sha256: durable::digest(text)?.sha256,
            tokens_sha256: corpus.fingerprint().to_owned(),
        })
    }

    pub fn line(&self) -> String {
        let Measured { rows, cols, tokens, bos_rule, text_sha256, .. } = self;
        let text = &text_sha256[..12];
        format!(
            "window      {rows} x {cols} tokens without overlap ({tokens}), BOS: {bos_rule}, text sha256 {text}"
        )
    }
}

pub fn perplexity_line(name: &str, report: &PplReport) -> String {
    let PplReport { perplexity, perplexity_standard_error, nll_mean, tokens_scored, .. } = report;
    format!(
        "{name:<11} {perplexity:.4} +- {perplexity_standard_error:.4} (nll {nll_mean:.5} over {tokens_scored} predicted tokens)"
    )
}
