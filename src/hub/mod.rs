//! The Hugging Face Hub: repositories, the standard cache on disk, downloads and uploads.
//!
//! The only user of the crate hf-hub, which speaks for what repositories are (revisions, trees,
//! creation, branches). Transfers are here: hf-hub 1.0 neither goes on with a broken download, nor
//! checks what it got, nor honours `Retry-After`, and puts large files into a commit's body where
//! the Hub does not offer its Xet storage. Downloads are plain ranges of `resolve`, uploads Git LFS.
//!
//! Nothing here reads the environment: [`Config`] says everything. One [`Patience`] holds for every
//! request: 429, 5xx and lost connections are tried again, 401, 403 and 404 never.

mod cache;
mod download;
mod error;
mod http;
mod name;
mod remote;

use std::path::PathBuf;

pub use error::HubError;
pub use http::Patience;
pub use name::{RepoId, Source};
pub use remote::{Card, RemoteFile, Snapshot};

use cache::Cache;
use http::Http;

pub const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
pub const DEFAULT_REVISION: &str = "main";

/// A secret that no message and no log shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// `None` if nothing but white space is there.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    fn secret(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Which Hub, who asks, and where files are kept.
#[derive(Clone, Debug)]
pub struct Config {
    /// Such as [`DEFAULT_ENDPOINT`].
    pub endpoint: String,
    /// Folder of the standard cache, `HF_HUB_CACHE` by custom.
    pub cache: PathBuf,
    pub token: Option<Token>,
    /// Only the cache is asked.
    pub offline: bool,
    pub user_agent: String,
    pub patience: Patience,
}

/// A Hub and its cache on this machine.
pub struct Hub {
    client: hf_hub::HFClientSync,
    http: Http,
    cache: Cache,
    offline: bool,
}

impl Hub {
    /// Asks nothing yet.
    ///
    /// # Errors
    /// An endpoint that is no URL, a token or user agent that no header can hold.
    pub fn new(config: Config) -> Result<Self, HubError> {
        /// hf-hub looks for a token in the environment if it gets none. One that no header can hold
        /// is never sent.
        const NO_TOKEN: &str = "\n";
        let endpoint = config.endpoint.trim_end_matches('/').to_owned();
        let client = hf_hub::HFClientBuilder::new()
            .endpoint(&endpoint)
            .token(config.token.as_ref().map_or(NO_TOKEN, Token::secret))
            .user_agent(&config.user_agent)
            .cache_dir(&config.cache)
            .retry_max_attempts(0)
            .build_sync()
            .map_err(|source| HubError::Endpoint { endpoint: endpoint.clone(), source: Box::new(source) })?;
        let http = Http::new(endpoint, &config)?;
        Ok(Self { client, http, cache: Cache::new(config.cache), offline: config.offline })
    }

    fn online(&self, what: &str) -> Result<(), HubError> {
        match self.offline {
            true => Err(HubError::Offline { what: what.to_owned() }),
            false => Ok(()),
        }
    }
}
