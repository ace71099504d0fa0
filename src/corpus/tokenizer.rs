//! The model's tokenizer together with its rule for the BOS token.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tokenizers::DecoderWrapper;

use super::CorpusError;

/// A tokenizer that puts exactly one BOS in front of a document, or none.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    /// In front of every document.
    bos: Option<u32>,
    /// Put there by the post-processor although the configuration says no.
    unwanted: Option<u32>,
    /// Whether a character of a piece stands for a byte.
    byte_level: bool,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("path", &self.path).field("bos", &self.bos).finish_non_exhaustive()
    }
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
    let byte_level = inner.get_decoder().is_some_and(is_byte_level);
    Ok(Tokenizer { inner, path, bos, unwanted, byte_level })
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

    /// Bytes of text that a token stands for: none for a special token, one for each character of a
    /// byte-level piece and for a byte token such as `<0x0A>`, else its text in UTF-8 with `▁` as a
    /// space. A space that a tokenizer puts in front of a text counts.
    pub fn text_bytes(&self, id: u32) -> usize {
        let Some(token) = self.inner.id_to_token(id) else { return 0 };
        if let Some(added) = self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id) {
            return if added.special { 0 } else { added.content.len() };
        }
        if self.byte_level {
            return token.chars().count();
        }
        let is_byte = token.len() == "<0x00>".len() && token.starts_with("<0x") && token.ends_with('>');
        if is_byte { 1 } else { token.replace('▁', " ").len() }
    }

    /// The ids below `vocab` that stand for plain pieces of text, neither special nor added, in
    /// ascending order. Ids need not be without gaps.
    pub(super) fn text_ids(&self, vocab: usize) -> Vec<u32> {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let plain = |id: &u32| (*id as usize) < vocab && !added.contains_key(id);
        let mut ids: Vec<u32> = self.inner.get_vocab(false).into_values().filter(plain).collect();
        ids.sort_unstable();
        ids
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

fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteLevel(_) => true,
        DecoderWrapper::Sequence(parts) => parts.get_decoders().iter().any(is_byte_level),
        _ => false,
    }
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
