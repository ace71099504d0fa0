//! The decision head of a dual-head model: its files, its answers, and its way through a conversion.

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use exl3_candle::judge::{self, DecisionHead};
use exl3_candle::linalg::Rng;
use exl3_candle::model::{Model, SourceWeights};
use exl3_candle::source;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};
use serde_json::{Value, json};

use support::checkpoint::TestLlama;
use support::fixture;
use support::program::{Run, program};

const SLOTS: usize = 24;
const FILES: [&str; 3] = ["head.safetensors", "judge_config.json", "calibration.json"];

/// As published models have it.
fn config(hidden: usize) -> Value {
    json!({
        "hidden_size": hidden,
        "slots": {
            "num_slots": SLOTS,
            "ranges": { "noul": [0, 2], "score": [2, 8], "choice": [8, 24] },
            "verbalizers": ["false", "true", "0", "1", "2", "3", "4", "5", "A", "B", "C", "D", "E", "F",
                "G", "H", "I", "J", "K", "L", "M", "N", "O", "P"],
            "template_version": "bare-v1",
        },
        "kinds": ["noul", "choice", "score"],
        "weights_mode": "merged",
        "adapter_subfolder": "adapter",
        "softcap": null,
    })
}

fn calibration() -> Value {
    json!({ "version": 1, "per_kind": { "noul": 1.25, "choice": 0.8, "score": 2.0 } })
}

fn write_head(dir: &Path, weight: &[f32], bias: &[f32], config: &Value, calibration: &Value) {
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let (weight_bytes, bias_bytes) = (bytes(weight), bytes(bias));
    let shape = vec![bias.len(), weight.len() / bias.len()];
    let weight = TensorView::new(Dtype::F32, shape, &weight_bytes).unwrap();
    let bias = TensorView::new(Dtype::F32, vec![bias.len()], &bias_bytes).unwrap();
    let head = serialize([("proj.weight", weight), ("proj.bias", bias)], None).unwrap();
    fs::write(dir.join("head.safetensors"), head).unwrap();
    fs::write(dir.join("judge_config.json"), config.to_string()).unwrap();
    fs::write(dir.join("calibration.json"), calibration.to_string()).unwrap();
}

fn softmax(values: &[f64]) -> Vec<f64> {
    let total: f64 = values.iter().map(|v| v.exp()).sum();
    values.iter().map(|v| v.exp() / total).collect()
}

fn assert_near(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < tolerance, "{found}, expected {expected}");
    }
}

/// Where the rows of the head are those of a tied embedding, the slots are transformers' logits.
#[test]
fn answers_agree_with_transformers() {
    let source = fixture("dense/smollm");
    let golden = candle_core::safetensors::load(source.join("golden.safetensors"), &Device::Cpu).unwrap();
    let ids: Vec<i64> = golden["input_ids"].flatten_all().unwrap().to_vec1().unwrap();
    let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
    let logits = golden["logits"].get(ids.len() - 1).unwrap().to_vec1::<f32>().unwrap();

    let checkpoint = source::open(&source).unwrap();
    let model = Model::of(&checkpoint).unwrap();
    let embedding = checkpoint.tensor("model.embed_tokens.weight").unwrap().to_f32().unwrap();
    let weight = &embedding[..SLOTS * model.hidden_size()];
    let bias: Vec<f32> = (0..SLOTS).map(|slot| slot as f32 / 10.0).collect();
    let slots: Vec<f64> = logits.iter().zip(&bias).map(|(z, b)| f64::from(z + b)).collect();

    // The shorter text beside it does not matter.
    let texts = [ids[..3].to_vec(), ids];
    let states = judge::last_states(&model, &SourceWeights(&checkpoint), &texts).unwrap();
    for cap in [None, Some(5.0)] {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(model.hidden_size());
        config["softcap"] = json!(cap);
        write_head(dir.path(), weight, &bias, &config, &calibration());
        let head = DecisionHead::open(dir.path(), model.hidden_size()).unwrap();
        let capped = |z: f64| cap.map_or(z, |cap: f64| cap * (z / cap).tanh());
        let names: Vec<&str> = head.kinds().iter().map(|kind| kind.name.as_str()).collect();
        assert_eq!(names, ["noul", "score", "choice"]);
        for (kind, (range, temperature)) in head.kinds().iter().zip([(0..2, 1.25), (2..8, 2.0), (8..24, 0.8)])
        {
            let values: Vec<f64> = slots[range].iter().map(|&z| capped(z) / temperature).collect();
            assert_near(&head.probabilities(&states[1], kind, values.len()), &softmax(&values), 1e-4);
            assert_near(&head.probabilities(&states[1], kind, 2), &softmax(&values[..2]), 1e-4);
        }
    }
}

/// A source with a random head.
fn dual_head(dir: &Path) -> PathBuf {
    let source = dir.join("source");
    let llama = TestLlama::nano();
    llama.write(&source);
    let mut rng = Rng::new(3, "head");
    let mut normal = |count: usize| (0..count).map(|_| rng.normal() / 8.0).collect::<Vec<f32>>();
    let (weight, bias) = (normal(SLOTS * llama.hidden), normal(SLOTS));
    write_head(&source, &weight, &bias, &config(llama.hidden), &calibration());
    source
}

fn run(args: &[&str], folders: &[&Path]) -> Run {
    Run::of(program(args).args(folders))
}

#[test]
fn the_head_goes_through_a_conversion_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let source = dual_head(dir.path());
    let (out, exported) = (dir.path().join("out"), dir.path().join("exported"));
    let mut command = program(["convert", "--bits", "8", "--rows", "4", "--cols", "64"]);
    command.arg(&source).arg("-o").arg(&out).arg("--calibration").arg(fixture("corpus/northanger.txt"));
    Run::of(&mut command).expect(0);
    Run::of(program(["export", "--for", "vllm"]).arg(&out).arg("-o").arg(&exported)).expect(0);
    for folder in [&out, &exported] {
        for file in FILES {
            assert!(fs::read(folder.join(file)).unwrap() == fs::read(source.join(file)).unwrap(), "{file}");
        }
        run(&["verify"], &[folder]).expect(0);
    }
    run(&["verify", "--source"], &[&source, &out]).expect(0);

    let answers = |folder: &Path| {
        let report = run(&["judge", "--json", "--text", "Is it raining?"], &[folder]).expect(0).json();
        let probability = |answer: &Value| answer["probability"].as_f64().unwrap();
        let of = |decision: &Value| decision["answers"].as_array().unwrap().iter().map(probability).collect();
        report["decisions"].as_array().unwrap().iter().map(of).collect::<Vec<Vec<f64>>>()
    };
    let (ours, theirs) = (answers(&out), answers(&source));
    assert_eq!(ours.iter().map(Vec::len).collect::<Vec<_>>(), [2, 6, 16]);
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert!((ours.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        assert_near(ours, theirs, 0.01);
    }

    let prompts = dir.path().join("prompts.jsonl");
    let lines = ["Is it late?\\nYes.", "no", "Which?"].map(|text| format!("{{\"text\": \"{text}\"}}\n"));
    fs::write(&prompts, lines.concat()).unwrap();
    let agreement = |model: &Path| {
        let command = ["eval", "judge", "--json", "--text-file", prompts.to_str().unwrap()];
        run(&command, &[&source, model]).expect(0).json()
    };
    let itself = agreement(&source);
    assert_eq!(itself["texts"], 3);
    let exact = |kind: &str| json!({ "kind": kind, "top1": 1.0, "kl_mean": 0.0, "max_difference": 0.0 });
    assert_eq!(itself["kinds"], json!([exact("noul"), exact("score"), exact("choice")]));
    for kind in agreement(&out)["kinds"].as_array().unwrap() {
        assert!((0.0..1e-4).contains(&kind["kl_mean"].as_f64().unwrap()), "{kind}");
        assert!((1e-9..0.02).contains(&kind["max_difference"].as_f64().unwrap()), "{kind}");
    }
}

#[test]
fn what_a_decision_says() {
    let dir = tempfile::tempdir().unwrap();
    let source = dual_head(dir.path());
    let text = run(&["judge", "--text", "Rain"], &[&source]).expect(0);
    let first_words: Vec<&str> =
        text.stdout.lines().step_by(2).map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(first_words, ["noul", "score", "choice"]);
    assert!(text.stdout.contains(" on average"), "{}", text.stdout);
    assert_eq!(text.stderr, "");
    let choice = ["judge", "--json", "--text", "Rain", "--kind", "choice", "--options", "3"];
    let report = run(&choice, &[&source]).expect(0).json();
    let decisions = report["decisions"].as_array().unwrap();
    assert_eq!((decisions.len(), decisions[0]["answers"].as_array().unwrap().len()), (1, 3));
    assert_eq!(report["tokens"], 5, "BOS and four characters");

    let mut unmerged = config(128);
    unmerged["weights_mode"] = json!("unmerged");
    fs::write(source.join("judge_config.json"), unmerged.to_string()).unwrap();
    let run_unmerged = run(&choice, &[&source]).expect(0);
    run_unmerged.says(&["warning", "trained with the adapter in \"adapter\"", "not applied"]);
    assert_eq!(run_unmerged.json()["adapter_missing"], "adapter");

    let refused = |args: &[&str], words: &[&str]| run(args, &[&source]).expect(2).says(words);
    refused(&["judge", "--text", "x", "--kind", "mood"], &["no kind \"mood\"", "noul, score, choice"]);
    refused(&["judge", "--text", "x", "--kind", "noul", "--options", "3"], &["noul has 2 answers, not 3"]);
    refused(&["judge", "--text", &"x".repeat(600)], &["601 tokens", "positions for 512"]);
    run(&["judge", "--text", "x"], &[&fixture("micro-llama")]).expect(2).says(&["has no decision head"]);
}

/// What the files of a head must hold.
#[test]
fn damaged_heads_are_refused_by_name() {
    type Edit = fn(&mut Value, &mut Value);
    let cases: [(Edit, &str); 12] = [
        (|c, _| c["hidden_size"] = json!(9), "judge_config.json: hidden_size: expected 8, found 9"),
        (|c, _| c["slots"]["num_slots"] = json!(23), "num_slots: expected 24, found 23"),
        (
            |c, _| c["slots"]["ranges"]["score"] = json!([1, 8]),
            "slots.ranges.score: expected slots of their own",
        ),
        (
            |c, _| c["slots"]["ranges"]["choice"] = json!([8, 25]),
            "choice: expected slots of their own below 24",
        ),
        (|c, _| c["slots"]["ranges"]["choice"] = json!([8, 8]), "found [8,8]"),
        (|c, _| c["slots"]["ranges"]["noul"] = json!("0-2"), "slots.ranges.noul: expected [begin, end]"),
        (|c, _| c["slots"]["verbalizers"] = json!(["a"]), "slots.verbalizers: expected 24 strings"),
        (|c, _| c["softcap"] = json!(-1), "softcap: expected a number above zero, found -1"),
        (|c, _| c["readout"] = json!({"type": "canvas"}), "readout.type: expected \"last_token\""),
        (|_, t| t["per_kind"]["noul"] = json!(0), "calibration.json: noul: expected a number above zero"),
        (|_, t| t["per_kind"]["noul"] = Value::Null, "per_kind.noul: expected a temperature"),
        (|_, t| *t = json!({}), "calibration.json: per_kind: expected a temperature for every kind"),
    ];
    let dir = tempfile::tempdir().unwrap();
    let (weight, bias) = ([0.5; SLOTS * 8], [0.0; SLOTS]);
    let open = || DecisionHead::open(dir.path(), 8).map_err(|error| error.to_string());
    for (edit, expected) in cases {
        let (mut config, mut calibration) = (config(8), calibration());
        edit(&mut config, &mut calibration);
        write_head(dir.path(), &weight, &bias, &config, &calibration);
        let error = open().unwrap_err();
        assert!(error.contains(expected), "{error}: expected {expected}");
    }
    write_head(dir.path(), &weight[..SLOTS * 4], &bias, &config(8), &calibration());
    assert!(open().unwrap_err().contains("\"proj.weight\": expected F32 [24, 8], found F32 [24, 4]"));
    write_head(dir.path(), &[f32::NAN; SLOTS * 8], &bias, &config(8), &calibration());
    assert!(open().unwrap_err().contains("NaN at 0"));
    let half = Tensor::zeros((SLOTS, 8), DType::F16, &Device::Cpu).unwrap();
    candle_core::safetensors::save(&[("proj.weight", half)].into(), dir.path().join("head.safetensors"))
        .unwrap();
    assert!(open().unwrap_err().contains("\"proj.bias\": expected F32 [slots], found nothing"));
    for file in FILES {
        write_head(dir.path(), &weight, &bias, &config(8), &calibration());
        fs::remove_file(dir.path().join(file)).unwrap();
        assert!(open().unwrap_err().contains(&format!("has no decision head: {file} is missing")));
    }
    // Without a layout, the usual one.
    write_head(dir.path(), &weight, &bias, &json!({}), &calibration());
    let head = open().unwrap();
    assert_eq!(head.kinds()[2].labels[15], "P");
    assert_eq!(head.kinds()[1].expected(&[0.5, 0.0, 0.0, 0.0, 0.0, 0.5]), Some(2.5));
    assert_eq!(head.kinds()[0].expected(&[0.5, 0.5]), None);
}
