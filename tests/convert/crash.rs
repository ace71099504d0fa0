//! Whatever moment a run ends at, the same command goes on and ends with the same bytes.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::support::checkpoint::TestLlama;
use crate::support::program::{
    ABORT_AT, FULL_AT, Run, copy_dir, damage, edit_file, hashes, interrupt, kill_after, names, program,
    start_until,
};
use crate::{STEPS_OF_LAYER, base};

/// Kills the job in `dir` at each of `steps` in turn, each time from where the last kill left it.
fn strike(dir: &Path, steps: impl IntoIterator<Item = u64>) {
    for step in steps {
        let run = Run::of(base().command(dir).env(ABORT_AT, step.to_string()));
        assert!(run.aborted(), "step {step}: {}\n{}", run.status, run.stderr);
        assert!(!dir.join("out").exists(), "step {step}");
    }
}

/// The start of a job, and one kill inside each kind of write while layers are converted: a file of
/// a unit, a line of the journal, the states.
#[test]
fn killed_at_the_start_and_inside_a_layer() {
    let dir = tempfile::tempdir().unwrap();
    // Removing what the second kill left is a step too.
    strike(dir.path(), [1, 2, 4, 5]);
    assert_eq!(names(&dir.path().join("out.work")), ["journal.jsonl"]);
    // The journal is there, so steps are counted from the unit's file on.
    let (torn_unit, torn_line, torn_states) = (2, 6, 10);
    strike(dir.path(), [torn_unit, torn_line, torn_states]);
    let run = Run::of(&mut base().command(dir.path())).expect(0);
    run.says(&["1 of them done before"]);
    base().assert_done(dir.path(), "after seven kills");
}

/// Every step of the head's commit, each after the last, until it is committed.
#[test]
fn killed_at_every_step_of_a_commit() {
    let dir = base().after_layer();
    strike(dir.path(), 1..=7);
    let run = Run::of(&mut base().command(dir.path())).expect(0);
    run.says(&["2 of them done before"]);
    base().assert_done(dir.path(), "after every step of a commit");
}

/// Every step from the last commit to the end, by a kill and by a full disk.
#[test]
fn killed_or_out_of_space_at_every_step_of_finishing() {
    let mut steps = 0;
    for step in 1.. {
        let dir = base().after_head();
        let run = Run::of(base().command(dir.path()).env(ABORT_AT, step.to_string()));
        if run.status.success() {
            break;
        }
        assert!(run.aborted(), "step {step}: {}\n{}", run.status, run.stderr);
        base().assert_nothing_or_all(dir.path(), &format!("step {step}"));
        Run::of(&mut base().command(dir.path())).expect(0);
        base().assert_done(dir.path(), &format!("killed at step {step}"));
        steps = step;
    }
    // Five files of four steps, the rename of the folder and the removal of the work folder.
    assert!(steps >= 20, "{steps} steps");

    let mut out_of_space = 0;
    for step in 1..=steps {
        let dir = base().after_head();
        let run = Run::of(base().command(dir.path()).env(FULL_AT, step.to_string()));
        base().assert_nothing_or_all(dir.path(), &format!("full at step {step}"));
        // That a work folder cannot be cleared does not make a finished bundle fail.
        if !dir.path().join("out").exists() {
            let run = run.expect(2);
            run.says(&["error: ", "out.partial"]);
            out_of_space += usize::from(run.stderr.contains("no space for "));
            if run.stderr.contains("no space for ") {
                run.says(&["bytes needed", "available", "hint: free some space"]);
            }
        }
        Run::of(&mut base().command(dir.path())).expect(0);
        base().assert_done(dir.path(), &format!("full at step {step}"));
    }
    assert!(out_of_space >= 20, "{out_of_space} steps out of space");
}

#[test]
fn a_full_disk_is_said_with_what_is_needed_and_resumed() {
    let fresh = tempfile::tempdir().unwrap();
    let dir = base().after_layer();
    for (dir, step, file) in [
        (fresh.path(), 2, "out.work/journal.jsonl"),
        (dir.path(), 2, "out.work/unit-00001.safetensors"),
        (dir.path(), 6, "out.work/journal.jsonl"),
    ] {
        let run = Run::of(base().command(dir).env(FULL_AT, step.to_string())).expect(2);
        let path = dir.join(file).display().to_string();
        run.says(&["no space for ", &path, " bytes needed, ", " available", "it resumes"]);
        assert!(!run.stderr.contains(": 0 bytes needed"), "{}", run.stderr);
        assert!(run.stdout.is_empty() && !dir.join("out").exists());
    }
    Run::of(&mut base().command(dir.path())).expect(0);
    base().assert_done(dir.path(), "space was freed");
}

/// `SIGKILL` at moments spread over the whole run, one after the other in the same folder.
#[test]
fn killed_at_random_moments() {
    let dir = tempfile::tempdir().unwrap();
    for share in [0.04, 0.35, 0.93, 0.08] {
        let killed = kill_after(&mut base().command(dir.path()), base().duration.mul_f64(share));
        println!("{share} of a run: {}", if killed { "killed" } else { "it was done before" });
        base().assert_nothing_or_all(dir.path(), &format!("{share} of a run"));
    }
    Run::of(&mut base().command(dir.path())).expect(0);
    base().assert_done(dir.path(), "four kills");
}

/// `SIGKILL` while the bundle is put together, at moments spread over the time that takes.
#[test]
fn killed_at_random_moments_of_finishing() {
    const KILLS: u32 = 16;
    let dir = base().after_head();
    let started = Instant::now();
    Run::of(&mut base().command(dir.path())).expect(0);
    let duration = started.elapsed();
    for kill in 1..=KILLS {
        let dir = base().after_head();
        let delay = duration * kill / KILLS;
        let killed = kill_after(&mut base().command(dir.path()), delay);
        println!("{delay:?}: {}", if killed { "killed" } else { "it was done before" });
        base().assert_nothing_or_all(dir.path(), &format!("{delay:?}"));
        Run::of(&mut base().command(dir.path())).expect(0);
        base().assert_done(dir.path(), &format!("{delay:?}"));
    }
}

#[test]
fn an_interrupt_ends_with_130_and_a_word_on_how_to_go_on() {
    let dir = base().after_layer();
    let (child, _) = start_until(&mut base().command(dir.path()), "2 units");
    interrupt(&child);
    let run = Run::from(child.wait_with_output().unwrap()).expect(130);
    run.says(&["interrupted; run the same command again to go on"]);
    assert!(run.stdout.is_empty());
    assert_eq!(names(dir.path()), ["out.work"]);
    let again = Run::of(&mut base().command(dir.path())).expect(0);
    again.says(&["1 of them done before"]);
    base().assert_done(dir.path(), "interrupted");
}

/// Killed inside the second layer: with the states in front of it on disk, and without them, when
/// they are made again by running the first layer as it was written.
#[test]
fn killed_between_layers() {
    let source = tempfile::tempdir().unwrap();
    TestLlama { layers: 2, ..TestLlama::nano() }.write(source.path());
    let job = |dir: &Path| crate::command(source.path(), dir);
    let whole = tempfile::tempdir().unwrap();
    Run::of(&mut job(whole.path())).expect(0);
    let expected = hashes(&whole.path().join("out"));

    let dir = tempfile::tempdir().unwrap();
    let in_second_layer = STEPS_OF_LAYER + 2;
    let run = Run::of(job(dir.path()).env(ABORT_AT, in_second_layer.to_string()));
    assert!(run.aborted(), "{}", run.stderr);
    let states = "out.work/states-00001.safetensors";
    let without_states = tempfile::tempdir().unwrap();
    copy_dir(dir.path(), without_states.path());
    std::fs::remove_file(without_states.path().join(states)).unwrap();
    for dir in [dir, without_states] {
        let run = Run::of(&mut job(dir.path())).expect(0);
        run.says(&["1 of them done before"]);
        assert_eq!(hashes(&dir.path().join("out")), expected);
    }
}

#[test]
fn damaged_states_are_made_anew() {
    for damage in [
        damage as fn(&Path),
        |path| edit_file(path, |b| b.truncate(b.len() / 2)),
        |path| std::fs::write(path, []).unwrap(),
    ] {
        let dir = base().after_layer();
        damage(&dir.path().join("out.work/states-00001.safetensors"));
        Run::of(&mut base().command(dir.path())).expect(0);
        base().assert_done(dir.path(), "damaged states");
    }
}

#[test]
fn a_damaged_unit_is_an_error_that_names_it() {
    let unit = "out.work/unit-00000.safetensors";
    for damage in [
        damage as fn(&Path),
        |path| edit_file(path, |b| b.truncate(b.len() - 1)),
        |path| std::fs::remove_file(path).unwrap(),
    ] {
        let dir = base().after_layer();
        damage(&dir.path().join(unit));
        let run = Run::of(&mut base().command(dir.path())).expect(2);
        run.says(&[unit, "damaged: expected", "hint: start over with --overwrite"]);
        assert_eq!(names(dir.path()), ["out.work"]);
    }
}

/// The same bytes for any number of threads, however it is set.
#[test]
fn threads_do_not_change_the_bundle() {
    let fresh = |change: fn(&mut Command)| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = base().command(dir.path());
        change(&mut command);
        Run::of(&mut command).expect(0);
        base().assert_done(dir.path(), &format!("{command:?}"));
    };
    fresh(|command| _ = command.args(["--threads", "1"]));
    fresh(|command| _ = command.args(["--threads", "3"]));
    for change in [
        |command: &mut Command| _ = command.args(["--threads", "2"]),
        |command: &mut Command| _ = command.env("RAYON_NUM_THREADS", "1"),
        |command: &mut Command| _ = command.env("RAYON_NUM_THREADS", "7"),
    ] {
        let dir = base().after_layer();
        // Without its states the layer is run once more.
        std::fs::remove_file(dir.path().join("out.work/states-00001.safetensors")).unwrap();
        let mut command = base().command(dir.path());
        change(&mut command);
        Run::of(&mut command).expect(0);
        base().assert_done(dir.path(), &format!("{command:?}"));
    }
}

/// The forward of a model wide enough for matrix products that are split between threads.
#[test]
fn threads_do_not_change_a_forward() {
    let model = crate::support::fixture("tiny-llama");
    let text = crate::support::fixture("corpus/persuasion.txt");
    let perplexity = |change: &dyn Fn(&mut Command)| {
        let mut command = program(["eval", "ppl", "--json", "--rows", "2", "--cols", "500"]);
        command.arg(&model).arg("--text").arg(&text);
        change(&mut command);
        Run::of(&mut command).expect(0).json()["nll_mean"].as_f64().unwrap()
    };
    let expected = perplexity(&|_| {});
    for threads in ["1", "2", "3", "16"] {
        assert_eq!(perplexity(&|c| _ = c.args(["--threads", threads])), expected, "{threads}");
        assert_eq!(perplexity(&|c| _ = c.env("RAYON_NUM_THREADS", threads)), expected, "{threads}");
    }
}
