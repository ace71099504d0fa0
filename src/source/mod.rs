//! Checkpoints on disk: a folder with `config.json` and safetensors shards, memory-mapped and never
//! read whole. A bundle is such a folder too.
//!
//! Nothing in the files is trusted: [`open`] checks every header against its file and every index
//! entry against the headers, so a [`TensorRef`] always covers exactly the bytes its shape needs.

mod checkpoint;
mod files;
mod mmap;
mod scan;
mod shard;
mod tensor;

use std::path::PathBuf;

use thiserror::Error;

pub use checkpoint::{Checkpoint, open};
pub use shard::Shard;
pub use tensor::TensorRef;

/// What can be wrong with a checkpoint. Each variant names the file, and the tensor if there is one.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    #[error("cannot read {}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} is no folder with a config.json; expected the folder of a Hugging Face model", dir.display())]
    NoConfig { dir: PathBuf },
    #[error("{} is not valid JSON", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{}: expected {expected}, found {found}", path.display())]
    Structure { path: PathBuf, expected: &'static str, found: String },
    #[error("{} holds no safetensors file; expected model.safetensors, or an index and its shards", dir.display())]
    NoWeights { dir: PathBuf },
    #[error(
        "{} holds {found} safetensors files but no model.safetensors.index.json; add the index, or leave one file",
        dir.display()
    )]
    NoIndex { dir: PathBuf, found: usize },
    #[error("{}: tensor \"{tensor}\" is said to be in \"{shard}\", which is not a plain file name", index.display())]
    ShardName { index: PathBuf, tensor: String, shard: String },
    #[error("{} is missing, though the index puts tensor \"{tensor}\" there; download it again", shard.display())]
    MissingShard { shard: PathBuf, tensor: String },
    #[error("{} is empty (0 bytes); download it again", path.display())]
    EmptyShard { path: PathBuf },
    #[error(
        "{}: the header claims {header_bytes} bytes, but the file has {file_bytes}; it is truncated or no safetensors file",
        path.display()
    )]
    HeaderTooLong { path: PathBuf, header_bytes: u64, file_bytes: u64 },
    #[error(
        "{}: expected {expected_bytes} bytes after its header, found {file_bytes}; it is truncated or was overwritten, download it again",
        path.display()
    )]
    FileSize { path: PathBuf, expected_bytes: u64, file_bytes: u64 },
    #[error("{}: the safetensors header is broken; download the file again", path.display())]
    Header { path: PathBuf, source: safetensors::SafeTensorError },
    #[error("tensor \"{tensor}\" is not in {}, where the index puts it; index and shards do not belong together", shard.display())]
    NotInShard { shard: PathBuf, tensor: String },
    #[error("tensor \"{tensor}\" is in two shards, {} and {}; remove one", first.display(), second.display())]
    DuplicateTensor { tensor: String, first: PathBuf, second: PathBuf },
    #[error("{} has no tensor \"{tensor}\"", dir.display())]
    MissingTensor { dir: PathBuf, tensor: String },
    #[error("{}: tensor \"{tensor}\" is {found}; expected BF16, F16 or F32", path.display())]
    Dtype { path: PathBuf, tensor: String, found: String },
    #[error("{}: tensor \"{tensor}\": expected {expected}, found shape {found:?}", path.display())]
    Shape { path: PathBuf, tensor: String, expected: String, found: Vec<usize> },
    #[error("{}: tensor \"{tensor}\" holds {value} at flat index {index}; its weights must be finite", path.display())]
    NonFinite { path: PathBuf, tensor: String, index: usize, value: f64 },
    #[error("tensor \"{tensor}\" cannot be held by candle")]
    Candle { tensor: String, source: Box<candle_core::Error> },
}
