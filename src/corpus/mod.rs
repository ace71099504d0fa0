//! Text to token rows of one length, with a fingerprint.
//!
//! The rows are what calibration observes and what evaluation measures, so the way from a file to
//! rows is fixed:
//!
//! - **Plain text** is encoded once, as a whole, with the tokenizer's special tokens (one BOS at
//!   the very start where the tokenizer wants one, none where it has none), then cut into rows
//!   without overlap.
//! - **JSONL**: the `"text"` of every line is a document, encoded on its own with its special
//!   tokens; the documents are joined and cut into rows.
//! - **Pre-tokenized rows** are taken as they are, cropped to the wanted length.
//! - **The default mix** is bundled with the program, see [`default_mix`].
//!
//! A file too short for the wanted shape is an error, never a smaller corpus.

mod documents;
mod mix;
mod pretokenized;
mod text;
mod tokenizer;

use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use thiserror::Error;

pub use documents::documents;
pub use mix::{Mix, MixSource, SourceKind, default_mix};
pub use tokenizer::{Tokenizer, load_tokenizer};

/// How many rows of how many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub rows: usize,
    pub cols: usize,
}

impl Shape {
    /// Tokens in all rows together; `None` where that overflows or is zero.
    fn tokens(self) -> Option<usize> {
        self.rows.checked_mul(self.cols).filter(|&tokens| tokens > 0)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.rows, self.cols)
    }
}

/// Where a corpus has its beginning-of-sequence token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bos {
    /// The tokenizer wants none.
    Absent,
    /// Once, as the very first token of row 0.
    Once { id: u32 },
    /// In front of every document, wherever in a row a document begins.
    PerDocument { id: u32 },
    /// The rows were tokenized elsewhere and are as they came.
    AsGiven,
}

impl fmt::Display for Bos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bos::Absent => write!(f, "none"),
            Bos::Once { id } => write!(f, "token {id} once, at the start"),
            Bos::PerDocument { id } => write!(f, "token {id} at the start of every document"),
            Bos::AsGiven => write!(f, "as in the pre-tokenized rows"),
        }
    }
}

/// Token rows of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    rows: Vec<Vec<u32>>,
    fingerprint: String,
    description: String,
    bos: Bos,
}

impl Corpus {
    /// `[rows][cols]` token ids, each below the vocabulary size the corpus was made for.
    pub fn rows(&self) -> &[Vec<u32>] {
        &self.rows
    }

    pub fn shape(&self) -> Shape {
        Shape { rows: self.rows.len(), cols: self.rows.first().map_or(0, Vec::len) }
    }

    /// SHA-256 in hex over the number of rows and of columns (u64) and all token ids (u32), all
    /// little-endian.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// One line for people: the source and how it was cut.
    pub fn description(&self) -> &str {
        &self.description
    }

    pub fn bos(&self) -> Bos {
        self.bos
    }

    /// `rows` must all have `shape.cols` tokens.
    fn new(rows: Vec<Vec<u32>>, shape: Shape, description: String, bos: Bos) -> Corpus {
        debug_assert!(rows.len() == shape.rows && rows.iter().all(|row| row.len() == shape.cols));
        let mut hash = Sha256::new();
        hash.update((shape.rows as u64).to_le_bytes());
        hash.update((shape.cols as u64).to_le_bytes());
        for id in rows.iter().flatten() {
            hash.update(id.to_le_bytes());
        }
        let fingerprint = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Corpus { rows, fingerprint, description, bos }
    }
}

/// Why a file gives no corpus.
#[derive(Debug, Error)]
pub enum CorpusError {
    #[error("{path}: cannot be read", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: not a tokenizer", path = path.display())]
    Tokenizer { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{path}: not valid JSON", path = path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: not a JSON object with \"rows\" of token ids", path = path.display())]
    Rows { path: PathBuf, source: serde_json::Error },
    #[error("{path}: a BOS token is asked for, but {found}", path = path.display())]
    Bos { path: PathBuf, found: String },
    #[error("{path}: the text cannot be encoded", path = path.display())]
    Encode { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{path}: not UTF-8 text: invalid byte at offset {offset}", path = path.display())]
    Utf8 { path: PathBuf, offset: usize },
    #[error("{path}: line {line}: expected a JSON object with a string \"text\", found {found}", path = path.display())]
    Line { path: PathBuf, line: usize, found: String },
    #[error("{path}: expected {expected}, found {found}", path = path.display())]
    Content { path: PathBuf, expected: String, found: String },
    #[error("{path}: not a safetensors file", path = path.display())]
    Safetensors { path: PathBuf, source: safetensors::SafeTensorError },
    #[error("{path}: too short for {shape}: need {need} tokens, have {have}", path = path.display())]
    TooShort { path: PathBuf, shape: Shape, need: usize, have: usize },
    #[error("{path}: too few rows for {shape}: need {need} rows, have {have}", path = path.display())]
    TooFewRows { path: PathBuf, shape: Shape, need: usize, have: usize },
    #[error("{path}: row {row} is too short for {shape}: need {need} tokens, have {have}", path = path.display())]
    ShortRow { path: PathBuf, shape: Shape, row: usize, need: usize, have: usize },
    #[error("{path}: token id {id} is outside the model's vocabulary of {vocab}", path = path.display())]
    Vocabulary { path: PathBuf, id: i64, vocab: usize },
    #[error("{rows} rows of {cols} tokens are no corpus; both must be at least 1, and their product below 2^64", rows = shape.rows, cols = shape.cols)]
    Shape { shape: Shape },
    #[error("calibration mix: {found}")]
    Mix { found: String },
    #[error(
        "the bundled calibration mix is too short for {shape}: need {need} rows of text, have {have}; \
         pass a longer text with --calibration"
    )]
    MixTooShort { shape: Shape, need: usize, have: usize },
}

/// Reads a corpus from a file of any of the kinds in the [module documentation](self).
///
/// `.jsonl` and `.ndjson` are JSON lines, `.safetensors` holds `input_ids` `[rows, cols]` (I64 or
/// I32), `.json` is `{"format": .., "rows": [[ids], ..], ..}` or, where its first value has a
/// `"text"`, JSON lines. Everything else is plain text. `vocab` is the model's vocabulary size: an
/// id at or above it is an error.
///
/// Files are read only as far as the rows need, so a fault beyond that point goes unnoticed.
pub fn from_file(
    tokenizer: &Tokenizer,
    file: &Path,
    shape: Shape,
    vocab: usize,
) -> Result<Corpus, CorpusError> {
    from_file_within(tokenizer, file, shape.rows, shape, vocab)
}

/// As [`from_file`], with fewer than `shape.rows` rows where the file has only so many, but at least
/// `least`.
pub fn from_file_within(
    tokenizer: &Tokenizer,
    file: &Path,
    least: usize,
    shape: Shape,
    vocab: usize,
) -> Result<Corpus, CorpusError> {
    let need = shape.tokens().ok_or(CorpusError::Shape { shape })?;
    let extension = file.extension().map(|e| e.to_ascii_lowercase().to_string_lossy().into_owned());
    let (rows, bos, kind) = match extension.as_deref() {
        Some("safetensors") => {
            (pretokenized::safetensors(file, shape, least)?, Bos::AsGiven, "pre-tokenized rows")
        }
        Some("json") if !text::is_json_lines(file)? => {
            (pretokenized::json(file, shape, least)?, Bos::AsGiven, "pre-tokenized rows")
        }
        Some("jsonl" | "ndjson" | "json") => {
            let ids = text::json_lines(tokenizer, file, need)?;
            let bos = tokenizer.bos_id().map_or(Bos::Absent, |id| Bos::PerDocument { id });
            (cut(file, &ids, shape, least)?, bos, "JSON lines")
        }
        _ => {
            let ids = text::plain(tokenizer, file, need)?;
            let bos = tokenizer.bos_id().map_or(Bos::Absent, |id| Bos::Once { id });
            (cut(file, &ids, shape, least)?, bos, "text")
        }
    };
    check_vocabulary(file, &rows, vocab)?;
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
    let shape = Shape { rows: rows.len(), ..shape };
    let description = format!("{name} ({kind}), the first {shape} tokens, BOS: {bos}");
    Ok(Corpus::new(rows, shape, description, bos))
}

/// `ids` as rows, `least` of them at least.
fn cut(file: &Path, ids: &[u32], shape: Shape, least: usize) -> Result<Vec<Vec<u32>>, CorpusError> {
    let need = least * shape.cols;
    if ids.len() < need {
        let shape = Shape { rows: least, ..shape };
        return Err(CorpusError::TooShort { path: file.into(), shape, need, have: ids.len() });
    }
    Ok(ids.chunks_exact(shape.cols).take(shape.rows).map(<[u32]>::to_vec).collect())
}

fn check_vocabulary(file: &Path, rows: &[Vec<u32>], vocab: usize) -> Result<(), CorpusError> {
    match rows.iter().flatten().find(|&&id| id as usize >= vocab) {
        Some(&id) => Err(CorpusError::Vocabulary { path: file.into(), id: id.into(), vocab }),
        None => Ok(()),
    }
}
