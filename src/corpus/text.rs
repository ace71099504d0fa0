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
        let document = document(content).map_err(|found| CorpusError::Line {
            path: file.into(),
            line: number,
            found,
        })?;
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
    let first = BufReader::new(reader)
        .read_line(&mut line)
        .ok()
        .and_then(|_| serde_json::from_str::<Value>(line.trim_start_matches('\u{feff}')).ok());
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

/// The `"text"` of a line, or what else it is.
pub(super) fn document(line: &[u8]) -> Result<String, String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| format!("no JSON ({error})"))?;
    let Value::Object(mut object) = value else {
        return Err("another JSON value".into());
    };
    match object.remove("text") {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err("a \"text\" that is no string".into()),
        None if object.is_empty() => Err("an empty object".into()),
        None => {
            Err(format!("only {}", object.keys().map(|k| format!("\"{k}\"")).collect::<Vec<_>>().join(", ")))
        }
    }
}

/// The text without a character that a cut has split; other faults are errors.
pub(super) fn valid_prefix<'a>(file: &Path, bytes: &'a [u8], complete: bool) -> Result<&'a str, CorpusError> {
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
