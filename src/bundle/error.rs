//! What can go wrong with a job, its files and a bundle.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::format::FormatError;
use crate::source::SourceError;

/// What can go wrong with a job, its files and a bundle.
#[derive(Debug, Error)]
pub enum BundleError {
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("no space for {}: {needed_bytes} bytes needed, {free_bytes} available", path.display())]
    NoSpace { path: PathBuf, needed_bytes: u64, free_bytes: u64, source: io::Error },
    #[error("{} is not valid JSON of the expected form", path.display())]
    Json { path: PathBuf, source: serde_json::Error },

    #[error("{} cannot be an output folder: it has no name or coincides with the work folder", path.display())]
    OutputPath { path: PathBuf },
    #[error(
        "{} cannot be used: it coincides with the source folder {}, lies in it, or holds it",
        dir.display(),
        source_dir.display()
    )]
    SourceInTheWay { dir: PathBuf, source_dir: PathBuf },
    #[error("{} is a link to nothing", path.display())]
    DanglingLink { path: PathBuf, source: io::Error },
    #[error("{} cannot be written into, so {} cannot appear there", dir.display(), out.display())]
    NotWritable { dir: PathBuf, out: PathBuf, source: io::Error },
    #[error("output folder {} already holds \"{file}\"", dir.display())]
    OutputOccupied { dir: PathBuf, file: String },
    #[error("{} holds a bundle made with another {field}: expected {expected}, found {found}", dir.display())]
    OutputDiffers { dir: PathBuf, field: String, expected: String, found: String },
    #[error("{} holds \"{file}\", which is no part of a bundle", dir.display())]
    ForeignFile { dir: PathBuf, file: String },

    #[error("another process is at work in {}", dir.display())]
    Busy { dir: PathBuf },
    #[error(
        "{} was started with another {field}: expected {expected}, found {found}; its work cannot be continued",
        path.display()
    )]
    RecipeChanged { path: PathBuf, field: String, expected: String, found: String },
    #[error("{}, line {line}: {problem}", path.display())]
    JournalLine { path: PathBuf, line: usize, problem: String },
    #[error("committed file {} is damaged: expected {expected}, found {found}", path.display())]
    UnitDamaged { path: PathBuf, expected: String, found: String },
    #[error("units are committed in order: expected unit {expected}, found {found}")]
    UnitOrder { expected: usize, found: usize },

    #[error("{}: header of {found} bytes is not readable: {problem}", path.display())]
    Header { path: PathBuf, found: u64, problem: String },
    #[error("{} has the wrong length: expected {expected} bytes, found {found}", path.display())]
    FileLength { path: PathBuf, expected: u64, found: u64 },
    #[error("{}: tensor \"{tensor}\": expected {expected}, found {found}", path.display())]
    Tensor { path: PathBuf, tensor: String, expected: String, found: String },
    #[error("tensor \"{tensor}\" is missing from {}", path.display())]
    MissingTensor { path: PathBuf, tensor: String },
    #[error("tensor \"{tensor}\" occurs twice, the second time in {}", path.display())]
    DuplicateTensor { path: PathBuf, tensor: String },
    #[error("module \"{module}\" is neither quantized nor passed through")]
    EmptyModule { module: String },
    #[error("tensor \"{tensor}\" belongs to no module of the bundle")]
    Unplaced { tensor: String },
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl BundleError {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(super) fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Json { path, source }
    }

    /// What the user can do about it, where that is not obvious.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::NoSpace { .. } => "free some space and run the same command again; it resumes",
            Self::OutputOccupied { .. } | Self::OutputDiffers { .. } => {
                "choose another output folder, or replace this one with --overwrite"
            }
            Self::DanglingLink { .. } => "remove the link, or create the folder that it points to",
            Self::NotWritable { .. } => "choose another output folder",
            Self::Busy { .. } => "wait until it is done, or choose another output folder",
            Self::SourceInTheWay { .. } => "choose another output or work folder",
            Self::ForeignFile { .. } => "move that file away, or choose another output folder",
            Self::RecipeChanged { .. } => {
                "restore the earlier setting, start over with --overwrite, or use another --work folder"
            }
            Self::UnitDamaged { .. } | Self::JournalLine { .. } => {
                "start over with --overwrite, or use another --work folder"
            }
            _ => return None,
        })
    }
}
