//! The files of a source that travel with its weights, and the files a bundle consists of.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::BundleError;
use super::durable::{self, Written};

pub const CONFIG: &str = "config.json";
pub const MANIFEST: &str = "quantization_config.json";
pub const INDEX: &str = "model.safetensors.index.json";
pub const PROVENANCE: &str = "exl3-candle.json";
/// Weights of a decision head. They are no shard: no index names them, and their names are their own.
pub const DECISION_HEAD: &str = "head.safetensors";
/// The only folder of a bundle.
const TEMPLATES: &str = "additional_chat_templates";

const NAMES: [&str; 15] = [
    "added_tokens.json",
    "calibration.json",
    "chat_template.json",
    "generation_config.json",
    "image_processor_config.json",
    "judge_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
];
/// Formats of weights and of indices to them, whatever the rest of the name says.
const WEIGHTS: [&str; 10] =
    [".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".safetensors", ".h5", ".onnx", ".index.json"];

/// Whether the source's file `name` is copied: tokenizer, templates, generation and preprocessor
/// settings, a decision head, and the licence.
pub(super) fn is_companion(name: &str) -> bool {
    if name == DECISION_HEAD {
        return true;
    }
    let is_weights = WEIGHTS.iter().any(|suffix| name.ends_with(suffix));
    let is_licence = ["LICENSE", "LICENCE", "NOTICE"].iter().any(|p| name.starts_with(p));
    let is_tokenizer = name.starts_with("tokenizer") || name.ends_with(".tiktoken");
    !is_weights && (NAMES.contains(&name) || is_licence || is_tokenizer || name.ends_with(".jinja"))
}

/// Whether `name`, relative to a bundle, is a file that a bundle can hold.
pub fn is_bundle_file(name: &str) -> bool {
    match name.split_once('/') {
        Some((folder, file)) => folder == TEMPLATES && file.ends_with(".jinja"),
        None => [CONFIG, MANIFEST, INDEX, PROVENANCE].contains(&name) || is_companion(name) || is_shard(name),
    }
}

/// `model.safetensors` or `model-NNNNN-of-NNNNN.safetensors`; a vision tower's begin with `vision`.
fn is_shard(name: &str) -> bool {
    let stem = ["model", "vision"].into_iter().find_map(|stem| name.strip_prefix(stem));
    let Some(stem) = stem.and_then(|n| n.strip_suffix(".safetensors")) else {
        return false;
    };
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let numbered = stem.strip_prefix('-').and_then(|n| n.split_once("-of-"));
    stem.is_empty() || numbered.is_some_and(|(i, count)| is_number(i) && is_number(count))
}

/// The files below `dir` by their names relative to it, sorted, one folder deep; deeper folders
/// count as files. Links are followed: a checkpoint in a cache consists of links.
pub fn list(dir: &Path) -> Result<Vec<String>, BundleError> {
    let mut files = Vec::new();
    for name in names(dir)? {
        match is_dir(&dir.join(&name)) {
            true => files.extend(names(&dir.join(&name))?.into_iter().map(|file| format!("{name}/{file}"))),
            false => files.push(name),
        }
    }
    files.sort();
    Ok(files)
}

fn is_dir(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.is_dir())
}

/// The entries of a folder.
pub(super) fn names(dir: &Path) -> Result<Vec<String>, BundleError> {
    let names = || -> io::Result<Vec<String>> {
        fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    names().map_err(BundleError::io("list", dir))
}

/// The companions in `source` by their relative names.
fn wanted(source: &Path) -> Result<Vec<String>, BundleError> {
    let mut files = list(source)?;
    files.retain(|name| {
        let is_bundle_own = [CONFIG, MANIFEST, INDEX, PROVENANCE].contains(&name.as_str());
        is_bundle_file(name) && !is_bundle_own && !is_shard(name)
    });
    Ok(files)
}

/// Checks that the companions in `source` are files that can be read: they are copied at the very
/// end of a job, when it would be a pity to stop.
pub fn check(source: &Path) -> Result<(), BundleError> {
    wanted(source)?.iter().map(|name| source.join(name)).try_for_each(|path| {
        if !fs::metadata(&path).map_err(BundleError::io("open", &path))?.is_file() {
            let irregular = io::Error::new(io::ErrorKind::InvalidInput, "not a file");
            return Err(BundleError::io("copy", &path)(irregular));
        }
        File::open(&path).map(drop).map_err(BundleError::io("open", &path))
    })
}

/// Copies the companions in `source` to `target` and returns their relative names with what was
/// written.
pub fn copy(source: &Path, target: &Path) -> Result<Vec<(String, Written)>, BundleError> {
    let mut copied = Vec::new();
    for name in wanted(source)? {
        let (from, to) = (source.join(&name), target.join(&name));
        if let Some((folder, _)) = name.split_once('/') {
            let folder = target.join(folder);
            fs::create_dir_all(&folder).map_err(BundleError::io("create", &folder))?;
        }
        let mut file = File::open(&from).map_err(BundleError::io("open", &from))?;
        let bytes = file.metadata().map_err(BundleError::io("read", &from))?.len();
        let written = durable::write_sized(&to, bytes, |sink| {
            io::copy(&mut file, sink).map(drop).map_err(BundleError::io("write", &to))
        })?;
        copied.push((name, written));
    }
    Ok(copied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn companions_travel_and_weights_do_not() {
        for name in [
            "tokenizer.json",
            "tokenizer.model",
            "chat_template.jinja",
            "vocab.json",
            "LICENSE.txt",
            "head.safetensors",
            "judge_config.json",
            "calibration.json",
        ] {
            assert!(is_companion(name), "{name}");
        }
        for name in [
            "README.md",
            ".gitattributes",
            "tokenizer.bin",
            "pytorch_model.bin",
            "model.safetensors",
            "golden_forward.safetensors",
            "model.safetensors.index.json",
            "consolidated.00.pth",
            "x.gguf",
        ] {
            assert!(!is_companion(name), "{name}");
        }
    }

    #[test]
    fn only_the_names_that_are_written_belong_to_a_bundle() {
        for name in
            ["model-00001-of-00003.safetensors", "vision.safetensors", "additional_chat_templates/a.jinja"]
        {
            assert!(is_bundle_file(name), "{name}");
        }
        for name in ["extra.safetensors", "model-1-of-3.safetensors", "notes/a.jinja", "README.md", ".git"] {
            assert!(!is_bundle_file(name), "{name}");
        }
    }
}
