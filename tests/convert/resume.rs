//! A job goes on only with the recipe it was started with, and a finished one is recognized.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::base;
use crate::support::fixture;
use crate::support::program::{Run, copy_dir, edit_file, hashes, interrupt, names, read_json, start_until};

/// The command of the base with other settings: clap takes the last of each.
fn changed(dir: &Path, args: &[&str]) -> Command {
    let mut command = crate::support::program::program(["convert", "--no-verify"]);
    let defaults = [
        ("--bits", "3"),
        ("--head-bits", "4"),
        ("--rows", "8"),
        ("--cols", "64"),
        ("--codebook", "mul1"),
        ("--out-scales", "auto"),
        ("--seed", "0"),
    ];
    for (option, value) in defaults.iter().filter(|(option, _)| !args.contains(option)) {
        command.args([option, value]);
    }
    if !args.contains(&"--calibration") {
        command.arg("--calibration").arg(fixture("corpus/northanger.txt"));
    }
    command.args(args).arg(base().source()).arg("--output").arg(dir.join("out"));
    command
}

fn settings() -> Vec<(&'static str, Vec<&'static str>, &'static str)> {
    let persuasion: &str = fixture("corpus/persuasion.txt").display().to_string().leak();
    vec![
        ("bits", vec!["--bits", "4"], "expected 3.0, found 4.0"),
        ("head_bits", vec!["--head-bits", "3"], "expected 4.0, found 3.0"),
        ("head_bits", vec!["--head-bits", "16"], "expected 4.0, found null"),
        ("codebook", vec!["--codebook", "mcg"], "expected \"mul1\", found \"mcg\""),
        ("out_scales", vec!["--out-scales", "never"], "expected \"auto\", found \"never\""),
        ("seed", vec!["--seed", "1"], "expected 0, found 1"),
        ("rows", vec!["--rows", "7"], "expected 8, found 7"),
        ("cols", vec!["--cols", "32"], "expected 64, found 32"),
        ("shard_bytes", vec!["--shard-size", "1MiB"], "found 1048576"),
        ("calibration_sha256", vec!["--calibration", persuasion], "expected \""),
    ]
}

#[test]
fn a_changed_setting_is_refused_by_name() {
    let dir = base().after_layer();
    let work = hashes(&dir.path().join("out.work"));
    for (field, args, values) in settings() {
        let run = Run::of(&mut changed(dir.path(), &args)).expect(2);
        run.says(&[
            "journal.jsonl was started with another ",
            &format!("another {field}: "),
            values,
            "hint:",
        ]);
        assert!(run.stdout.is_empty());
        assert_eq!(hashes(&dir.path().join("out.work")), work, "{field}: the work is as it was");
    }
    let run = Run::of(&mut changed(dir.path(), &[])).expect(0);
    run.says(&["1 of them done before"]);
    base().assert_done(dir.path(), "with the settings of the start");
}

#[test]
fn a_finished_bundle_of_other_settings_is_refused_by_name() {
    let dir = base().done();
    for (field, args, _) in settings() {
        let run = Run::of(&mut changed(dir.path(), &args)).expect(2);
        run.says(&["holds a bundle made with another ", &format!("another {field}: "), "--overwrite"]);
        base().assert_done(dir.path(), field);
    }
}

#[test]
fn changed_files_of_the_source_are_refused_by_name() {
    type Edit = fn(&mut Vec<u8>);
    let edits: [(&str, Edit, &str); 4] = [
        ("model.safetensors", |b| *b.last_mut().unwrap() ^= 1, "source_sha256"),
        ("config.json", |b| b.push(b'\n'), "source_sha256"),
        ("tokenizer.json", |b| b.push(b'\n'), "tokenizer_sha256"),
        ("tokenizer_config.json", |b| b.push(b'\n'), "tokenizer_sha256"),
    ];
    for (file, edit, field) in edits {
        let dir = base().after_layer();
        let source = dir.path().join("source");
        copy_dir(&base().source(), &source);
        edit_file(&source.join(file), edit);
        let run = Run::of(&mut crate::command(&source, dir.path())).expect(2);
        run.says(&["started with another ", field, "hint:"]);
        assert_eq!(names(dir.path()), ["out.work", "source"]);
    }
}

/// Work by other settings is discarded, and the new work is what later runs go on with.
#[test]
fn overwrite_starts_over() {
    let dir = base().after_layer();
    let mut command = changed(dir.path(), &["--seed", "1", "--overwrite"]);
    let (child, stderr) = start_until(&mut command, "encoder ");
    assert!(stderr.contains("2 units; "), "{stderr}");
    interrupt(&child);
    Run::from(child.wait_with_output().unwrap()).expect(130);
    let work = dir.path().join("out.work");
    let journal = fs::read_to_string(work.join("journal.jsonl")).unwrap();
    assert!(journal.lines().count() == 1 && journal.contains("\"seed\":1"), "{journal}");
    assert!(!names(&work).iter().any(|name| name.starts_with("states-00001")), "{:?}", names(&work));
}

/// Work by the same settings is continued, and the bundle in the way replaced by the finished one.
#[test]
fn overwrite_replaces_a_bundle() {
    let dir = base().after_head();
    copy_dir(&base().bundle(), &dir.path().join("out"));
    fs::write(dir.path().join("out/config.json"), "{}").unwrap();
    let run = Run::of(base().command(dir.path()).arg("--overwrite")).expect(0);
    run.says(&["2 of them done before"]);
    base().assert_done(dir.path(), "replaced");
}

#[test]
fn a_folder_of_somebody_else_is_refused() {
    for overwrite in [&[][..], &["--overwrite"]] {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("out")).unwrap();
        fs::write(dir.path().join("out/thesis.tex"), "years of work").unwrap();
        let run = Run::of(base().command(dir.path()).args(overwrite)).expect(2);
        run.says(&["out", "holds \"thesis.tex\"", "hint: "]);
        assert_eq!(names(dir.path()), ["out"]);
        assert_eq!(names(&dir.path().join("out")), ["thesis.tex"]);
    }
    // A folder that is there and empty is as good as none.
    let dir = base().after_head();
    fs::create_dir(dir.path().join("out")).unwrap();
    Run::of(&mut base().command(dir.path())).expect(0);
    base().assert_done(dir.path(), "an empty folder");
}

#[test]
fn a_finished_job_says_the_same_numbers_again() {
    let dir = base().done();
    let again = Run::of(base().command(dir.path()).arg("--json")).expect(0).json();
    assert_eq!(again["already_done"], true);
    assert_eq!(base().report["already_done"], false);
    for key in ["output_bytes", "bpw", "bpw_decoder", "bpw_head", "mean_proxy_error", "tensors"] {
        assert_eq!(again[key], base().report[key], "{key}");
    }
    base().assert_done(dir.path(), "already done");
    let text = Run::of(&mut base().command(dir.path())).expect(0).stdout;
    assert!(text.starts_with("already converted: "), "{text}");
    // A path is told as it was given.
    let mut relative = base().command(Path::new(""));
    let again = Run::of(relative.current_dir(dir.path()).arg("--json")).expect(0).json();
    assert_eq!((&again["already_done"], &again["output"]), (&true.into(), &"out".into()));
}

/// A finished bundle that was damaged since is not passed off as done.
#[test]
fn a_finished_bundle_is_checked_again() {
    let dir = base().done();
    let shard = dir.path().join("out/model.safetensors");
    edit_file(&shard, |bytes| *bytes.last_mut().unwrap() ^= 1);
    let mut command = crate::support::program::program(["convert", "--bits", "3", "--head-bits", "4"]);
    command.args(["--rows", "8", "--cols", "64"]).arg(base().source());
    command.arg("--output").arg(dir.path().join("out"));
    let run = Run::of(command.arg("--calibration").arg(fixture("corpus/northanger.txt")));
    assert_eq!(run.status.code(), Some(1), "{}{}", run.stdout, run.stderr);
    assert!(run.stdout.contains("NOT verified"), "{}", run.stdout);
}

/// The report lists every file as it is.
#[test]
fn the_report_agrees_with_the_files() {
    let files = base().report["files"].as_array().unwrap();
    for file in files {
        assert_eq!(file["sha256"], base().hashes[file["name"].as_str().unwrap()], "{file}");
    }
    assert_eq!(files.len(), base().hashes.len());
    let bytes: u64 = files.iter().map(|file| file["bytes"].as_u64().unwrap()).sum();
    assert_eq!(base().report["output_bytes"], bytes);
    let recipe = &read_json(&base().bundle().join("exl3-candle.json"))["recipe"];
    assert_eq!((&recipe["bits"], &recipe["head_bits"]), (&3.0.into(), &4.0.into()));
}

/// A link stays a link: the bundle appears, and is replaced, in the folder that it points to.
#[test]
fn an_output_folder_that_is_a_link() {
    let dir = base().after_head();
    let (link, bundle) = (dir.path().join("out"), dir.path().join("disk/bundle"));
    fs::create_dir_all(&bundle).unwrap();
    std::os::unix::fs::symlink(&bundle, &link).unwrap();
    for args in [&[][..], &[], &["--overwrite"]] {
        let run = Run::of(base().command(dir.path()).args(args)).expect(0);
        assert!(run.stdout.contains(&format!("converted: {}\n", link.display())), "{}", run.stdout);
        assert!(link.is_symlink());
        assert_eq!(hashes(&bundle), base().hashes, "{args:?}");
        assert_eq!(
            (names(dir.path()), names(&dir.path().join("disk"))),
            (vec!["disk".to_owned(), "out".to_owned()], vec!["bundle".to_owned()])
        );
    }
}
