//! What models are compared with: the source's logits at every position, computed or from a file.
//!
//! # File
//! A safetensors file, little-endian: `logits` F32 `[rows, cols, vocab]`; `checksums` U64
//! `[rows, cols]`, the first eight bytes of the SHA-256 of each position's logits; `floor` F64
//! `[rows, cols]`, KL(source || the source computed in bf16). The metadata tells for what it was
//! made. Logits and not log-probabilities, which follow from them, so that a comparison gives the
//! same digits with the file as without. It is written and read in pieces; all offsets are 64 bits
//! wide.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::divergence::{for_each_block, pairs};
use super::logits::{Logits, Position};
use super::{EvalError, PplReport, Protocol, Run, Subject, Windows, scored};
use crate::bundle::durable;
use crate::model::Bf16Weights;

const FORMAT: &str = "exl3-candle logits 1";

/// Far above any header of this format.
const MAX_HEADER_BYTES: u64 = 1 << 16;

/// What a file of logits was made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// SHA-256 of the source's config and weights.
    pub source_sha256: String,
    /// SHA-256 of the rows of tokens.
    pub tokens_sha256: String,
    pub rows: usize,
    pub cols: usize,
    pub vocab: usize,
}

/// The source, as models are compared with it.
pub struct Reference {
    logits: Box<dyn Logits>,
    /// KL(source || the source computed in bf16) at every position.
    floor: Vec<f64>,
}

impl Reference {
    /// Runs the source over `rows`: in f32, and in bf16 for the floor.
    pub fn compute(source: Subject<'_>, rows: &[Vec<u32>]) -> Result<Self, EvalError> {
        let run = Run::of(source, rows)?;
        let mut floor = Vec::new();
        for_each_floor(&run, source, rows, |_, positions| {
            floor.extend(positions);
            Ok(())
        })?;
        Ok(Self { logits: Box::new(run), floor })
    }

    /// Runs the source over `rows`, of `identity`, into a file, which appears when it is complete.
    pub fn store(
        source: Subject<'_>,
        rows: &[Vec<u32>],
        path: &Path,
        identity: &Identity,
    ) -> Result<Self, EvalError> {
        let run = Run::of(source, rows)?;
        // An error of the computation passes through that of the file.
        let mut failure = None;
        let written = durable::write(path, |sink| {
            write(&run, source, rows, identity, sink).map_err(|error| match error {
                EvalError::Sink { source } => source,
                other => {
                    failure = Some(other);
                    io::ErrorKind::Other.into()
                }
            })
        });
        match failure {
            Some(error) => Err(error),
            None => written.map_err(EvalError::from),
        }?;
        Self::open(path, identity)
    }

    /// The logits in the file at `path`.
    ///
    /// # Errors
    /// [`EvalError::OtherCache`] names what is not as in `identity`.
    pub fn open(path: &Path, identity: &Identity) -> Result<Self, EvalError> {
        let file = LogitsFile::open(path, identity)?;
        let floor = file.floor()?;
        Ok(Self { logits: Box::new(file), floor })
    }

    /// The source's logits.
    pub fn logits(&self) -> &dyn Logits {
        self.logits.as_ref()
    }

    /// Perplexity of the source over all tokens of `rows`, which it was made of, but their first.
    pub fn perplexity(&self, rows: &[Vec<u32>]) -> Result<PplReport, EvalError> {
        scored(self.logits(), &Windows::new(Protocol::Rows, rows.to_vec(), None))
    }

    /// KL(source || the source computed in bf16) at every position.
    pub fn floor(&self) -> &[f64] {
        &self.floor
    }
}

/// Calls `work` block by block with the source's logits, and the floor of each of their positions.
fn for_each_floor(
    run: &Run,
    source: Subject<'_>,
    rows: &[Vec<u32>],
    mut work: impl FnMut(&[f32], Vec<f64>) -> Result<(), EvalError>,
) -> Result<(), EvalError> {
    let rounded = Subject { weights: &Bf16Weights(source.weights), ..source };
    let rounded = Run::of(rounded, rows)?;
    for_each_block(run, &rounded, rows, |row, block, p, q| {
        let floor = |_, p: &Position<'_>, q: &Position<'_>| p.divergences(q).0;
        work(p, pairs(row, block, p, q, run.vocab(), floor)?)
    })
}

fn write(
    run: &Run,
    source: Subject<'_>,
    rows: &[Vec<u32>],
    identity: &Identity,
    sink: &mut impl Write,
) -> Result<(), EvalError> {
    let failed = |source| EvalError::Sink { source };
    sink.write_all(&identity.header()).map_err(failed)?;
    let (mut checksums, mut floors) = (Vec::new(), Vec::new());
    for_each_floor(run, source, rows, |logits, floor| {
        let bytes: Vec<u8> = logits.iter().flat_map(|x| x.to_le_bytes()).collect();
        checksums.extend(bytes.chunks_exact(identity.vocab * 4).map(checksum));
        floors.extend(floor);
        sink.write_all(&bytes).map_err(failed)
    })?;
    let floors = floors.into_iter().map(f64::to_le_bytes);
    let tail: Vec<u8> = checksums.into_iter().map(u64::to_le_bytes).chain(floors).flatten().collect();
    sink.write_all(&tail).map_err(failed)
}

/// Of the bytes of one position's logits.
fn checksum(bytes: &[u8]) -> u64 {
    let hash: [u8; 32] = Sha256::digest(bytes).into();
    u64::from_le_bytes(*hash.first_chunk().expect("a hash is longer than 8 bytes"))
}

impl Identity {
    fn fields(&self) -> [(&'static str, String); 6] {
        [
            ("format", FORMAT.to_owned()),
            ("vocabulary", self.vocab.to_string()),
            ("source_sha256", self.source_sha256.clone()),
            ("rows", self.rows.to_string()),
            ("cols", self.cols.to_string()),
            ("tokens_sha256", self.tokens_sha256.clone()),
        ]
    }

    /// Bytes of `logits`, `checksums` and `floor`, which follow the header in this order.
    pub fn tensor_bytes(&self) -> [u64; 3] {
        let positions = self.rows as u64 * self.cols as u64;
        [positions * self.vocab as u64 * 4, positions * 8, positions * 8]
    }

    /// The beginning of the file, with the length in front.
    pub fn header(&self) -> Vec<u8> {
        let mut header = self.header_json().to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        [&(header.len() as u64).to_le_bytes(), &header[..]].concat()
    }

    fn header_json(&self) -> Value {
        let metadata: Map<String, Value> =
            self.fields().into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
        let [logits, checksums, floor] = self.tensor_bytes();
        let (rows, cols) = (self.rows, self.cols);
        let ends = [logits, logits + checksums, logits + checksums + floor];
        json!({
            "__metadata__": metadata,
            "logits": {"dtype": "F32", "shape": [rows, cols, self.vocab], "data_offsets": [0, ends[0]]},
            "checksums": {"dtype": "U64", "shape": [rows, cols], "data_offsets": [ends[0], ends[1]]},
            "floor": {"dtype": "F64", "shape": [rows, cols], "data_offsets": [ends[1], ends[2]]},
        })
    }
}

/// A file of logits, read when it is asked.
struct LogitsFile {
    path: PathBuf,
    file: File,
    identity: Identity,
    /// Where the three tensors begin.
    starts: [u64; 3],
}

impl LogitsFile {
    fn open(path: &Path, identity: &Identity) -> Result<Self, EvalError> {
        let failed = |source| EvalError::Read { path: path.to_owned(), source };
        let damaged = |found: String| EvalError::DamagedCache { path: path.to_owned(), found };
        let file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(|_| damaged(format!("{bytes} bytes")))?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES.min(bytes) {
            return Err(damaged(format!("a header of {header_bytes} bytes")));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(failed)?;
        let header: Value = serde_json::from_slice(&header).map_err(|_| damaged("no header".to_owned()))?;
        for (field, expected) in identity.fields() {
            match header["__metadata__"][field].as_str() {
                None => return Err(damaged(format!("no {field} in the header"))),
                Some(found) if found != expected => {
                    let (path, found) = (path.to_owned(), found.to_owned());
                    return Err(EvalError::OtherCache { path, field, expected, found });
                }
                Some(_) => {}
            }
        }
        let tensors = identity.tensor_bytes();
        let start = 8 + header_bytes;
        let starts = [start, start + tensors[0], start + tensors[0] + tensors[1]];
        let end = starts[2] + tensors[2];
        if header != identity.header_json() || bytes != end {
            return Err(damaged(format!("{bytes} bytes where {end} are expected")));
        }
        Ok(Self { path: path.to_owned(), file, identity: identity.clone(), starts })
    }

    /// The elements `range`, of `size` bytes each, of the tensor `tensor`.
    fn read(&self, tensor: usize, range: Range<usize>, size: usize) -> Result<Vec<u8>, EvalError> {
        let mut bytes = vec![0; range.len() * size];
        let offset = self.starts[tensor] + range.start as u64 * size as u64;
        let failed = |source| EvalError::Read { path: self.path.clone(), source };
        self.file.read_exact_at(&mut bytes, offset).map_err(failed)?;
        Ok(bytes)
    }

    fn floor(&self) -> Result<Vec<f64>, EvalError> {
        let bytes = self.read(2, 0..self.identity.rows * self.identity.cols, 8)?;
        Ok(bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect())
    }
}

impl Logits for LogitsFile {
    fn block(&self, row: usize, block: Range<usize>) -> Result<Vec<f32>, EvalError> {
        let vocab = self.identity.vocab;
        let first = row * self.identity.cols;
        let (start, end) = (first + block.start, first + block.end);
        let bytes = self.read(0, start * vocab..end * vocab, 4)?;
        let checksums = self.read(1, start..end, 8)?;
        let stored = checksums.as_chunks().0.par_iter().map(|&b| u64::from_le_bytes(b));
        let found = bytes.par_chunks(vocab * 4).map(checksum);
        if let Some(at) = found.zip(stored).position_first(|(found, stored)| found != stored) {
            let t = block.start + at;
            let found = format!("the logits of row {row}, position {t} are not those that were written");
            return Err(EvalError::DamagedCache { path: self.path.clone(), found });
        }
        Ok(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    fn vocab(&self) -> usize {
        self.identity.vocab
    }
}
