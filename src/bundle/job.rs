//! Opening a job: fresh, resumed or already done, and clearing what belongs to it.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use serde_json::{Map, Value};

use super::companions::{self, is_bundle_file};
use super::journal::{Commit, Journal, first_difference};
use super::provenance::Provenance;
use super::{BundleError, JobSpec, Overwrite, Writer, durable};

const JOURNAL: &str = "journal.jsonl";

/// How far a job has come.
pub enum Opened {
    /// Nothing is committed yet.
    Fresh(Writer),
    /// Some units are committed and undamaged.
    Resumed(Writer),
    /// The output folder holds the finished bundle of this recipe.
    AlreadyDone(PathBuf),
}

/// The folders of a job, absolute.
pub(super) struct Paths {
    pub out: PathBuf,
    pub work: PathBuf,
    /// Where the bundle is put together.
    pub partial: PathBuf,
    /// Where an earlier bundle waits to be removed.
    pub replaced: PathBuf,
}

impl Paths {
    fn new(out: &Path, work: &Path) -> Result<Self, BundleError> {
        let absolute = |path: &Path| std::path::absolute(path).map_err(BundleError::io("find", path));
        let (out, work) = (followed(&absolute(out)?)?, absolute(work)?);
        let refused = || BundleError::OutputPath { path: out.clone() };
        let beside = |suffix| sibling(&out, suffix).ok_or_else(refused);
        let (partial, replaced) = (beside(".partial")?, beside(".replaced")?);
        if [&out, &partial, &replaced].into_iter().any(|dir| work.starts_with(dir)) {
            return Err(refused());
        }
        Ok(Self { out, work, partial, replaced })
    }
}

/// Checks that no folder of a job coincides with its source, lies inside it, or holds it: those
/// folders are cleared and replaced.
pub fn check_apart(source: &Path, out: &Path, work: &Path) -> Result<(), BundleError> {
    let paths = Paths::new(out, work)?;
    let source = resolved(source)?;
    for dir in [&paths.out, &paths.work, &paths.partial, &paths.replaced] {
        let found = resolved(dir)?;
        if found.starts_with(&source) || source.starts_with(&found) {
            return Err(BundleError::SourceInTheWay { dir: dir.clone(), source_dir: source });
        }
    }
    Ok(())
}

/// The folder that a link stands for: bundles are put together beside their folder and renamed,
/// which would replace the link itself.
fn followed(out: &Path) -> Result<PathBuf, BundleError> {
    // Without a trailing slash, which would look behind the link.
    let out: PathBuf = out.components().collect();
    if !out.is_symlink() {
        return Ok(out);
    }
    out.canonicalize().map_err(|source| BundleError::DanglingLink { path: out, source })
}

/// Checks before any work that the bundle can be put beside the output folder in the end. What does
/// not exist yet will be created.
fn check_writable(out: &Path) -> Result<(), BundleError> {
    let Some(dir) = out.ancestors().skip(1).find(|dir| dir.exists()) else { return Ok(()) };
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let access = match dir.is_dir() {
        true => rustix::fs::access(dir, Access::WRITE_OK | Access::EXEC_OK).map_err(io::Error::from),
        false => Err(io::ErrorKind::NotADirectory.into()),
    };
    access.map_err(|source| BundleError::NotWritable { dir: dir.to_owned(), out: out.to_owned(), source })
}

/// `path` without links and dots, as far as it exists.
fn resolved(path: &Path) -> Result<PathBuf, BundleError> {
    let path = std::path::absolute(path).map_err(BundleError::io("find", path))?;
    let existing = path.ancestors().find_map(|dir| Some((dir, dir.canonicalize().ok()?)));
    Ok(match existing {
        Some((dir, real)) => real.join(path.strip_prefix(dir).unwrap_or(Path::new(""))),
        None => path,
    })
}

/// `OUT.work`, beside the output folder.
pub fn default_work_dir(out: &Path) -> PathBuf {
    sibling(out, ".work").unwrap_or_else(|| out.join(".work"))
}

fn sibling(path: &Path, suffix: &str) -> Option<PathBuf> {
    let mut name = path.file_name()?.to_owned();
    name.push(suffix);
    Some(path.with_file_name(name))
}

/// Fills a folder beside `out` and moves it into place: `out` appears whole or not at all. What an
/// interrupted attempt left is cleared first.
///
/// # Errors
/// An `out` that holds anything, that cannot be written, or that coincides with `source`.
pub fn put_together<T, E: From<BundleError>>(
    source: &Path,
    out: &Path,
    fill: impl FnOnce(&Path) -> Result<T, E>,
) -> Result<T, E> {
    let work = default_work_dir(out);
    check_apart(source, out, &work)?;
    let paths = Paths::new(out, &work)?;
    if paths.out.exists()
        && let Some(file) = companions::names(&paths.out)?.into_iter().min()
    {
        return Err(BundleError::OutputOccupied { dir: paths.out, file }.into());
    }
    check_writable(&paths.out)?;
    clear_bundle(&paths.partial)?;
    fs::create_dir_all(&paths.partial).map_err(BundleError::io("create", &paths.partial))?;
    let filled = fill(&paths.partial)?;
    durable::sync_dir(&paths.partial)?;
    let renamed = super::fault::step().and_then(|()| fs::rename(&paths.partial, &paths.out));
    renamed.map_err(BundleError::io("rename", &paths.partial))?;
    durable::sync_parent(&paths.out)?;
    Ok(filled)
}

/// Opens the job: checks the output folder, locks the work folder, and reads the journal if there
/// is one. Committed unit files are checked against their recorded hashes.
pub fn open_job(spec: JobSpec) -> Result<Opened, BundleError> {
    let paths = Paths::new(&spec.out, &spec.work)?;
    if is_finished(&paths, &spec)? {
        // A kill right after the bundle appeared leaves its work folder. Locked, it is in use by a
        // process that makes the bundle once more.
        if paths.work.is_dir()
            && let Ok(_lock) = lock(&paths.work)
        {
            clear_after_finish(&paths, &spec.recipe);
        }
        return Ok(Opened::AlreadyDone(spec.out));
    }
    check_writable(&paths.out)?;
    fs::create_dir_all(&paths.work).map_err(BundleError::io("create", &paths.work))?;
    let lock = lock(&paths.work)?;
    let journal_path = paths.work.join(JOURNAL);
    if journal_path.is_file() {
        match resume(&paths.work, &journal_path, &spec.recipe) {
            Ok(journal) => {
                let is_fresh = journal.commits().is_empty();
                let writer = Writer::new(paths, spec, journal, lock);
                return Ok(if is_fresh { Opened::Fresh(writer) } else { Opened::Resumed(writer) });
            }
            Err(error) if spec.overwrite == Overwrite::Refuse => return Err(error),
            Err(_) => {}
        }
    }
    clear_work(&paths.work)?;
    let journal = Journal::create(&journal_path, &spec.recipe)?;
    Ok(Opened::Fresh(Writer::new(paths, spec, journal, lock)))
}

/// Whether the output folder is this job's finished bundle. Anything else in it is an error, or,
/// if it may be replaced, must at least look like a bundle.
fn is_finished(paths: &Paths, spec: &JobSpec) -> Result<bool, BundleError> {
    let dir = &paths.out;
    if !dir.exists() {
        return Ok(false);
    }
    let files = companions::list(dir)?;
    let Some(first) = files.first() else { return Ok(false) };
    if spec.overwrite == Overwrite::Replace {
        return match files.iter().find(|file| !is_bundle_file(file)) {
            Some(file) => Err(BundleError::ForeignFile { dir: dir.clone(), file: file.clone() }),
            None => Ok(false),
        };
    }
    let Some(provenance) = Provenance::of_finished(dir) else {
        return Err(BundleError::OutputOccupied { dir: dir.clone(), file: first.clone() });
    };
    match first_difference(&provenance.recipe, &spec.recipe) {
        None => Ok(true),
        // The bundle is what is there, the recipe what is asked for.
        Some((field, found, expected)) => {
            Err(BundleError::OutputDiffers { dir: dir.clone(), field, expected, found })
        }
    }
}

/// Two processes in one work folder would destroy each other's work. The lock is the kernel's, so
/// it ends with the process. On file systems without locks there is none.
fn lock(work: &Path) -> Result<File, BundleError> {
    let dir = File::open(work).map_err(BundleError::io("open", work))?;
    match dir.try_lock() {
        Err(TryLockError::WouldBlock) => Err(BundleError::Busy { dir: work.to_owned() }),
        Ok(()) | Err(TryLockError::Error(_)) => Ok(dir),
    }
}

fn resume(work: &Path, path: &Path, recipe: &Map<String, Value>) -> Result<Journal, BundleError> {
    let journal = Journal::open(path, recipe)?;
    for commit in journal.commits() {
        check_unit(&work.join(&commit.file), commit)?;
    }
    Ok(journal)
}

fn check_unit(path: &Path, commit: &Commit) -> Result<(), BundleError> {
    let damaged =
        |expected: String, found: String| BundleError::UnitDamaged { path: path.to_owned(), expected, found };
    let found_bytes = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(damaged(format!("{} bytes", commit.bytes), "no file".into()));
        }
        Err(error) => return Err(BundleError::io("read", path)(error)),
    };
    if found_bytes != commit.bytes {
        return Err(damaged(format!("{} bytes", commit.bytes), format!("{found_bytes} bytes")));
    }
    let found = durable::digest(path)?.sha256;
    if found != commit.sha256 {
        return Err(damaged(format!("sha256 {}", commit.sha256), format!("sha256 {found}")));
    }
    Ok(())
}

pub(super) fn unit_file(unit: usize) -> String {
    format!("unit-{unit:05}.safetensors")
}

fn is_work_file(name: &str) -> bool {
    let plain = name.strip_prefix('.').and_then(|n| n.strip_suffix(".tmp")).unwrap_or(name);
    let is_numbered = plain.starts_with("unit-") || plain.starts_with("states-");
    plain == JOURNAL || (is_numbered && plain.ends_with(".safetensors"))
}

/// Removes a job's files from its work folder, the journal first: without it the others mean
/// nothing, whenever this is interrupted.
fn clear_work(work: &Path) -> Result<(), BundleError> {
    let journal = work.join(JOURNAL);
    if journal.exists() {
        remove(&journal)?;
        durable::sync_dir(work)?;
    }
    for name in companions::names(work)?.iter().filter(|name| is_work_file(name)) {
        remove(&work.join(name))?;
    }
    Ok(())
}

/// Clears the folders of a job whose bundle is in place. Nothing in them matters any more, so that
/// some of it cannot be removed does not make the job fail.
pub(super) fn clear_after_finish(paths: &Paths, recipe: &Map<String, Value>) {
    let _ = clear_bundle(&paths.replaced);
    let journal = paths.work.join(JOURNAL);
    let is_other_job = journal.exists() && Journal::open(&journal, recipe).is_err();
    if paths.work.is_dir() && !is_other_job {
        let _ = clear_work(&paths.work);
        // Fails, as it should, when somebody else's files are there.
        let _ = fs::remove_dir(&paths.work);
    }
}

/// Removes a folder that holds nothing but a bundle or a part of one.
pub(super) fn clear_bundle(dir: &Path) -> Result<(), BundleError> {
    if !dir.exists() {
        return Ok(());
    }
    let is_ours = |name: &str| {
        let (folder, file) = name.rsplit_once('/').map_or(("", name), |(folder, file)| (folder, file));
        let plain = file.strip_prefix('.').and_then(|f| f.strip_suffix(".tmp")).unwrap_or(file);
        is_bundle_file(&if folder.is_empty() { plain.to_owned() } else { format!("{folder}/{plain}") })
    };
    let files = companions::list(dir)?;
    if let Some(file) = files.iter().find(|file| !is_ours(file)) {
        return Err(BundleError::ForeignFile { dir: dir.to_owned(), file: file.clone() });
    }
    files.iter().try_for_each(|file| remove(&dir.join(file)))?;
    for folder in companions::names(dir)? {
        let folder = dir.join(folder);
        fs::remove_dir(&folder).map_err(BundleError::io("remove", &folder))?;
    }
    fs::remove_dir(dir).map_err(BundleError::io("remove", dir))
}

fn remove(path: &Path) -> Result<(), BundleError> {
    super::fault::step().and_then(|()| fs::remove_file(path)).map_err(BundleError::io("remove", path))
}
