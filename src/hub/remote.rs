//! What a repository holds at a revision.

use hf_hub::HFError;
use hf_hub::{HFRepositorySync, RepoTypeModel};
use reqwest::Method;
use reqwest::blocking::Response;
use reqwest::header::LINK;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::progress::{Event, Observer};

use super::http::{escaped, json, once, status_error};
use super::name::is_commit;
use super::{DEFAULT_REVISION, Hub, HubError, RepoId, Source};

/// The files of a repository at one commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub repo: RepoId,
    /// What was asked for.
    pub revision: String,
    /// What it was at that moment; all that follows uses it.
    pub commit: String,
    /// Sorted by name.
    pub files: Vec<RemoteFile>,
}

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteFile {
    /// Relative to the repository, parts separated by `/`.
    pub name: String,
    pub bytes: u64,
    /// Of a file in large-file storage, lower-case hexadecimal.
    pub sha256: Option<String>,
    /// Git's name of the blob: SHA-1 over `blob LENGTH\0` and the content, or over the pointer of a
    /// file in large-file storage.
    pub git_oid: String,
}

impl RemoteFile {
    /// The name of the file's content in the cache, which is the Hub's ETag of it.
    pub fn etag(&self) -> &str {
        self.sha256.as_deref().unwrap_or(&self.git_oid)
    }

    /// Names come from elsewhere, and become paths in the cache.
    fn is_safe(&self) -> bool {
        let is_part = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']);
        let is_hash = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
        self.name.split('/').all(is_part) && is_hash(self.etag())
    }
}

impl Snapshot {
    /// The file of that name.
    pub fn file(&self, name: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.name == name)
    }
}

/// What a repository's card and settings say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Card {
    /// The front matter of its `README.md`; null without one.
    pub front_matter: Value,
    /// Whether access has to be asked for.
    pub gated: bool,
}

impl Hub {
    /// Resolves a revision to a commit, once, and lists its files. Offline, and where the Hub cannot
    /// be reached, a revision in the cache serves.
    ///
    /// # Errors
    /// No access, no repository, no revision, no connection and nothing in the cache.
    pub fn resolve(&self, source: &Source, observer: &dyn Observer) -> Result<Snapshot, HubError> {
        let revision = source.revision.as_deref().unwrap_or(DEFAULT_REVISION);
        let cached = self.cache.snapshot(&source.repo, revision)?;
        if self.offline {
            return cached.ok_or_else(|| HubError::Offline { what: format!("{}@{revision}", source.repo) });
        }
        match cached {
            // A commit never changes, so its listing holds for ever.
            Some(snapshot) if is_commit(revision) && self.cache.is_listed(&snapshot) => Ok(snapshot),
            Some(snapshot) => match self.ask(&source.repo, revision) {
                Err(error) if error.is_passing() => {
                    let text = format!("{error}; the cached {}@{} is used", snapshot.repo, snapshot.commit);
                    observer.event(Event::Warning(&text));
                    Ok(snapshot)
                }
                asked => asked,
            },
            None => {
                let ask = || self.ask(&source.repo, revision).map_err(|error| (error, false));
                self.http.patience.run(observer, ask)
            }
        }
    }

    fn ask(&self, repo: &RepoId, revision: &str) -> Result<Snapshot, HubError> {
        let commit = match is_commit(revision) {
            true => revision.to_owned(),
            false => self.commit_of(repo, revision)?,
        };
        let files = self.files_at(repo, &commit)?;
        let snapshot = Snapshot { repo: repo.clone(), revision: revision.to_owned(), commit, files };
        self.cache.list(&snapshot)?;
        Ok(snapshot)
    }

    fn commit_of(&self, repo: &RepoId, revision: &str) -> Result<String, HubError> {
        let asked = self.repository(repo).info().revision(revision).send();
        let info = asked.map_err(|error| hub_error(repo, Some(revision), error))?;
        match info.sha {
            Some(sha) if is_commit(&sha) => Ok(sha),
            found => Err(HubError::Answer { problem: format!("{repo}@{revision}: the commit is {found:?}") }),
        }
    }

    /// The files of a repository at a revision, sorted by name.
    ///
    /// Asked without hf-hub 1.0, which looks for `lfs.sha256` where the Hub's trees say `lfs.oid`.
    pub(super) fn files_at(&self, repo: &RepoId, revision: &str) -> Result<Vec<RemoteFile>, HubError> {
        let first = format!("api/models/{repo}/tree/{}?recursive=true", escaped(revision));
        let mut next = Some(self.http.hub(Method::GET, &first));
        let mut files = Vec::new();
        while let Some(request) = next {
            let response = once(repo, Ok(request)).map_err(|error| error.at(revision))?;
            next = next_page(&response).map(|address| self.http.absolute(Method::GET, &address));
            let entries: Vec<TreeEntry> = json(response)?;
            files.extend(entries.into_iter().filter(|entry| entry.kind == "file").map(RemoteFile::from));
        }
        files.sort_by(|a: &RemoteFile, b| a.name.cmp(&b.name));
        match files.iter().find(|file| !file.is_safe()) {
            Some(file) => Err(HubError::Answer { problem: format!("{repo} lists a file {:?}", file.name) }),
            None => Ok(files),
        }
    }

    /// What the repository says about itself.
    ///
    /// # Errors
    /// As [`Self::resolve`].
    pub fn card(&self, repo: &RepoId, observer: &dyn Observer) -> Result<Card, HubError> {
        self.online(&format!("the card of {repo}"))?;
        let ask = || {
            let asked = self.repository(repo).info().send();
            asked.map_err(|error| (hub_error(repo, None, error), false))
        };
        let info = self.http.patience.run(observer, ask)?;
        Ok(Card {
            front_matter: info.card_data.unwrap_or_default(),
            gated: info.gated.is_some_and(|gated| gated != Value::Bool(false) && !gated.is_null()),
        })
    }

    pub(super) fn repository(&self, repo: &RepoId) -> HFRepositorySync<RepoTypeModel> {
        self.client.model(&repo.owner, &repo.name)
    }
}

#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    oid: String,
    size: u64,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    oid: String,
    size: u64,
}

impl From<TreeEntry> for RemoteFile {
    fn from(entry: TreeEntry) -> Self {
        let bytes = entry.lfs.as_ref().map_or(entry.size, |lfs| lfs.size);
        Self { name: entry.path, bytes, sha256: entry.lfs.map(|lfs| lfs.oid), git_oid: entry.oid }
    }
}

/// `Link: <ADDRESS>; rel="next"`.
fn next_page(response: &Response) -> Option<String> {
    let links = response.headers().get(LINK)?.to_str().ok()?;
    let link = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    Some(link.split_once('<')?.1.split_once('>')?.0.to_owned())
}

/// hf-hub's error in our terms.
pub(super) fn hub_error(repo: &RepoId, revision: Option<&str>, error: HFError) -> HubError {
    let (context, retry_after) = match error {
        HFError::Request { source, .. } => return HubError::connection(source),
        HFError::RateLimited { retry_after, context } => (context, retry_after),
        HFError::Http { context }
        | HFError::AuthRequired { context }
        | HFError::Forbidden { context }
        | HFError::Conflict { context }
        | HFError::RepoNotFound { context: Some(context), .. }
        | HFError::RevisionNotFound { context: Some(context), .. }
        | HFError::EntryNotFound { context: Some(context), .. } => (context, None),
        other => return HubError::Answer { problem: other.to_string() },
    };
    let code = context.error_code.as_deref();
    let error = status_error(repo, context.status, code, context.server_message.clone(), retry_after);
    match revision {
        Some(revision) => error.at(revision),
        None => error,
    }
}
