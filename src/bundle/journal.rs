//! The record of a job: one JSON document per line, only ever appended to.
//!
//! The first line holds the recipe. Every later line commits one unit, whose file was durable
//! before the line was written: a unit without a line does not exist.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{BundleError, TensorMetrics, durable, fault};

/// Version of the journal's and the unit files' form.
const VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Header {
    journal: u32,
    recipe: Map<String, Value>,
}

/// One committed unit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Commit {
    pub unit: usize,
    pub file: String,
    pub sha256: String,
    pub bytes: u64,
    pub metrics: Vec<TensorMetrics>,
}

pub(super) struct Journal {
    path: PathBuf,
    file: File,
    /// Length of the complete lines.
    bytes: u64,
    commits: Vec<Commit>,
}

impl Journal {
    /// Starts the journal at `path`, which appears with its first line complete.
    pub fn create(path: &Path, recipe: &Map<String, Value>) -> Result<Self, BundleError> {
        let header = Header { journal: VERSION, recipe: recipe.clone() };
        let line = line_of(path, &header)?;
        durable::write_sized(path, line.len() as u64, |sink| {
            sink.write_all(&line).map_err(BundleError::io("write", path))
        })?;
        let (bytes, commits) = (line.len() as u64, Vec::new());
        Ok(Self { path: path.to_owned(), file: open_to_append(path)?, bytes, commits })
    }

    /// Opens the journal at `path`; its recipe must be `recipe`, field by field. A last line
    /// that is incomplete or unreadable, as a kill or a power cut can leave it, is cut off; any other
    /// damage is an error.
    pub fn open(path: &Path, recipe: &Map<String, Value>) -> Result<Self, BundleError> {
        let content = fs::read(path).map_err(BundleError::io("read", path))?;
        let mut lines = content.split_inclusive(|&b| b == b'\n');
        let first = lines.next().unwrap_or_default();
        let header: Header = parse(path, 1, first)?;
        if header.journal != VERSION {
            let problem = format!("expected journal version {VERSION}, found {}", header.journal);
            return Err(BundleError::JournalLine { path: path.to_owned(), line: 1, problem });
        }
        if let Some((field, expected, found)) = first_difference(&header.recipe, recipe) {
            return Err(BundleError::RecipeChanged { path: path.to_owned(), field, expected, found });
        }
        let mut commits: Vec<Commit> = Vec::new();
        let mut whole_bytes = first.len();
        for line in lines {
            let is_last = whole_bytes + line.len() == content.len();
            match parse::<Commit>(path, commits.len() + 2, line) {
                Ok(commit) if commit.unit == commits.len() => commits.push(commit),
                Ok(commit) => {
                    return Err(BundleError::UnitOrder { expected: commits.len(), found: commit.unit });
                }
                Err(_) if is_last => break,
                Err(error) => return Err(error),
            }
            whole_bytes += line.len();
        }
        let file = open_to_append(path)?;
        if whole_bytes < content.len() {
            let cut = file.set_len(whole_bytes as u64).and_then(|()| file.sync_all());
            cut.map_err(BundleError::io("repair", path))?;
        }
        Ok(Self { path: path.to_owned(), file, bytes: whole_bytes as u64, commits })
    }

    /// The committed units, in order from 0.
    pub fn commits(&self) -> &[Commit] {
        &self.commits
    }

    /// Commits a unit whose file is durable.
    pub fn append(&mut self, commit: &Commit) -> Result<(), BundleError> {
        let line = line_of(&self.path, commit)?;
        if let Err(source) = self.append_line(&line) {
            // What was written of the line would damage the next one.
            let _ = self.file.set_len(self.bytes);
            let failed = BundleError::Io { action: "append to", path: self.path.clone(), source };
            return Err(durable::with_space(failed, &self.path, line.len() as u64));
        }
        self.bytes += line.len() as u64;
        // Kept as read back: decimal text need not give back the last bit of a float, and an
        // interrupted job, which only has the text, must write the same metrics as this one.
        self.commits.push(parse(&self.path, self.commits.len() + 2, &line)?);
        Ok(())
    }

    fn append_line(&mut self, line: &[u8]) -> std::io::Result<()> {
        let (file, half) = (&mut self.file, &line[..line.len() / 2]);
        fault::step()?;
        fault::step_leaving(|| drop(file.write_all(half)))?;
        file.write_all(line)?;
        fault::step()?;
        file.sync_data()?;
        fault::step()
    }
}

fn open_to_append(path: &Path) -> Result<File, BundleError> {
    OpenOptions::new().append(true).open(path).map_err(BundleError::io("open", path))
}

fn line_of(path: &Path, value: &impl Serialize) -> Result<Vec<u8>, BundleError> {
    let mut line = serde_json::to_vec(value).map_err(BundleError::json(path))?;
    line.push(b'\n');
    Ok(line)
}

/// A line is only whole with its line feed.
fn parse<T: for<'de> Deserialize<'de>>(path: &Path, number: usize, line: &[u8]) -> Result<T, BundleError> {
    let error = |problem: String| BundleError::JournalLine { path: path.to_owned(), line: number, problem };
    let Some(text) = line.strip_suffix(b"\n") else {
        return Err(error("expected a complete line, found the end of the file".into()));
    };
    serde_json::from_slice(text).map_err(|e| error(e.to_string()))
}

/// The first field in which two recipes differ, with what is recorded and what is asked for now.
/// `recorded` comes from a file, so `now` takes the same way through text before it is compared.
pub(super) fn first_difference(
    recorded: &Map<String, Value>,
    now: &Map<String, Value>,
) -> Option<(String, String, String)> {
    let now = &serde_json::to_string(now)
        .and_then(|text| serde_json::from_str::<Map<String, Value>>(&text))
        .unwrap_or_else(|_| now.clone());
    let field = now.keys().chain(recorded.keys()).find(|field| recorded.get(*field) != now.get(*field))?;
    Some((field.clone(), shown(recorded.get(field)), shown(now.get(field))))
}

fn shown(value: Option<&Value>) -> String {
    match value {
        None => "nothing".into(),
        Some(Value::String(text)) => format!("\"{text}\""),
        Some(other) => other.to_string(),
    }
}
