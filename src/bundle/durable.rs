//! Files that are either whole or absent.
//!
//! A file is written under a temporary name in its own folder, synced, renamed, and the folder is
//! synced. The temporary name is fixed (`.NAME.tmp`), so what a kill left is overwritten by the
//! next attempt and nothing piles up; it never ends in `.safetensors`, which loaders glob.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::BundleError;
use super::fault;

const BUFFER_BYTES: usize = 1 << 20;

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub bytes: u64,
    /// Lower-case hexadecimal.
    pub sha256: String,
}

/// Where the content of a durable file goes: counted and hashed on its way.
pub struct Sink {
    file: BufWriter<File>,
    hasher: Sha256,
    bytes: u64,
}

impl Write for Sink {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let taken = self.file.write(data)?;
        self.hasher.update(&data[..taken]);
        self.bytes += taken as u64;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes the file at `path` with `fill`. Whatever fails, no file of that name is left, or the
/// one that was there is left as it was.
pub fn write(path: &Path, fill: impl FnOnce(&mut Sink) -> io::Result<()>) -> Result<Written, BundleError> {
    write_sized(path, 0, |sink| fill(sink).map_err(BundleError::io("write", path)))
}

/// As [`write()`], for content of `size_bytes` (used to say how much space is needed) that can
/// itself be unreadable.
pub fn write_sized(
    path: &Path,
    size_bytes: u64,
    fill: impl FnOnce(&mut Sink) -> Result<(), BundleError>,
) -> Result<Written, BundleError> {
    let temporary = temporary(path);
    let mut reached = 0;
    write_temporary(path, &temporary, fill, &mut reached).map_err(|error| {
        // The temporary file is useless; that it cannot be removed is not worth a second error.
        let _ = fs::remove_file(&temporary);
        with_space(error, path, size_bytes.max(reached))
    })
}

fn write_temporary(
    path: &Path,
    temporary: &Path,
    fill: impl FnOnce(&mut Sink) -> Result<(), BundleError>,
    reached: &mut u64,
) -> Result<Written, BundleError> {
    let failed = |action| BundleError::io(action, path);
    fault::step().map_err(failed("write"))?;
    let file = File::create(temporary).map_err(failed("write"))?;
    let file = BufWriter::with_capacity(BUFFER_BYTES, file);
    let mut sink = Sink { file, hasher: Sha256::new(), bytes: 0 };
    let filled = fill(&mut sink);
    *reached = sink.bytes;
    filled?;
    let Sink { file, hasher, bytes } = sink;
    let file = file.into_inner().map_err(|e| failed("write")(e.into_error()))?;
    fault::step_leaving(|| drop(file.set_len(bytes / 2))).map_err(failed("write"))?;
    file.sync_all().map_err(failed("write"))?;
    drop(file);
    fault::step().map_err(failed("write"))?;
    fs::rename(temporary, path).map_err(failed("rename"))?;
    fault::step().map_err(failed("write"))?;
    sync_parent(path)?;
    Ok(Written { bytes, sha256: hex(&hasher.finalize()) })
}

/// Replaces a "disk full" by an error that says how much was needed and how much there is.
/// A failure to read something else while writing names that other file already.
pub(super) fn with_space(error: BundleError, path: &Path, needed_bytes: u64) -> BundleError {
    match error {
        BundleError::Io { path: at, source, .. } if at == path && is_full(&source) => {
            let free_bytes = path.parent().map_or(0, free_bytes);
            BundleError::NoSpace { path: at, needed_bytes, free_bytes, source }
        }
        other => other,
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Bytes an unprivileged process can still write in `dir`; 0 if that cannot be told.
fn free_bytes(dir: &Path) -> u64 {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    rustix::fs::statvfs(dir).map_or(0, |s| s.f_bavail.saturating_mul(s.f_frsize))
}

/// The name under which `path` is written before it is renamed.
pub(super) fn temporary(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".tmp");
    path.with_file_name(name)
}

/// Makes the names in the folder of `path` durable.
pub(super) fn sync_parent(path: &Path) -> Result<(), BundleError> {
    match path.parent() {
        Some(dir) if dir.as_os_str().is_empty() => sync_dir(Path::new(".")),
        Some(dir) => sync_dir(dir),
        None => Ok(()),
    }
}

/// Makes the names in `dir` durable.
pub(super) fn sync_dir(dir: &Path) -> Result<(), BundleError> {
    let synced = File::open(dir).and_then(|d| d.sync_all());
    synced.map_err(BundleError::io("sync folder", dir))
}

/// Length and sha256 of a file, read in pieces.
pub fn digest(path: &Path) -> Result<Written, BundleError> {
    let mut hasher = Hashing(Sha256::new());
    let bytes = File::open(path)
        .and_then(|mut file| io::copy(&mut file, &mut hasher))
        .map_err(BundleError::io("read", path))?;
    Ok(Written { bytes, sha256: hex(&hasher.0.finalize()) })
}

/// Length and sha256 of bytes in memory.
pub(super) fn digest_bytes(bytes: &[u8]) -> Written {
    Written { bytes: bytes.len() as u64, sha256: hex(&Sha256::digest(bytes)) }
}

struct Hashing(Sha256);

impl Write for Hashing {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.update(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
