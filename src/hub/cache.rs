//! The standard cache: `models--OWNER--NAME/{blobs,snapshots,refs}`, as other clients keep it.
//!
//! A blob is named by its ETag; a snapshot is a folder of links to blobs, named by its commit; a ref
//! is a file that holds a commit. Beside them, `listings/COMMIT.json` remembers which files the
//! commit has, so that without the Hub a complete snapshot is told from a part of one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::name::is_commit;
use super::{HubError, RemoteFile, RepoId, Snapshot};

pub(super) struct Cache {
    root: PathBuf,
}

impl Cache {
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    fn folder(&self, repo: &RepoId) -> PathBuf {
        self.root.join(folder_name(repo))
    }

    pub fn snapshot_dir(&self, snapshot: &Snapshot) -> PathBuf {
        self.folder(&snapshot.repo).join("snapshots").join(&snapshot.commit)
    }

    /// Where the file is, or would be.
    pub fn path(&self, snapshot: &Snapshot, file: &RemoteFile) -> PathBuf {
        self.snapshot_dir(snapshot).join(&file.name)
    }

    /// Whether the whole file is here; a blob under its name is whole.
    pub fn holds(&self, snapshot: &Snapshot, file: &RemoteFile) -> bool {
        self.path(snapshot, file).is_file() || self.blob(&snapshot.repo, file).is_file()
    }

    pub fn blob(&self, repo: &RepoId, file: &RemoteFile) -> PathBuf {
        self.folder(repo).join("blobs").join(file.etag())
    }

    /// Where the first bytes of a blob are, before it is whole.
    pub fn incomplete(&self, repo: &RepoId, file: &RemoteFile) -> PathBuf {
        self.folder(repo).join("blobs").join(format!("{}.incomplete", file.etag()))
    }

    /// Keeps other processes, of other programs too, away from a blob until the file is dropped.
    pub fn lock(&self, repo: &RepoId, file: &RemoteFile) -> Result<File, HubError> {
        let dir = self.root.join(".locks").join(folder_name(repo));
        fs::create_dir_all(&dir).map_err(HubError::io("create", &dir))?;
        let path = dir.join(format!("{}.lock", file.etag()));
        let lock = File::create(&path).map_err(HubError::io("create", &path))?;
        match lock.lock() {
            Err(error) if error.kind() != io::ErrorKind::Unsupported => {
                Err(HubError::io("lock", &path)(error))
            }
            _ => Ok(lock),
        }
    }

    /// Puts the blob into the snapshot and returns its path there.
    pub fn link(&self, snapshot: &Snapshot, file: &RemoteFile) -> Result<PathBuf, HubError> {
        let path = self.path(snapshot, file);
        let io = |action| HubError::io(action, &path);
        fs::create_dir_all(path.parent().unwrap_or(&self.root)).map_err(io("create the folder of"))?;
        // From the folder of the snapshot, one step up for every folder in the name.
        let up = "../".repeat(2 + file.name.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", file.etag()));
        match std::os::unix::fs::symlink(&target, &path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_file() => Ok(path),
            // A link to nothing: its blob was removed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_file(&path).map_err(io("replace"))?;
                std::os::unix::fs::symlink(&target, &path).map_err(io("link"))?;
                Ok(path)
            }
            done => done.map(|()| path.clone()).map_err(io("link")),
        }
    }

    fn ref_path(&self, repo: &RepoId, revision: &str) -> PathBuf {
        self.folder(repo).join("refs").join(revision)
    }

    fn listing_path(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.folder(repo).join("listings").join(format!("{commit}.json"))
    }

    /// Remembers what a revision is, and which files it has.
    pub fn list(&self, snapshot: &Snapshot) -> Result<(), HubError> {
        let listing = serde_json::to_vec(&snapshot.files)
            .map_err(|error| HubError::Answer { problem: error.to_string() })?;
        write(&self.listing_path(&snapshot.repo, &snapshot.commit), &listing)?;
        if is_commit(&snapshot.revision) {
            return Ok(());
        }
        write(&self.ref_path(&snapshot.repo, &snapshot.revision), snapshot.commit.as_bytes())
    }

    pub fn is_listed(&self, snapshot: &Snapshot) -> bool {
        self.listing_path(&snapshot.repo, &snapshot.commit).is_file()
    }

    /// The revision as the cache knows it, by its listing, or by what is in its folder if another
    /// client put it there.
    pub fn snapshot(&self, repo: &RepoId, revision: &str) -> Result<Option<Snapshot>, HubError> {
        let commit = match is_commit(revision) {
            true => revision.to_owned(),
            false => match fs::read_to_string(self.ref_path(repo, revision)) {
                Ok(text) if is_commit(text.trim()) => text.trim().to_owned(),
                _ => return Ok(None),
            },
        };
        let (repo, revision) = (repo.clone(), revision.to_owned());
        let mut snapshot = Snapshot { repo, revision, commit, files: Vec::new() };
        let listing = fs::read(self.listing_path(&snapshot.repo, &snapshot.commit)).ok();
        snapshot.files = match listing.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            Some(files) => files,
            None => {
                let dir = self.snapshot_dir(&snapshot);
                let found = if dir.is_dir() { found(&dir, "") } else { Ok(Vec::new()) };
                found.map_err(HubError::io("list", &dir))?
            }
        };
        Ok((!snapshot.files.is_empty()).then_some(snapshot))
    }
}

fn folder_name(repo: &RepoId) -> String {
    format!("models--{}--{}", repo.owner, repo.name)
}

/// The whole files below `dir`; their blob's name is their ETag.
fn found(dir: &Path, prefix: &str) -> io::Result<Vec<RemoteFile>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let Some(part) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let name = format!("{prefix}{part}");
        if path.is_dir() {
            files.extend(found(&path, &format!("{name}/"))?);
        } else if let (Ok(meta), Ok(blob)) = (fs::metadata(&path), fs::canonicalize(&path)) {
            let etag = blob.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let sha256 = (etag.len() == 64).then(|| etag.clone());
            files.push(RemoteFile { name, bytes: meta.len(), sha256, git_oid: etag });
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Whole or not at all: other processes read it.
fn write(path: &Path, content: &[u8]) -> Result<(), HubError> {
    let dir = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir).map_err(HubError::io("create", dir))?;
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    fs::write(&temporary, content).map_err(HubError::io("write", &temporary))?;
    fs::rename(&temporary, path).map_err(HubError::io("write", path))
}
