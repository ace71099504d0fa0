//! What the program says, and where.

use std::process::Stdio;

use serde_json::Value;

use crate::base;
use crate::support::program::{Run, program};

/// `text` without what differs between runs and machines: folders, decimal numbers, the encoder.
fn redacted(text: &str, dir: &std::path::Path) -> String {
    let text = text.replace(&dir.display().to_string(), "[DIR]");
    let lines = text.lines().map(|line| {
        let line = line
            .split_once("; encoder ")
            .map_or(line.to_owned(), |(head, _)| format!("{head}; encoder [NAME]"));
        line.split(' ').map(decimal_redacted).collect::<Vec<_>>().join(" ")
    });
    let text: Vec<String> = lines.map(|line| about_redacted(&line)).collect();
    text.join("\n")
}

fn decimal_redacted(word: &str) -> String {
    let number = word.trim_matches(|c: char| !c.is_ascii_digit());
    let is_decimal = number.contains('.') && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if is_decimal { word.replace(number, "[N]") } else { word.to_owned() }
}

/// Whole numbers that measure time.
fn about_redacted(line: &str) -> String {
    for (before, after) in [("about ", " s left"), (", ", " % in the encoder")] {
        if let (Some(start), Some(end)) = (line.rfind(before), line.rfind(after)) {
            return format!("{}{before}[N]{}", &line[..start], &line[end..]);
        }
    }
    line.to_owned()
}

#[test]
fn help() {
    insta::assert_snapshot!(Run::of(&mut program(["--help"])).expect(0).stdout);
    insta::assert_snapshot!(Run::of(&mut program(["convert", "--help"])).expect(0).stdout);
}

#[test]
fn what_a_conversion_says() {
    // A line per tensor depends on numbers that differ between processors.
    let stderr = redacted(&base().stderr, &base().dir).replace(", no output scales", "");
    insta::assert_snapshot!(stderr);
    let dir = base().after_head();
    let run = Run::of(&mut base().command(dir.path())).expect(0);
    insta::assert_snapshot!(redacted(&run.stdout, dir.path()));
}

#[test]
fn what_an_error_says() {
    let dir = base().after_layer();
    let run = Run::of(base().command(dir.path()).arg("--seed").arg("1")).expect(2);
    insta::assert_snapshot!(redacted(&run.stderr, dir.path()));
    let run = Run::of(&mut program(["convert", "/nowhere", "-o", "out", "-b", "3"])).expect(2);
    insta::assert_snapshot!(run.stderr);
    let run = Run::of(&mut program(["convert", "/nowhere", "-o", "out", "-b", "4.5"])).expect(2);
    insta::assert_snapshot!(run.stderr);
}

#[test]
fn the_keys_of_the_report() {
    let report = &base().report;
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    let shape =
        [keys(report), keys(&report["tensors"][0]), keys(&report["files"][0]), keys(&report["peaks"][0])];
    insta::assert_snapshot!(shape.join("\n"));
    for key in ["output_bytes", "bpw", "bpw_decoder", "bpw_head", "mean_proxy_error", "encoder_share"] {
        assert!(report[key].as_f64().is_some_and(|number| number > 0.0), "{key}: {}", report[key]);
    }
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 8);
    let mean = tensors.iter().map(|t| t["proxy_error"].as_f64().unwrap()).sum::<f64>() / 8.0;
    assert!((report["mean_proxy_error"].as_f64().unwrap() - mean).abs() < 1e-12 * mean);
    assert_eq!((&report["resumed_units"], &report["verified"]), (&0.into(), &Value::Null));
}

/// The finished bundle is checked against its source unless that is declined.
#[test]
fn a_finished_bundle_is_verified() {
    let dir = base().done();
    let mut command = base().command(dir.path());
    let args: Vec<_> =
        command.get_args().filter(|arg| *arg != "--no-verify").map(ToOwned::to_owned).collect();
    command = program(args);
    let verified = &Run::of(command.arg("--json")).expect(0).json()["verified"];
    assert!(verified["checks"].as_u64().unwrap() > 100 && verified["failures"] == 0, "{verified}");
}

#[test]
fn nothing_but_the_result_is_on_stdout_and_no_escape_codes_anywhere() {
    for json in [false, true] {
        for no_color in [false, true] {
            let dir = base().after_head();
            let mut command = base().command(dir.path());
            if json {
                command.arg("--json");
            }
            if no_color {
                command.env("NO_COLOR", "1");
            }
            let run = Run::of(&mut command).expect(0);
            assert!(!run.stdout.contains('\x1b') && !run.stderr.contains('\x1b'), "{}", run.stderr);
            assert!(run.stderr.contains("2 units, 2 of them done before; encoder "));
            match json {
                true => assert_eq!(run.json()["resumed_units"], 2),
                false => assert!(run.stdout.starts_with("converted: "), "{}", run.stdout),
            }
        }
    }
    let help = Run::of(program(["convert", "--help"]).env("NO_COLOR", "1")).expect(0).stdout;
    assert!(!help.contains('\x1b'));
}

/// `exl3-candle convert --json ... | head -c 10`
#[test]
fn a_reader_that_went_away_is_no_error() {
    for args in [&["--json"][..], &[]] {
        let dir = base().done();
        let mut command = base().command(dir.path());
        let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let run = Run::from(child.wait_with_output().unwrap()).expect(0);
        assert!(!run.stderr.contains("error"), "{}", run.stderr);
    }
    // Progress that nobody reads does not stop a conversion.
    let dir = base().after_head();
    let mut command = base().command(dir.path());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
    base().assert_done(dir.path(), "nobody listens");
}

#[test]
fn the_exit_codes_are_in_the_help() {
    let help = Run::of(&mut program(["--help"])).expect(0).stdout;
    assert!(help.contains("0 done; 1 ran, and the answer is no; 2 error; 130 interrupted, resumable"));
}

#[test]
fn numbers_of_threads_tiles_and_seconds_that_make_no_sense_are_refused() {
    for args in [
        ["--threads", "0"],
        ["--threads", "1000000"],
        ["--tiles", "0"],
        ["--tiles", "9999999999999999999"],
        ["--seconds", "nan"],
        ["--seconds=-1", "--json"],
        ["--seconds", "1e30"],
    ] {
        let option = args[0].split('=').next().unwrap();
        Run::of(program(["bench", "encoder", "--bits", "8"]).args(args)).expect(2).says(&[option]);
    }
}
