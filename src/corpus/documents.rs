//! The texts of a file one by one.

use std::path::Path;

use super::{CorpusError, text};

/// The documents of a file: the `"text"` of every line of a JSON lines file, or every line of a plain
/// text. Lines of white space and empty texts are passed over.
pub fn documents(file: &Path) -> Result<Vec<String>, CorpusError> {
    let is_json_lines = text::is_json_lines(file)?;
    let bytes = std::fs::read(file).map_err(|source| CorpusError::Read { path: file.into(), source })?;
    let content = text::valid_prefix(file, &bytes, true)?;
    let content = content.strip_prefix('\u{feff}').unwrap_or(content);
    let mut documents = Vec::new();
    for (at, line) in content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        documents.push(match is_json_lines {
            true => text::document(line.as_bytes()).map_err(|found| CorpusError::Line {
                path: file.into(),
                line: at + 1,
                found,
            })?,
            false => line.to_owned(),
        });
    }
    documents.retain(|document| !document.is_empty());
    Ok(documents)
}
