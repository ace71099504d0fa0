//! Packing of trellis states: one MSB-first bit stream per tile, a ring.

use super::Bits;

/// 16-bit words of the packed form of `len` weights.
pub fn packed_len(bits: Bits, len: usize) -> usize {
    bits.stream_bits(len).div_ceil(32) * 2
}

/// Packs the states of one tile: the new bits of position `i` are the low `bits.step(i)` bits of
/// `states[i]`; they form one stream whose first bit is the top bit of the first u32 word. The
/// words are stored little-endian, here as pairs of u16.
pub fn pack(states: &[u16], bits: Bits) -> Vec<u16> {
    let mut words = vec![0u32; packed_len(bits, states.len()) / 2];
    let mut at = 0;
    for (i, &state) in states.iter().enumerate() {
        let width = bits.step(i);
        for b in (0..width).rev() {
            words[at / 32] |= (u32::from(state >> b) & 1) << (31 - at % 32);
            at += 1;
        }
    }
    words.iter().flat_map(|w| [*w as u16, (*w >> 16) as u16]).collect()
}

/// The states of a packed tile of `len` weights: `states[i]` is the 16 stream bits that end where
/// the bits of position `i` end, on the ring.
///
/// # Panics
/// If `packed.len() != packed_len(bits, len)`.
pub fn unpack(packed: &[u16], bits: Bits, len: usize) -> Vec<u16> {
    assert_eq!(packed.len(), packed_len(bits, len), "packed tile of the wrong length");
    let total = bits.stream_bits(len);
    let stream_bit = |at: usize| {
        let word = u32::from(packed[at / 32 * 2]) | u32::from(packed[at / 32 * 2 + 1]) << 16;
        (word >> (31 - at % 32)) as u16 & 1
    };
    let mut window = (total - 16..total).fold(0u16, |w, at| w << 1 | stream_bit(at));
    let mut at = 0;
    (0..len)
        .map(|i| {
            for _ in 0..bits.step(i) {
                window = window << 1 | stream_bit(at);
                at += 1;
            }
            window
        })
        .collect()
}

/// Whether consecutive windows overlap in all but their new bits, around the ring.
pub fn is_tail_biting(states: &[u16], bits: Bits) -> bool {
    let len = states.len();
    (0..len).all(|i| {
        let previous = states[(i + len - 1) % len];
        let width = bits.step(i);
        let new_bits = states[i] & ((1u32 << width) - 1) as u16;
        states[i] == (u32::from(previous) << width) as u16 | new_bits
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_of_random_bits_survives_packing() {
        for bits in Bits::ALL {
            let mut seed = 1u32;
            let words: Vec<u16> = (0..packed_len(bits, 256))
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 16) as u16
                })
                .collect();
            let states = unpack(&words, bits, 256);
            assert!(is_tail_biting(&states, bits));
            assert_eq!(pack(&states, bits), words, "{bits} bits");
            let mut broken = states.clone();
            broken[17] ^= 0x8000;
            assert!(!is_tail_biting(&broken, bits));
        }
    }
}
//! A dense row-major f32 matrix.

/// A dense matrix, row-major, f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    rows: usize,
    cols: usize,
    data: Vec<f32>,
}

impl Matrix {
    /// A `rows x cols` matrix of zeros.
    pub fn zeros(rows: usize, cols: usize) -> Self {
        Self::from_vec(rows, cols, vec![0.0; rows * cols])
    }

    /// Takes row-major data.
    ///
    /// # Panics
    /// If `data.len() != rows * cols`: a programming error, never a property of a file.
    pub fn from_vec(rows: usize, cols: usize, data: Vec<f32>) -> Self {
        assert_eq!(data.len(), rows * cols, "matrix data does not fill {rows} x {cols}");
        Self { rows, cols, data }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn data(&self) -> &[f32] {
        &self.data
    }

    pub fn data_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }

    pub fn into_vec(self) -> Vec<f32> {
        self.data
    }

    pub fn row(&self, i: usize) -> &[f32] {
        &self.data[i * self.cols..(i + 1) * self.cols]
    }

    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.cols..(i + 1) * self.cols]
    }

    pub fn get(&self, i: usize, j: usize) -> f32 {
        self.data[i * self.cols + j]
    }

    pub fn set(&mut self, i: usize, j: usize, value: f32) {
        self.data[i * self.cols + j] = value;
    }

    /// The transpose, blocked so that both sides stay in cache.
    pub fn transpose(&self) -> Self {
        const BLOCK: usize = 32;
        let mut out = Self::zeros(self.cols, self.rows);
        for i0 in (0..self.rows).step_by(BLOCK) {
            for j0 in (0..self.cols).step_by(BLOCK) {
                for i in i0..(i0 + BLOCK).min(self.rows) {
                    for j in j0..(j0 + BLOCK).min(self.cols) {
                        out.data[j * self.rows + i] = self.data[i * self.cols + j];
                    }
                }
            }
        }
        out
    }

    /// The matrix with zero rows and columns appended up to `rows x cols`.
    pub fn padded(self, rows: usize, cols: usize) -> Self {
        if (rows, cols) == (self.rows, self.cols) {
            return self;
        }
        assert!(rows >= self.rows && cols >= self.cols, "padding cannot shrink a matrix");
        let mut out = Self::zeros(rows, cols);
        for i in 0..self.rows {
            out.row_mut(i)[..self.cols].copy_from_slice(self.row(i));
        }
        out
    }

    /// The upper-left `rows x cols` part.
    pub fn cropped(self, rows: usize, cols: usize) -> Self {
        if (rows, cols) == (self.rows, self.cols) {
            return self;
        }
        let mut data = Vec::with_capacity(rows * cols);
        for i in 0..rows {
            data.extend_from_slice(&self.row(i)[..cols]);
        }
        Self::from_vec(rows, cols, data)
    }

    /// The mean of the diagonal of a square matrix, summed in f64.
    pub fn diagonal_mean(&self) -> f64 {
        self.diagonal().map(f64::from).sum::<f64>() / self.rows as f64
    }

    pub fn diagonal(&self) -> impl Iterator<Item = f32> + '_ {
        (0..self.rows).map(|i| self.get(i, i))
    }

    pub fn add_to_diagonal(&mut self, value: f32) {
        for i in 0..self.rows {
            self.data[i * self.cols + i] += value;
        }
    }
}
//! Plain text and JSON lines to token ids.
//!
//! A long text is not encoded to its end when its beginning has enough tokens. That must not change
//! the tokens that are used. A cut can change tokens only near it: pre-tokenizers split from left
//! to right and look at most one run of white space ahead, and merges stay inside a piece, or,
//! without a pre-tokenizer, cross a boundary between words only where the vocabulary has a token
//! that does. So the text is cut between two words and [`MARGIN_TOKENS`] tokens before the cut are
//! never used.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::Value;

use super::{CorpusError, Tokenizer};

/// Tokens in front of a cut that its neighbourhood could have changed, with much to spare.
const MARGIN_TOKENS: usize = 2048;

/// First guess of the text that a token takes; more is read where that was too little.
const BYTES_PER_TOKEN: usize = 8;

/// Token ids of a plain text: at least `need` of them, or all where it has fewer.
pub(super) fn plain(tokenizer: &Tokenizer, file: &Path, need: usize) -> Result<Vec<u32>, CorpusError> {
    let read_error = |source| CorpusError::Read { path: file.into(), source };
    let mut reader = File::open(file).map_err(read_error)?;
    let mut bytes = Vec::new();
    let mut want = first_guess(need);
    loop {
        let missing = want.saturating_sub(bytes.len()) as u64;
        reader.by_ref().take(missing).read_to_end(&mut bytes).map_err(read_error)?;
        let complete = bytes.len() < want;
        let text = valid_prefix(file, &bytes, complete)?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if complete {
            return tokenizer.encode(text);
        }
        let ids = tokenizer.encode(between_words(text))?;
        if ids.len() >= need + MARGIN_TOKENS {
            return Ok(ids);
        }
        want = want.saturating_mul(2);
    }
}

/// Token ids of the `"text"` of every line, joined: at least `need` of them, or all where there
/// are fewer. Lines of white space and empty texts are passed over.
pub(super) fn json_lines(tokenizer: &Tokenizer, file: &Path, need: usize) -> Result<Vec<u32>, CorpusError> {
    let read_error = |source| CorpusError::Read { path: file.into(), source };
    let mut reader = BufReader::new(File::open(file).map_err(read_error)?);
    let (mut ids, mut line, mut number) = (Vec::new(), Vec::new(), 0);
    while ids.len() < need {
        line.clear();
        number += 1;
        if reader.read_until(b'\n', &mut line).map_err(read_error)? == 0 {
            break;
        }
        let content = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&line);
        if content.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let document = document(content)
            .map_err(|found| CorpusError::Line { path: file.into(), line: number, found })?;
        if !document.is_empty() {
            ids.extend(beginning(tokenizer, &document, need - ids.len())?);
        }
    }
    Ok(ids)
}

/// Whether the first JSON value of a file is an object with a `"text"` and no `"rows"`.
pub(super) fn is_json_lines(file: &Path) -> Result<bool, CorpusError> {
    let reader = File::open(file).map_err(|source| CorpusError::Read { path: file.into(), source })?;
    let mut line = String::new();
    // A file that is not text is refused by whoever reads it next.
    let first = BufReader::new(reader).read_line(&mut line).ok().and_then(|_| {
        serde_json::from_str::<Value>(line.trim_start_matches('\u{feff}')).ok()
    });
    Ok(first.is_some_and(|value| value.get("text").is_some() && value.get("rows").is_none()))
}

/// Token ids of a document already in memory, at least `need` or all.
fn beginning(tokenizer: &Tokenizer, document: &str, need: usize) -> Result<Vec<u32>, CorpusError> {
    let mut want = first_guess(need);
    while want < document.len() {
        let end = (want..document.len()).find(|&at| document.is_char_boundary(at)).unwrap_or(document.len());
        let ids = tokenizer.encode(between_words(&document[..end]))?;
        if ids.len() >= need + MARGIN_TOKENS {
            return Ok(ids);
        }
        want = want.saturating_mul(2);
    }
    tokenizer.encode(document)
}

fn first_guess(need: usize) -> usize {
    need.saturating_add(MARGIN_TOKENS).saturating_mul(BYTES_PER_TOKEN)
}

fn document(line: &[u8]) -> Result<String, String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| format!("no JSON ({error})"))?;
    let Value::Object(mut object) = value else {
        return Err("another JSON value".into());
    };
    match object.remove("text") {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err("a \"text\" that is no string".into()),
        None if object.is_empty() => Err("an empty object".into()),
        None => Err(format!("only {}", object.keys().map(|k| format!("\"{k}\"")).collect::<Vec<_>>().join(", "))),
    }
}

/// The text without a character that a cut has split; other faults are errors.
fn valid_prefix<'a>(file: &Path, bytes: &'a [u8], complete: bool) -> Result<&'a str, CorpusError> {
    let error = match std::str::from_utf8(bytes) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    let valid = error.valid_up_to();
    if complete || error.error_len().is_some() {
        return Err(CorpusError::Utf8 { path: file.into(), offset: valid });
    }
    std::str::from_utf8(&bytes[..valid]).map_err(|_| CorpusError::Utf8 { path: file.into(), offset: valid })
}

/// The text up to the last boundary of a word followed by one white-space character and another
/// word; a text without such a place is left as it is.
fn between_words(text: &str) -> &str {
    let bytes = text.as_bytes();
    let is_word = |byte: u8| !byte.is_ascii_whitespace();
    let boundary = (1..bytes.len().saturating_sub(1))
        .rev()
        .find(|&at| !is_word(bytes[at]) && is_word(bytes[at - 1]) && is_word(bytes[at + 1]));
    boundary.map_or(text, |at| &text[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_falls_between_two_words() {
        assert_eq!(between_words("one two  three\n\n fo"), "one");
        assert_eq!(between_words("über alles größ"), "über alles");
        assert_eq!(between_words("unbroken"), "unbroken");
        assert_eq!(between_words(""), "");
    }

    #[test]
    fn a_split_character_is_left_out_and_a_broken_one_refused() {
        let file = Path::new("text");
        let bytes = "aß".as_bytes();
        assert_eq!(valid_prefix(file, &bytes[..2], false).ok(), Some("a"));
        assert!(matches!(valid_prefix(file, &bytes[..2], true), Err(CorpusError::Utf8 { offset: 1, .. })));
        assert!(matches!(valid_prefix(file, b"ab\xffc", false), Err(CorpusError::Utf8 { offset: 2, .. })));
    }
}
//! The model's tokenizer together with its rule for the BOS token.

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::CorpusError;

/// A tokenizer that puts exactly one BOS in front of a document, or none.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    /// In front of every document.
    bos: Option<u32>,
    /// Put there by the post-processor although the configuration says no.
    unwanted: Option<u32>,
}

/// Reads `tokenizer.json` and `tokenizer_config.json` of a model folder.
///
/// `add_bos_token` of the configuration decides whether a document gets a BOS; where it is not
/// given, the post-processor in `tokenizer.json` decides. Truncation and padding that a
/// `tokenizer.json` may ask for are switched off: a corpus is cut by its shape alone.
pub fn load_tokenizer(model_dir: &Path) -> Result<Tokenizer, CorpusError> {
    let path = model_dir.join("tokenizer.json");
    let bytes = std::fs::read(&path).map_err(|source| CorpusError::Read { path: path.clone(), source })?;
    let broken = |source| CorpusError::Tokenizer { path: path.clone(), source };
    let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(broken)?;
    inner.with_truncation(None).map_err(broken)?;
    inner.with_padding(None);
    let added = leading_special(&inner).map_err(broken)?;
    let config_path = model_dir.join("tokenizer_config.json");
    let config: Config = read_json(&config_path)?.unwrap_or_default();
    let (bos, unwanted) = match config.add_bos_token {
        Some(true) => (Some(named_bos(&inner, model_dir, &config_path, config.bos_token)?), None),
        Some(false) => (None, added),
        None => (added, None),
    };
    Ok(Tokenizer { inner, path, bos, unwanted })
}

impl Tokenizer {
    /// The token in front of every document, where the tokenizer wants one.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// Number of token ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The `tokenizer.json` this came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Token ids of one document, special tokens included. A BOS that the text itself begins with
    /// counts as the document's: there are never two.
    pub fn encode(&self, document: &str) -> Result<Vec<u32>, CorpusError> {
        let encoding = self
            .inner
            .encode_fast(document, true)
            .map_err(|source| CorpusError::Encode { path: self.path.clone(), source })?;
        let ids = encoding.get_ids();
        Ok(match (self.bos, self.unwanted) {
            (Some(bos), _) => {
                let doubled = ids.iter().take_while(|&&id| id == bos).count();
                std::iter::once(bos).chain(ids[doubled..].iter().copied()).collect()
            }
            (None, Some(unwanted)) if ids.first() == Some(&unwanted) => ids[1..].to_vec(),
            _ => ids.to_vec(),
        })
    }

    /// Text of token ids, special tokens included.
    pub fn decode(&self, ids: &[u32]) -> Result<String, CorpusError> {
        self.inner
            .decode(ids, false)
            .map_err(|source| CorpusError::Encode { path: self.path.clone(), source })
    }

    /// Whether `id` is a plain piece of text: known, and neither special nor added.
    pub(super) fn is_text(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        self.inner.id_to_token(id).is_some() && !added.contains_key(&id)
    }
}

#[derive(Default, Deserialize)]
struct Config {
    add_bos_token: Option<bool>,
    bos_token: Option<Token>,
}

#[derive(Deserialize)]
struct SpecialTokens {
    bos_token: Option<Token>,
}

/// A special token is written as a string or as an object with its flags.
#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Plain(String),
    Flagged { content: String },
}

/// What the post-processor puts in front of a text.
fn leading_special(inner: &tokenizers::Tokenizer) -> tokenizers::Result<Option<u32>> {
    let bare = inner.encode_fast("a", false)?;
    let full = inner.encode_fast("a", true)?;
    let (bare, full) = (bare.get_ids(), full.get_ids());
    let in_front = full.windows(bare.len().max(1)).position(|window| window == bare).unwrap_or(0);
    Ok(full[..in_front].first().copied())
}

/// The id of the BOS token by the name in `tokenizer_config.json` or `special_tokens_map.json`.
fn named_bos(
    inner: &tokenizers::Tokenizer,
    model_dir: &Path,
    config_path: &Path,
    token: Option<Token>,
) -> Result<u32, CorpusError> {
    let error = |found: String| CorpusError::Bos { path: config_path.into(), found };
    let token = match token {
        Some(token) => Some(token),
        None => read_json::<SpecialTokens>(&model_dir.join("special_tokens_map.json"))?
            .and_then(|map| map.bos_token),
    };
    let (Token::Plain(name) | Token::Flagged { content: name }) =
        token.ok_or_else(|| error("none is named".into()))?;
    inner.token_to_id(&name).ok_or_else(|| error(format!("\"{name}\" is not in the vocabulary")))
}

/// `None` where there is no such file.
fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, CorpusError> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|source| CorpusError::Json { path: path.into(), source }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CorpusError::Read { path: path.into(), source }),
    }
}
