//! Perplexity and divergence against independent measurements, and the `eval` commands.

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use exl3_candle::corpus::{self, Shape};
use exl3_candle::eval::{self, EvalError, Identity, KlReport, Protocol, Reference, Subject, Windows};
use exl3_candle::model::{Model, SourceWeights, open_weights};
use exl3_candle::source::{self, Checkpoint};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

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
    let source = Reference::compute(Subject { model: &p_model, weights: p.as_ref() }, rows).unwrap();
    eval::kl(&source, Subject { model: &q_model, weights: q.as_ref() }, rows, 5).unwrap()
}

fn windows(rows: &[Vec<u32>]) -> Windows {
    Windows::new(Protocol::Rows, rows.to_vec(), None)
}

fn assert_within(found: f64, expected: f64, relative: f64) {
    assert!((found / expected - 1.0).abs() < relative, "found {found}, expected {expected}");
}

/// `fixtures/tiny-llama/reference_ppl.json`: an f32 forward of transformers.
#[test]
fn perplexity_of_the_source_is_that_of_transformers() {
    let (checkpoint, model) = open(MODEL);
    let subject = Subject { model: &model, weights: &SourceWeights(&checkpoint) };
    let report = eval::perplexity(subject, &windows(&persuasion(8, 512))).unwrap();
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
        assert_eq!((report.kl.mean, report.kl.max, report.reverse.max), (0.0, 0.0, 0.0));
        assert_eq!((report.top1, report.top_k.agreement), (1.0, 1.0));
        assert!(report.floor.mean > 0.0 && report.floor.mean < 0.01, "{:?}", report.floor);
        assert_eq!(report.source, report.quantized);
    }
}

#[test]
fn the_order_of_rows_does_not_matter() {
    let rows = persuasion(5, 64);
    let moved: Vec<_> = [3, 0, 4, 2, 1].map(|row: usize| rows[row].clone()).into();
    let (a, b) = (divergence(MODEL, BUNDLE, &rows), divergence(MODEL, BUNDLE, &moved));
    assert_eq!(a, b);
    // Rows of other tokens do matter.
    let other = divergence(MODEL, BUNDLE, &rows[1..]);
    assert!((other.kl.mean / a.kl.mean - 1.0).abs() > 1e-6);
}

#[test]
fn rows_that_cannot_be_measured_are_named() {
    let (checkpoint, model) = open(MODEL);
    let weights = SourceWeights(&checkpoint);
    let subject = Subject { model: &model, weights: &weights };
    let of = |rows: &[Vec<u32>]| eval::perplexity(subject, &windows(rows)).unwrap_err();
    assert!(matches!(of(&[]), EvalError::NoRows));
    assert!(matches!(of(&[vec![0; 4], vec![0]]), EvalError::ShortRow { row: 1, found: 1 }));
    assert!(matches!(of(&[vec![0; 2049]]), EvalError::LongRow { row: 0, expected: 2048, found: 2049 }));
    assert_eq!(
        of(&[vec![5, 4096]]).to_string(),
        "token 4096 does not exist: the vocabulary has 4096 entries"
    );
    let two_columns = Windows::new(Protocol::LlamaCpp, vec![vec![1, 2]], None);
    assert!(matches!(eval::perplexity(subject, &two_columns), Err(EvalError::NothingScored)));
}

/// A file of logits and what follows from it, computed the plainest way.
struct Exported(Vec<Vec<f64>>);

impl Exported {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let logits = tensors.tensor("logits").unwrap();
        let vocab = logits.shape()[2];
        let logits: Vec<f64> =
            logits.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b).into()).collect();
        let rows = logits.chunks(vocab).map(|row| {
            let normalizer = row.iter().map(|x| x.exp()).sum::<f64>().ln();
            row.iter().map(|x| x - normalizer).collect()
        });
        Self(rows.collect())
    }

    fn kl(&self, other: &Exported) -> Vec<f64> {
        let kl = |(p, q): (&Vec<f64>, &Vec<f64>)| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum();
        self.0.iter().zip(&other.0).map(kl).collect()
    }

    fn top(&self, position: usize, k: usize) -> Vec<usize> {
        let row = &self.0[position];
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        order.truncate(k);
        order
    }
}

fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.into_iter().collect();
    values.iter().sum::<f64>() / values.len() as f64
}

fn assert_close(found: &Value, expected: f64) {
    assert!((found.as_f64().unwrap() - expected).abs() < 1e-6, "found {found}, expected {expected}");
}

#[test]
fn statistics_are_those_of_the_exported_logits() {
    let dir = tempfile::tempdir().unwrap();
    let export = |source: &str, file: &str| {
        let file = dir.path().join(file);
        let args = ["kl", source, BUNDLE, "--rows", "2", "--cols", "96", "--json", "--top-k", "3"];
        let out = stdout(eval_command(&args).arg("--source-logits").arg(&file));
        (Exported::read(&file), serde_json::from_slice::<Value>(&out).unwrap())
    };
    let ((p, json), (q, _)) = (export(MODEL, "p"), export(BUNDLE, "q"));
    let (kl, reverse) = (p.kl(&q), q.kl(&p));
    assert_close(&json["kl"]["mean"], mean(kl.iter().copied()));
    assert_close(&json["reverse_kl"]["mean"], mean(reverse));
    let mut sorted = kl.clone();
    sorted.sort_by(f64::total_cmp);
    for (key, rank) in [("median", 96), ("p90", 172), ("p99", 189), ("max", 191)] {
        assert_close(&json["kl"][key], sorted[rank]);
    }
    let share = |k: usize| {
        mean((0..192).map(|t| {
            let q = q.top(t, k);
            p.top(t, k).iter().filter(|token| q.contains(token)).count() as f64 / k as f64
        }))
    };
    assert_close(&json["top1"], share(1));
    assert_close(&json["top_k"]["agreement"], share(3));
    let tokens = persuasion(2, 96).concat();
    let predicting = (0..191).filter(|t| t % 96 != 95);
    assert_close(&json["perplexity"], mean(predicting.map(|t| -q.0[t][tokens[t + 1] as usize])).exp());
    // Positions 0 to 5 of both rows, and those where the source is sure.
    assert_eq!(
        (&json["by_position"][0]["to"], &json["by_position"][0]["positions"]),
        (&json!(6), &json!(12))
    );
    assert_close(&json["by_position"][0]["kl"], mean([&kl[..6], &kl[96..102]].concat()));
    let sure = (0..192).filter(|&t| p.0[t][p.top(t, 1)[0]].exp() >= 0.9);
    assert_close(&json["by_confidence"][5]["kl"], mean(sure.map(|t| kl[t])));
}

#[test]
fn a_file_of_logits_changes_no_digit_and_is_refused_for_anything_else() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("logits");
    let kl = |source: &str, cols: &str| {
        let mut command = eval_command(&["kl", source, BUNDLE, "--rows", "2", "--json", "--cols", cols]);
        command.arg("--source-logits").arg(&file);
        command
    };
    let without = stdout(&mut eval_command(&["kl", MODEL, BUNDLE, "--rows", "2", "--cols", "40", "--json"]));
    assert_eq!(stdout(&mut kl(MODEL, "40")), without, "written");
    assert_eq!(stdout(&mut kl(MODEL, "40")), without, "read");
    for (mut command, field) in
        [(kl(BUNDLE, "40"), "source_sha256"), (kl(MODEL, "41"), "cols: expected 41, found 40")]
    {
        let text = String::from_utf8(command.assert().code(2).get_output().stderr.clone()).unwrap();
        assert!(text.contains("made for another") && text.contains(field), "{text}");
    }
    let whole = std::fs::read(&file).unwrap();
    let damaged = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        let stderr = kl(MODEL, "40").assert().code(2).get_output().stderr.clone();
        assert!(String::from_utf8(stderr).unwrap().contains("damaged"));
    };
    damaged(&whole[..whole.len() - 8]);
    damaged(b"text");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 0x40;
    damaged(&flipped);
}

/// A file of 5 GiB, of which one position is written.
#[test]
fn a_file_of_logits_may_be_larger_than_4_gib() {
    use std::os::unix::fs::FileExt;

    let (vocab, rows, cols) = (1 << 20, 5, 256);
    let identity = Identity { source_sha256: "s".into(), tokens_sha256: "t".into(), rows, cols, vocab };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("logits");
    let header = identity.header();
    let [logits, checksums, floor] = identity.tensor_bytes();
    assert!(logits > 4 << 30);
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(header.len() as u64 + logits + checksums + floor).unwrap();
    file.write_all_at(&header, 0).unwrap();
    let last = (rows * cols - 1) as u64;
    let start = header.len() as u64;
    let row: Vec<u8> = (0..vocab).flat_map(|i| if i == 7 { 30f32 } else { 0.0 }.to_le_bytes()).collect();
    file.write_all_at(&row, start + last * vocab as u64 * 4).unwrap();
    let checksum: [u8; 32] = Sha256::digest(&row).into();
    file.write_all_at(&checksum[..8], start + logits + last * 8).unwrap();
    let reference = Reference::open(&path, &identity).unwrap();
    let read = reference.logits().block(rows - 1, cols - 1..cols).unwrap();
    assert_eq!((read.len(), read[6], read[7]), (vocab, 0.0, 30.0));
    assert!(reference.logits().block(0, 0..1).is_err(), "was never written");
}

/// A copy of the tiny model whose tokenizer is edited; the weights are links.
fn with_tokenizer_config(edit: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(MODEL)).unwrap() {
        let path = entry.unwrap().path();
        std::os::unix::fs::symlink(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = dir.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(path, config.to_string()).unwrap();
    dir
}

#[test]
fn each_protocol_has_its_window_and_its_bos() {
    let no_bos = with_tokenizer_config(|config| config["add_bos_token"] = false.into());
    let text = std::fs::read_to_string(fixture("corpus/persuasion.txt")).unwrap();
    let doubled = no_bos.path().join("doubled.txt");
    std::fs::write(&doubled, format!("<|begin_of_text|>{text}")).unwrap();
    let ppl = |model: &Path, text: &Path, more: &str| {
        let mut command = Command::cargo_bin("exl3-candle").unwrap();
        command.args(["eval", "ppl", "--json"]).arg(model).arg("--text").arg(text);
        serde_json::from_slice::<Value>(&stdout(command.args(more.split(' ')))).unwrap()
    };
    let (model, text) = (fixture(MODEL), fixture("corpus/persuasion.txt"));
    let llama_cpp = "--protocol llama.cpp --rows 3 --cols 64";
    let with = ppl(&model, &text, llama_cpp);
    let rule = "token 0 in place of the first token of every row";
    for (key, expected) in [
        ("protocol", json!("llama.cpp")),
        ("bos", json!(0)),
        ("bos_rule", json!(rule)),
        ("positions", json!(3 * 31)),
        ("first_scoring", json!(32)),
        ("stride", json!(64)),
    ] {
        assert_eq!(with[key], expected, "{key}");
    }
    // The same by hand.
    let mut rows = persuasion(3, 64);
    rows.iter_mut().for_each(|row| row[0] = 0);
    let (checkpoint, opened) = open(MODEL);
    let subject = Subject { model: &opened, weights: &SourceWeights(&checkpoint) };
    let all = Windows::new(Protocol::LlamaCpp, rows, None);
    assert_close(&with["perplexity"], eval::perplexity(subject, &all).unwrap().perplexity);
    // One BOS, whether or not the text brings its own; none where the tokenizer wants none.
    assert_eq!(ppl(&model, &doubled, llama_cpp)["tokens_sha256"], with["tokens_sha256"]);
    let without = ppl(no_bos.path(), &text, llama_cpp);
    assert_eq!((&without["bos"], &without["bos_rule"]), (&Value::Null, &json!("none")));
    assert_ne!(without["tokens_sha256"], with["tokens_sha256"]);
    // Rows tokenized elsewhere get it too.
    let rows = no_bos.path().join("rows.json");
    std::fs::write(&rows, json!({ "rows": persuasion(3, 64) }).to_string()).unwrap();
    let given = ppl(&model, &rows, llama_cpp);
    assert_eq!((&given["perplexity"], &given["bos_rule"]), (&with["perplexity"], &with["bos_rule"]));
    // As many whole rows as there are.
    let short = no_bos.path().join("short.txt");
    std::fs::write(&short, &std::fs::read_to_string(&text).unwrap()[..4000]).unwrap();
    let found = ppl(&model, &short, "--protocol exllamav3 --cols 200");
    assert!((4..10).contains(&found["rows"].as_u64().unwrap()), "{found}");
    assert_eq!(found["positions"], found["rows"].as_u64().unwrap() * 199);
}

/// Bits of all scored tokens over the bytes of their text.
#[test]
fn bits_per_byte_count_the_bytes_of_the_text() {
    let json: Value = serde_json::from_slice(&stdout(&mut eval_command(&[
        "ppl", MODEL, "--rows", "1", "--cols", "200", "--json",
    ])))
    .unwrap();
    let tokenizer = corpus::load_tokenizer(&fixture(MODEL)).unwrap();
    let text = tokenizer.decode(&persuasion(1, 200)[0][1..]).unwrap();
    assert!(std::fs::read_to_string(fixture("corpus/persuasion.txt")).unwrap().contains(text.trim()));
    let bits = json["nll_mean"].as_f64().unwrap() * 199.0 / std::f64::consts::LN_2;
    assert_close(&json["bits_per_byte"], bits / text.len() as f64);
}

#[test]
fn a_layer_that_is_changed_is_where_quality_is_lost() {
    let probes = |model: &str| {
        let out =
            stdout(&mut eval_command(&["layers", MODEL, model, "--rows", "2", "--cols", "64", "--json"]));
        serde_json::from_slice::<Value>(&out).unwrap()["layers"].clone()
    };
    let same = probes(MODEL);
    assert_eq!(same.as_array().unwrap().len(), 6);
    for probe in same.as_array().unwrap() {
        assert_eq!((&probe["relative_error"], &probe["sqnr_db"]), (&json!(0.0), &Value::Null));
        assert_close(&probe["cosine"], 1.0);
    }
    let bundle = probes(BUNDLE);
    let number = |layer: usize, key: &str| bundle[layer][key].as_f64().unwrap();
    assert_eq!(number(0, "relative_error"), number(0, "relative_error_alone"), "nothing came before");
    for layer in 1..6 {
        assert!(number(layer, "relative_error") > number(layer - 1, "relative_error"));
        assert!(number(layer, "relative_error") > number(layer, "relative_error_alone"));
        let sqnr = -20.0 * number(layer, "relative_error").log10();
        assert!((number(layer, "sqnr_db") - sqnr).abs() < 1e-9);
    }
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
        (vec!["ppl", MODEL, "--protocol", "llama.cpp", "--rows", "1000"], "need 512000 tokens"),
        (vec!["ppl", MODEL, "--protocol", "llama.cpp", "--cols", "1000000"], "need 1000000 tokens"),
        (vec!["ppl", MODEL, "--protocol", "llama.cpp", "--cols", "2"], "no token of these rows is scored"),
        (vec!["ppl", MODEL, "--protocol", "exllamav3", "--cols", "0"], "no corpus"),
        (vec!["kl", MODEL, "micro-llama"], "different vocabularies, 4096 and"),
    ] {
        let assert = eval_command(&args).assert().code(2);
        let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
        assert!(text.starts_with("error: ") && text.contains(message), "{text}");
        assert!(assert.get_output().stdout.is_empty());
    }
}
