//! Why the Hub did not give or take something.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use super::RepoId;

/// Why the Hub did not give or take something. No message holds a token or a signed address.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HubError {
    #[error("\"{found}\" is not the name of a repository: expected owner/name")]
    Name { found: String },
    #[error("\"{found}\" is not the name of a revision")]
    Revision { found: String },
    #[error("{endpoint} cannot be used as the address of a Hub")]
    Endpoint { endpoint: String, source: Box<hf_hub::HFError> },

    #[error(
        "{repo}: the Hub asks who you are (401): the token is missing or wrong, or there is no such repository"
    )]
    Unauthorized { repo: RepoId },
    #[error("{repo} is gated ({status}): its owner has not granted you access")]
    Gated { repo: RepoId, status: u16 },
    #[error("{repo}: your token does not allow this (403): {message}")]
    Forbidden { repo: RepoId, message: String },
    #[error("there is no repository {repo} (404)")]
    NoRepository { repo: RepoId },
    #[error("{repo} has no revision \"{revision}\" (404)")]
    NoRevision { repo: RepoId, revision: String },
    #[error("{repo} has no file \"{file}\" (404)")]
    NoFile { repo: RepoId, file: String },
    #[error("the Hub limits how often you may ask (429){}", wait_text(.retry_after))]
    RateLimited { retry_after: Option<Duration> },
    #[error("the Hub has a fault of its own ({status})")]
    Server { status: u16, retry_after: Option<Duration> },
    #[error("the connection to the Hub failed")]
    Connection { source: Box<reqwest::Error> },
    #[error("{file} broke off: {found} of {expected} bytes came")]
    BrokenOff { file: String, expected: u64, found: u64 },
    #[error("{file} is not what the Hub says it is: expected {expected}, found {found}")]
    Checksum { file: String, expected: String, found: String },
    #[error("{repo}: the Hub refused ({status}): {message}")]
    Refused { repo: RepoId, status: u16, message: String },
    #[error("the Hub's answer cannot be understood: {problem}")]
    Answer { problem: String },

    #[error("{what} is not in the cache, and the Hub may not be asked: offline")]
    Offline { what: String },
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

fn wait_text(retry_after: &Option<Duration>) -> String {
    retry_after.map_or(String::new(), |wait| format!(", again in {} s", wait.as_secs()))
}

impl HubError {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// Addresses are taken out: those of storage are signed.
    pub(super) fn connection(source: reqwest::Error) -> Self {
        Self::Connection { source: Box::new(source.without_url()) }
    }

    /// The name of the revision that is not there, known only to who asked.
    pub(super) fn at(self, asked: &str) -> Self {
        match self {
            Self::NoRevision { repo, .. } => Self::NoRevision { repo, revision: asked.to_owned() },
            other => other,
        }
    }

    /// The name of the file that is not there, known only to who asked.
    pub(super) fn of(self, asked: &str) -> Self {
        match self {
            Self::NoFile { repo, .. } => Self::NoFile { repo, file: asked.to_owned() },
            other => other,
        }
    }

    /// Whether the same request can succeed later.
    pub fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::RateLimited { .. } | Self::Server { .. } | Self::Connection { .. } | Self::BrokenOff { .. }
        )
    }

    /// How long the Hub asks to wait.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after } | Self::Server { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// What the user can do about it, where that is not obvious.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::Unauthorized { .. } => "set HF_TOKEN, or store a token with `hf auth login`",
            Self::Gated { .. } => "ask for access on the repository's page, and set HF_TOKEN",
            Self::Forbidden { .. } => "use a token with write access to that owner's repositories",
            Self::NoRepository { .. } => "check the name; a folder needs a path such as ./owner/name",
            Self::RateLimited { .. }
            | Self::Server { .. }
            | Self::Connection { .. }
            | Self::BrokenOff { .. } => "run the same command again later; what was transferred is kept",
            Self::Checksum { .. } => "run the same command again; the damaged file was removed",
            Self::Offline { .. } => "run without --offline and HF_HUB_OFFLINE once",
            _ => return None,
        })
    }
}
