//! Running the program as a user does, and killing it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use exl3_candle::bundle::{durable, list_files};
use serde_json::Value;

pub const ABORT_AT: &str = "EXL3_CANDLE_ABORT_AT_WRITE";
pub const FULL_AT: &str = "EXL3_CANDLE_FULL_AT_WRITE";
const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;

/// The program with an environment that changes nothing.
pub fn program<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("exl3-candle"));
    for variable in [ABORT_AT, FULL_AT, "RAYON_NUM_THREADS", "NO_COLOR", "CLICOLOR_FORCE", "RUST_LOG"] {
        command.env_remove(variable);
    }
    command.env("RUST_BACKTRACE", "0").args(args);
    command
}

/// How a run ended.
pub struct Run {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    pub fn of(command: &mut Command) -> Self {
        Self::from(command.output().unwrap())
    }

    /// The exit code must be `code`.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.status.code(), Some(code), "{}\n{}\n{}", self.status, self.stdout, self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }

    pub fn aborted(&self) -> bool {
        self.status.signal() == Some(SIGABRT)
    }

    /// The error must say all of `words`.
    #[track_caller]
    pub fn says(&self, words: &[&str]) {
        for word in words {
            assert!(self.stderr.contains(word), "no \"{word}\" in: {}", self.stderr);
        }
    }
}

impl From<Output> for Run {
    fn from(output: Output) -> Self {
        Self {
            status: output.status,
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Starts the command and kills it with SIGKILL after `delay`. Whether it was still running.
pub fn kill_after(command: &mut Command, delay: Duration) -> bool {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while started.elapsed() < delay && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert!(status.success() || status.signal() == Some(SIGKILL), "{status}");
    !status.success()
}

/// Starts the command and waits until its stderr has `mark`.
pub fn start_until(command: &mut Command, mark: &str) -> (Child, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let stderr = child.stderr.as_mut().unwrap();
    let mut text = Vec::new();
    let mut byte = [0];
    while !String::from_utf8_lossy(&text).contains(mark) {
        assert_eq!(stderr.read(&mut byte).unwrap(), 1, "no {mark}: {}", String::from_utf8_lossy(&text));
        text.push(byte[0]);
    }
    (child, String::from_utf8(text).unwrap())
}

/// What Ctrl-C does.
pub fn interrupt(child: &Child) {
    let sent = Command::new("sh").arg("-c").arg(format!("kill -INT {}", child.id())).status().unwrap();
    assert!(sent.success());
}

/// Every file below `dir` with its hash.
pub fn hashes(dir: &Path) -> BTreeMap<String, String> {
    let hash = |name: String| (name.clone(), durable::digest(&dir.join(&name)).unwrap().sha256);
    list_files(dir).unwrap().into_iter().map(hash).collect()
}

/// The names in `dir`, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

/// Copies a folder.
pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for name in names(from) {
        let (from, to) = (from.join(&name), to.join(&name));
        match from.is_dir() {
            true => copy_dir(&from, &to),
            false => drop(fs::copy(&from, &to).unwrap()),
        }
    }
}

/// Changes one bit in the middle of a file.
pub fn damage(path: &Path) {
    edit_file(path, |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    });
}

pub fn edit_file(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    edit(&mut bytes);
    fs::write(path, bytes).unwrap();
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}
