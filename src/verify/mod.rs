//! Whether a bundle is what it says, and what its source says.
//!
//! Everything that can be checked is checked, whatever has failed before: a report names each
//! fault. Bundles of the reference converter are held to the same rules; what only this program
//! writes (`exl3-candle.json`) is checked where it is there.

mod decode;
mod files;
mod manifest;
mod sources;
mod tensors;

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use thiserror::Error;

use crate::bundle::BundleError;
use crate::source::{self, SourceError};

use sources::Source;
use tensors::Unlisted;

/// Why a bundle could not be looked at. What is wrong with it once it can be is in the report.
#[derive(Debug, Error)]
pub enum VerifyError {
    #[error("the source {} is quantized; expected the checkpoint that the bundle was made from", dir.display())]
    QuantizedSource { dir: PathBuf },
    #[error("{} is not a folder", dir.display())]
    NoFolder { dir: PathBuf },
    #[error("cannot list the bundle")]
    List { source: BundleError },
    #[error("cannot open the source {}", dir.display())]
    Source { dir: PathBuf, source: Box<SourceError> },
}

/// One thing that is not as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// `manifest`, `files`, `shard`, `index`, `tensor_set`, `storage`, `geometry`, `codebook`,
    /// `tail_biting`, `finite`, `pass_through` or `accuracy`.
    pub check: &'static str,
    /// The file, field or tensor.
    pub name: String,
    pub expected: String,
    pub found: String,
}

/// One quantized tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorReport {
    pub key: String,
    pub bits: f64,
    pub codebook: &'static str,
    /// Stored (padded) sizes.
    pub k: usize,
    pub n: usize,
    /// `|decoded - source|_F / |source|_F`; `None` without a source.
    pub rel_frobenius: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VerifyReport {
    /// Number of single checks made.
    pub checks: usize,
    pub failures: Vec<Failure>,
    /// The quantized tensors, by name.
    pub tensors: Vec<TensorReport>,
}

impl VerifyReport {
    pub fn is_ok(&self) -> bool {
        self.failures.is_empty()
    }

    /// One check; returns whether it passed.
    fn check(
        &mut self,
        check: &'static str,
        name: &str,
        passed: bool,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> bool {
        self.checks += 1;
        if !passed {
            let (expected, found) = (expected.to_string(), found.to_string());
            self.failures.push(Failure { check, name: name.to_owned(), expected, found });
        }
        passed
    }

    fn equal<T: PartialEq + fmt::Debug>(&mut self, check: &'static str, name: &str, expected: T, found: T) {
        let passed = expected == found;
        self.check(check, name, passed, format_args!("{expected:?}"), format_args!("{found:?}"));
    }

    /// A check that is done by doing something that can fail.
    fn try_to<T>(
        &mut self,
        check: &'static str,
        name: &str,
        expected: &str,
        result: Result<T, impl std::error::Error>,
    ) -> Option<T> {
        let found = result.as_ref().err().map(chain).unwrap_or_default();
        self.check(check, name, result.is_ok(), expected, found);
        result.ok()
    }
}

/// An error with its causes.
fn chain(error: &impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// Checks the bundle in `bundle`, and against the checkpoint it was made from if that is given.
///
/// # Errors
/// Only if there is no such folder, or the source cannot be opened or is quantized.
pub fn run(bundle: &Path, source: Option<&Path>) -> Result<VerifyReport, VerifyError> {
    if !bundle.is_dir() {
        return Err(VerifyError::NoFolder { dir: bundle.to_owned() });
    }
    let open = |dir: &Path| {
        source::open(dir)
            .map_err(|error| VerifyError::Source { dir: dir.to_owned(), source: Box::new(error) })
    };
    let source = source.map(open).transpose()?;
    if let Some(source) = source.as_ref().filter(|source| !source.config()["quantization_config"].is_null()) {
        return Err(VerifyError::QuantizedSource { dir: source.dir().to_owned() });
    }
    let source = source.as_ref().map(Source::new);
    let mut report = VerifyReport::default();
    let manifest = manifest::check(bundle, &mut report);
    let provenance =
        files::check_hashes(bundle, &mut report).map_err(|source| VerifyError::List { source })?;
    let shards = files::open_shards(bundle, &mut report).map_err(|source| VerifyError::List { source })?;
    files::check_index(bundle, &shards, &mut report);
    let unlisted = if provenance.is_some() { Unlisted::None } else { Unlisted::OfInnerModules };
    tensors::check_storage(&manifest, unlisted, &shards, &mut report);
    for key in tensors::quantized_keys(&manifest, &shards) {
        let Some(linear) = tensors::check_linear(&key, &manifest, &shards, &mut report) else { continue };
        let rel_frobenius = source
            .as_ref()
            .and_then(|source| sources::check_linear(&linear, source, provenance.as_ref(), &mut report));
        report.tensors.push(TensorReport {
            bits: linear.bits.as_f64(),
            codebook: linear.codebook.name(),
            k: linear.k(),
            n: linear.n(),
            key,
            rel_frobenius,
        });
    }
    if let Some(source) = &source {
        sources::check_passthrough(source, &shards, &mut report);
    }
    Ok(report)
}
