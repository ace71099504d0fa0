//! `exl3-candle convert`, end to end: kills, resumes, refusals, every kind of source, what it says.

#[path = "../support/mod.rs"]
mod support;

mod cli;
mod crash;
mod refusals;
mod resume;
mod variants;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use serde_json::Value;
use support::checkpoint::TestLlama;
use support::fixture;
use support::program::{ABORT_AT, Run, copy_dir, hashes, names, program};
use tempfile::TempDir;

/// Steps of writing until the layer's states are on disk: the journal, the unit's file, its line in
/// the journal, the states; four steps each.
const STEPS_OF_LAYER: u64 = 16;
/// The head's file and its line.
const STEPS_OF_HEAD: u64 = 8;

/// One conversion that nothing disturbs, and two that stop on their way. All tests share it: the
/// encoder makes a conversion take seconds.
struct Base {
    dir: PathBuf,
    /// Every file of the bundle.
    hashes: BTreeMap<String, String>,
    /// What the program printed.
    report: Value,
    stderr: String,
    duration: Duration,
}

impl Base {
    fn source(&self) -> PathBuf {
        self.dir.join("source")
    }

    fn bundle(&self) -> PathBuf {
        self.dir.join("done/out")
    }

    /// The command in the folder `dir`, which also holds what it leaves.
    fn command(&self, dir: &Path) -> Command {
        command(&self.source(), dir)
    }

    /// A folder where the layer is committed and its states are saved.
    fn after_layer(&self) -> TempDir {
        self.copy("layer")
    }

    /// A folder where everything is committed and nothing is put together.
    fn after_head(&self) -> TempDir {
        self.copy("head")
    }

    /// A folder where the bundle is done.
    fn done(&self) -> TempDir {
        self.copy("done")
    }

    fn copy(&self, stage: &str) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        copy_dir(&self.dir.join(stage), dir.path());
        dir
    }

    /// There is nothing but the finished bundle in `dir`, byte by byte the undisturbed one.
    #[track_caller]
    fn assert_done(&self, dir: &Path, context: &str) {
        assert_eq!(names(dir), ["out"], "{context}");
        assert_eq!(hashes(&dir.join("out")), self.hashes, "{context}");
    }

    /// Nothing in `dir` looks finished, or everything is.
    #[track_caller]
    fn assert_nothing_or_all(&self, dir: &Path, context: &str) {
        let out = dir.join("out");
        assert!(!out.exists() || hashes(&out) == self.hashes, "{context}: half a bundle");
    }
}

fn command(source: &Path, dir: &Path) -> Command {
    let mut command = program(["convert", "--bits", "3", "--head-bits", "4", "--rows", "8", "--cols", "64"]);
    command.arg(source).arg("--output").arg(dir.join("out"));
    command.arg("--calibration").arg(fixture("corpus/northanger.txt")).arg("--no-verify");
    command
}

fn base() -> &'static Base {
    static BASE: OnceLock<Base> = OnceLock::new();
    BASE.get_or_init(|| {
        let dir = base_dir();
        TestLlama::nano().write(&dir.join("source"));
        let folder = |stage: &str| {
            fs::create_dir(dir.join(stage)).unwrap();
            dir.join(stage)
        };
        let done = folder("done");
        let started = Instant::now();
        let run = Run::of(command(&dir.join("source"), &done).arg("--json")).expect(0);
        let duration = started.elapsed();

        let layer = folder("layer");
        stop(&dir, &layer, STEPS_OF_LAYER);
        let expected = ["journal.jsonl", "states-00001.safetensors", "unit-00000.safetensors"];
        assert_eq!(names(&layer.join("out.work")), expected);
        copy_dir(&layer, &dir.join("head"));
        let head = dir.join("head");
        stop(&dir, &head, STEPS_OF_HEAD);
        let journal = fs::read_to_string(head.join("out.work/journal.jsonl")).unwrap();
        assert_eq!(journal.lines().count(), 3, "recipe, layer, head");
        assert_eq!(names(&head), ["out.work"]);
        Base { hashes: hashes(&done.join("out")), report: run.json(), stderr: run.stderr, duration, dir }
    })
}

fn stop(dir: &Path, job: &Path, step: u64) {
    let run = Run::of(command(&dir.join("source"), job).env(ABORT_AT, step.to_string()));
    assert!(run.aborted(), "{}", run.stderr);
}

/// A folder below the target folder that outlives the tests; those of earlier runs are removed.
fn base_dir() -> PathBuf {
    const OLD: Duration = Duration::from_secs(3600);
    let parent = Path::new(env!("CARGO_TARGET_TMPDIR")).join("convert");
    fs::create_dir_all(&parent).unwrap();
    for name in names(&parent) {
        let path = parent.join(name);
        let modified = fs::metadata(&path).and_then(|m| m.modified());
        if modified.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age > OLD)) {
            let _ = fs::remove_dir_all(path);
        }
    }
    tempfile::Builder::new().prefix("base-").tempdir_in(parent).unwrap().keep()
}
