//! Perplexity and divergence against independent measurements, and the `eval` commands.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use exl3_candle::corpus::{self, Shape};
use exl3_candle::eval::{self, EvalError, KlReport, Subject};
use exl3_candle::model::{Model, SourceWeights, open_weights};
use exl3_candle::source::{self, Checkpoint};
use serde_json::Value;

const MODEL: &str = "tiny-llama";
const BUNDLE: &str = "bundles/tiny-llama-exl3-3.0bpw";

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

fn open(path: &str) -> (Checkpoint, Model) {
    let checkpoint = source::open(&fixture(path)).unwrap();
    let model = Model::from_config(checkpoint.config()).unwrap();
    model.check(&checkpoint).unwrap();
    (checkpoint, model)
}

fn persuasion(rows: usize, cols: usize) -> Vec<Vec<u32>> {
    let tokenizer = corpus::load_tokenizer(&fixture(MODEL)).unwrap();
    let text = fixture("corpus/persuasion.txt");
    corpus::from_file(&tokenizer, &text, Shape { rows, cols }, 4096).unwrap().rows().to_vec()
}

fn divergence(p: &str, q: &str, rows: &[Vec<u32>]) -> KlReport {
    let ((p, p_model), (q, q_model)) = (open(p), open(q));
    let (p, q) = (open_weights(&p, &p_model).unwrap(), open_weights(&q, &q_model).unwrap());
    let source = Subject { model: &p_model, weights: p.as_ref() };
    let quantized = Subject { model: &q_model, weights: q.as_ref() };
    eval::kl(source, quantized, rows).unwrap()
}

fn assert_within(found: f64, expected: f64, relative: f64) {
    assert!((found / expected - 1.0).abs() < relative, "found {found}, expected {expected}");
}

/// `fixtures/tiny-llama/reference_ppl.json`: an f32 forward of transformers.
#[test]
fn perplexity_of_the_source_is_that_of_transformers() {
    let (checkpoint, model) = open(MODEL);
    let report = eval::perplexity(&model, &SourceWeights(&checkpoint), &persuasion(8, 512)).unwrap();
    assert_eq!(report.tokens_scored, 8 * 511);
    assert_within(report.perplexity, 64.839, 1e-3);
}

/// `fixtures/reference_tiny-llama.json`: the reference's own forward, in f16.
#[test]
fn divergence_of_the_references_bundle_is_what_the_reference_measured() {
    let report = divergence(MODEL, BUNDLE, &persuasion(16, 512));
    assert_eq!(report.positions, 16 * 512);
    assert_within(report.kl.mean, 0.17836, 0.03);
    assert_within(report.top1, 0.7524, 0.01);
    assert_within(report.quantized.perplexity, 59.675, 0.01);
    assert_within(report.source.perplexity, 56.555, 0.01);
    assert!(report.kl.median < report.kl.mean && report.kl.mean < report.kl.p99);
}

#[test]
fn a_model_does_not_diverge_from_itself() {
    for path in [MODEL, BUNDLE] {
        let report = divergence(path, path, &persuasion(2, 200));
        assert_eq!((report.kl.mean, report.kl.max, report.top1), (0.0, 0.0, 1.0));
        assert_eq!(report.source, report.quantized);
    }
}

/// Sums in another order may differ in their last bits, and in nothing else.
#[test]
fn the_order_of_rows_does_not_matter() {
    let rows = persuasion(5, 64);
    let moved: Vec<_> = [3, 0, 4, 2, 1].map(|row: usize| rows[row].clone()).into();
    let (a, b) = (divergence(MODEL, BUNDLE, &rows), divergence(MODEL, BUNDLE, &moved));
    assert_within(b.kl.mean, a.kl.mean, 1e-12);
    assert_within(b.quantized.perplexity, a.quantized.perplexity, 1e-12);
    assert_eq!((b.kl.median, b.kl.max, b.top1), (a.kl.median, a.kl.max, a.top1));
    // Rows of other tokens do matter.
    let other = divergence(MODEL, BUNDLE, &rows[1..]);
    assert!((other.kl.mean / a.kl.mean - 1.0).abs() > 1e-6);
}

#[test]
fn rows_that_cannot_be_measured_are_named() {
    let (checkpoint, model) = open(MODEL);
    let weights = SourceWeights(&checkpoint);
    let of = |rows: &[Vec<u32>]| eval::perplexity(&model, &weights, rows).unwrap_err();
    assert!(matches!(of(&[]), EvalError::NoRows));
    assert!(matches!(of(&[vec![0; 4], vec![0]]), EvalError::ShortRow { row: 1, found: 1 }));
    assert!(matches!(of(&[vec![0; 2049]]), EvalError::LongRow { row: 0, expected: 2048, found: 2049 }));
    assert_eq!(
        of(&[vec![5, 4096]]).to_string(),
        "token 4096 does not exist: the vocabulary has 4096 entries"
    );
}

fn eval_command(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("exl3-candle").unwrap();
    command.current_dir(fixture("")).arg("eval").args(args).args(["--text", "corpus/persuasion.txt"]);
    command
}

fn stdout(command: &mut Command) -> Vec<u8> {
    command.assert().success().get_output().stdout.clone()
}

/// Through the program, because candle takes its number of threads from the environment.
#[test]
fn the_number_of_threads_does_not_change_a_digit() {
    let with = |threads: &str| {
        let mut command = eval_command(&["kl", MODEL, BUNDLE, "--rows", "3", "--cols", "130", "--json"]);
        stdout(command.env("RAYON_NUM_THREADS", threads))
    };
    let one = with("1");
    assert_eq!(one, with("2"));
    assert_eq!(one, with("7"));
}

#[test]
fn json_has_the_documented_keys() {
    let mut command = eval_command(&["kl", MODEL, BUNDLE, "--rows", "2", "--cols", "64", "--json"]);
    let json: Value = serde_json::from_slice(&stdout(&mut command)).unwrap();
    assert!(json["kl"]["mean"].as_f64().unwrap() > 0.01);
    assert!(json["top1"].as_f64().unwrap() < 1.0);
    assert!(json["perplexity"].as_f64().unwrap() > json["source_perplexity"].as_f64().unwrap());
    for (key, expected) in [("rows", 2), ("cols", 64), ("tokens", 128), ("positions", 128), ("bos", 0)] {
        assert_eq!(json[key], expected, "{key}");
    }
    assert_eq!(json["text_sha256"].as_str().unwrap().len(), 64);

    let mut command = eval_command(&["ppl", BUNDLE, "--rows", "2", "--cols", "64", "--json"]);
    let ppl: Value = serde_json::from_slice(&stdout(&mut command)).unwrap();
    assert_eq!(ppl["perplexity"], json["perplexity"]);
    assert_eq!(ppl["positions"], 126);
}

#[test]
fn the_window_is_printed_and_a_limit_decides_the_status() {
    let window = ["--rows", "1", "--cols", "32"];
    let mut command = eval_command(&["ppl", MODEL, "--max-perplexity", "2"]);
    let assert = command.args(window).assert().code(1);
    let text = String::from_utf8(assert.get_output().stdout.clone()).unwrap();
    assert!(text.contains("over 31 predicted tokens"), "{text}");
    assert!(text.contains("1 x 32 tokens without overlap (32), BOS: token 0 once"), "{text}");
    eval_command(&["kl", MODEL, MODEL, "--max-kl", "0"]).args(window).assert().code(0);
}

#[test]
fn errors_name_the_thing_and_exit_with_2() {
    for (args, message) in [
        (vec!["ppl", "nowhere"], "nowhere is no folder with a config.json"),
        (vec!["ppl", MODEL, "--cols", "4096"], "the model has positions for 2048"),
        (vec!["ppl", MODEL, "--rows", "100000"], "need 51200000 tokens"),
        (vec!["kl", MODEL, "micro-llama"], "different vocabularies, 4096 and"),
    ] {
        let assert = eval_command(&args).assert().code(2);
        let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert!(text.starts_with("error: ") && text.contains(message), "{text}");
        assert!(assert.get_output().stdout.is_empty());
    }
}
