//! Files of a repository: whole ones into the cache, or a range of one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use reqwest::header::RANGE;
use reqwest::{Method, StatusCode};
use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::progress::{Event, Observer};

use super::http::{escaped, once};
use super::{Hub, HubError, RemoteFile, Snapshot};

const BUFFER_BYTES: usize = 1 << 20;
/// A progress event for as many bytes.
const STEP_BYTES: u64 = 4 << 20;

impl Hub {
    /// The folder of a snapshot in the cache.
    pub fn snapshot_dir(&self, snapshot: &Snapshot) -> PathBuf {
        self.cache.snapshot_dir(snapshot)
    }

    /// Whether the whole file is in the cache.
    pub fn holds(&self, snapshot: &Snapshot, file: &RemoteFile) -> bool {
        self.cache.holds(snapshot, file)
    }

    /// Brings a file into the cache and returns its path in the snapshot. What an earlier run got of
    /// it is kept; the whole is checked against the Hub's hash before it appears under its name.
    ///
    /// # Errors
    /// No access, no connection for longer than patience lasts, a content that is not what the Hub
    /// says it is, a full disk; offline, a file that is not in the cache.
    pub fn download(
        &self,
        snapshot: &Snapshot,
        file: &RemoteFile,
        observer: &dyn Observer,
    ) -> Result<PathBuf, HubError> {
        if self.cache.path(snapshot, file).is_file() {
            return Ok(self.cache.path(snapshot, file));
        }
        let blob = self.cache.blob(&snapshot.repo, file);
        if !blob.is_file() {
            self.online(&format!("{} of {}@{}", file.name, snapshot.repo, snapshot.commit))?;
            let _lock = self.cache.lock(&snapshot.repo, file)?;
            if !blob.is_file() {
                self.fetch(snapshot, file, &blob, observer)?;
            }
        }
        self.cache.link(snapshot, file)
    }

    /// Removes a file from the cache: its link, and its blob, which other snapshots may share.
    ///
    /// # Errors
    /// A file that cannot be removed.
    pub fn evict(&self, snapshot: &Snapshot, file: &RemoteFile) -> Result<(), HubError> {
        for path in [self.cache.path(snapshot, file), self.cache.blob(&snapshot.repo, file)] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(HubError::io("remove", &path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// `len` bytes of a file from byte `from` on, of the cache if it is there; fewer at its end.
    ///
    /// # Errors
    /// As [`Self::download`].
    pub fn read_range(
        &self,
        snapshot: &Snapshot,
        file: &RemoteFile,
        from: u64,
        len: u64,
        observer: &dyn Observer,
    ) -> Result<Vec<u8>, HubError> {
        let len = len.min(file.bytes.saturating_sub(from));
        if len == 0 {
            return Ok(Vec::new());
        }
        if self.cache.holds(snapshot, file) {
            let path = self.cache.link(snapshot, file)?;
            return read_local(&path, from, len).map_err(HubError::io("read", &path));
        }
        self.online(&format!("{} of {}@{}", file.name, snapshot.repo, snapshot.commit))?;
        self.http
            .patience
            .run(observer, || self.ask_range(snapshot, file, from, len).map_err(|error| (error, false)))
    }

    fn ask_range(
        &self,
        snapshot: &Snapshot,
        file: &RemoteFile,
        from: u64,
        len: u64,
    ) -> Result<Vec<u8>, HubError> {
        let request = self.http.hub(Method::GET, &resolve_path(snapshot, file));
        let request = request.header(RANGE, format!("bytes={from}-{}", from + len - 1));
        let response = once(&snapshot.repo, Ok(request)).map_err(|error| error.of(&file.name))?;
        if response.status() != StatusCode::PARTIAL_CONTENT && (from, len) != (0, file.bytes) {
            return Err(HubError::Answer { problem: format!("{}: the whole file for a range", file.name) });
        }
        let bytes = response.bytes().map_err(HubError::connection)?;
        match bytes.len() as u64 == len {
            true => Ok(bytes.into()),
            false => {
                let (expected, found) = (len, bytes.len() as u64);
                Err(HubError::BrokenOff { file: file.name.clone(), expected, found })
            }
        }
    }

    fn fetch(
        &self,
        snapshot: &Snapshot,
        file: &RemoteFile,
        blob: &Path,
        observer: &dyn Observer,
    ) -> Result<(), HubError> {
        let path = self.cache.incomplete(&snapshot.repo, file);
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(HubError::io("create", dir))?;
        }
        let mut partial = Partial::open(path.clone(), file)?;
        self.http.patience.run(observer, || {
            let before = partial.bytes;
            self.go_on(snapshot, file, &mut partial, observer)
                .map_err(|error| (error.of(&file.name), partial.bytes > before))
        })?;
        let (expected, found) = (file.etag().to_owned(), partial.hash.clone().finish());
        if found != expected {
            fs::remove_file(&path).map_err(HubError::io("remove", &path))?;
            return Err(HubError::Checksum { file: file.name.clone(), expected, found });
        }
        partial.file.sync_all().map_err(HubError::io("write", &path))?;
        fs::rename(&path, blob).map_err(HubError::io("rename", &path))
    }

    /// Asks for what is missing and appends what comes.
    fn go_on(
        &self,
        snapshot: &Snapshot,
        file: &RemoteFile,
        partial: &mut Partial,
        observer: &dyn Observer,
    ) -> Result<(), HubError> {
        if partial.bytes == file.bytes {
            return Ok(());
        }
        let mut request = self.http.hub(Method::GET, &resolve_path(snapshot, file));
        if partial.bytes > 0 {
            request = request.header(RANGE, format!("bytes={}-", partial.bytes));
        }
        let mut response = once(&snapshot.repo, Ok(request))?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            partial.start_over()?;
        }
        let event = |done| observer.event(Event::Transferred { file: &file.name, done, total: file.bytes });
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut shown = partial.bytes;
        event(shown);
        // A body that breaks off is as good as one that ends: both leave the length to tell.
        while let Ok(len @ 1..) = response.read(&mut buffer) {
            partial.append(&buffer[..len])?;
            if partial.bytes - shown >= STEP_BYTES || partial.bytes == file.bytes {
                shown = partial.bytes;
                event(shown);
            }
        }
        match partial.bytes == file.bytes {
            true => Ok(()),
            false => {
                let (expected, found) = (file.bytes, partial.bytes);
                Err(HubError::BrokenOff { file: file.name.clone(), expected, found })
            }
        }
    }
}

fn resolve_path(snapshot: &Snapshot, file: &RemoteFile) -> String {
    let name: Vec<String> = file.name.split('/').map(escaped).collect();
    format!("{}/resolve/{}/{}", snapshot.repo, snapshot.commit, name.join("/"))
}

fn read_local(path: &Path, from: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = vec![0; len as usize];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The first bytes of a file, hashed as they come.
struct Partial {
    file: File,
    path: PathBuf,
    bytes: u64,
    hash: ContentHash,
    empty: ContentHash,
}

impl Partial {
    fn open(path: PathBuf, remote: &RemoteFile) -> Result<Self, HubError> {
        let opened = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let mut file = opened.map_err(HubError::io("open", &path))?;
        let empty = ContentHash::of(remote);
        let mut hash = empty.clone();
        let bytes = io::copy(&mut file, &mut hash).map_err(HubError::io("read", &path))?;
        let mut partial = Self { file, path, bytes, hash, empty };
        if bytes > remote.bytes {
            partial.start_over()?;
        }
        Ok(partial)
    }

    fn start_over(&mut self) -> Result<(), HubError> {
        self.file.set_len(0).map_err(HubError::io("write", &self.path))?;
        (self.bytes, self.hash) = (0, self.empty.clone());
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(HubError::io("write", &self.path))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// The hash that names a blob: SHA-256 in large-file storage, else Git's.
#[derive(Clone)]
enum ContentHash {
    Large(Sha256),
    Git(Sha1),
}

impl ContentHash {
    fn of(file: &RemoteFile) -> Self {
        match file.sha256 {
            Some(_) => Self::Large(Sha256::new()),
            None => Self::Git(Sha1::new().chain_update(format!("blob {}\0", file.bytes))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Large(hash) => hash.update(bytes),
            Self::Git(hash) => hash.update(bytes),
        }
    }

    fn finish(self) -> String {
        match self {
            Self::Large(hash) => hex(&hash.finalize()),
            Self::Git(hash) => hex(&hash.finalize()),
        }
    }
}

impl Write for ContentHash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
