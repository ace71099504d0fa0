//! The `compare` command: its numbers are those of `eval`, its report needs nothing else.

mod support;

use std::fs;
use std::path::Path;

use exl3_candle::compare::RtnWeights;
use exl3_candle::model::{Model, SourceWeights, WeightSource};
use exl3_candle::source;
use resvg::usvg::{Options, Tree};
use serde_json::{Value, json};
use support::fixture;
use support::program::{Run, program};

const WINDOW: [&str; 4] = ["--rows", "2", "--cols", "64"];
const BUNDLE: &str = "bundles/tiny-llama-exl3-3.0bpw";
const PLOTS: [&str; 6] = [
    "kl-by-size",
    "kl-by-bpw",
    "perplexity-by-size",
    "perplexity-by-bpw",
    "error-by-layer",
    "kl-by-position",
];

fn run(args: &[&str], more: &[&Path]) -> Run {
    let mut command = program(args);
    command.args(more).args(WINDOW).arg("--text").arg(fixture("corpus/persuasion.txt"));
    Run::of(&mut command)
}

#[test]
fn one_table_has_the_numbers_of_every_model() {
    let (model, bundle) = (fixture("tiny-llama"), fixture(BUNDLE));
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("new/report");
    let found = run(&["compare", "--json", "-o", out.to_str().unwrap()], &[&model, &bundle]).expect(0).json();
    let [exl3, rtn] = found["models"].as_array().unwrap().as_slice() else { panic!("{found}") };
    let kl = run(&["eval", "kl", "--json"], &[&model, &bundle]).expect(0).json();
    let layers = run(&["eval", "layers", "--json"], &[&model, &bundle]).expect(0).json();
    for key in
        ["kl", "reverse_kl", "excess_kl", "top1", "top_k", "perplexity", "by_position", "by_confidence"]
    {
        assert_eq!(exl3[key], kl[key], "{key}");
    }
    assert_eq!(exl3["layers"], layers["layers"]);
    assert_eq!(found["source"]["perplexity"], kl["source_perplexity"]);
    assert_eq!(found["source"]["bf16_floor"], kl["bf16_floor"]);
    assert_eq!((&found["rows"], &found["tokens_sha256"]), (&kl["rows"], &kl["tokens_sha256"]));
    assert_eq!((&exl3["name"], &exl3["kind"]), (&json!("tiny-llama-exl3-3.0bpw"), &json!("exl3")));
    assert_eq!(rtn["kind"], "rtn-int4-g128");
    sizes(&found["source"], exl3, rtn);

    let written: Value = serde_json::from_slice(&fs::read(out.join("comparison.json")).unwrap()).unwrap();
    assert_eq!(written, found);
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    for outside in ["<script", "http:", "https:", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "{outside}");
    }
    for inside in ["tiny-llama-exl3-3.0bpw", "2 x 64 tokens", "prefers-color-scheme", "width=device-width"] {
        assert!(page.contains(inside), "{inside}");
    }
    assert_eq!(page.matches("<svg").count(), PLOTS.len());
    for plot in PLOTS {
        let svg = fs::read_to_string(out.join(format!("plots/{plot}.svg"))).unwrap();
        Tree::from_str(&svg, &Options::default()).unwrap();
        let png = fs::read(out.join(format!("plots/{plot}.png"))).unwrap();
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n") && png.len() > 10_000, "{plot}: {}", png.len());
    }
    // A report replaces its predecessor.
    run(&["compare", "--no-baseline", "-o", out.to_str().unwrap()], &[&model, &bundle]).expect(0);
    assert!(!fs::read_to_string(out.join("report.html")).unwrap().contains("<td>rtn-int4-g128"));
}

fn sizes(source: &Value, exl3: &Value, rtn: &Value) {
    let size = |model: &Value, key: &str| model["size"][key].as_f64().unwrap();
    let checkpoint = source::open(&fixture("tiny-llama")).unwrap();
    let tensors = checkpoint.keys().map(|key| checkpoint.get(key).unwrap().bytes().len() as u64);
    assert_eq!(source["size"]["bytes"], tensors.sum::<u64>());
    assert_eq!((size(source, "bpw"), size(source, "bpw_head")), (16.0, 16.0));
    // Inputs are multiples of 128: 4 bits and 20 for every group.
    assert_eq!((size(rtn, "bpw_decoder"), size(rtn, "bpw_head")), (4.0 + 20.0 / 128.0, 16.0));
    let model = Model::from_config(checkpoint.config()).unwrap();
    let groups = (0..model.layer_count()).flat_map(|layer| model.layer_groups(layer));
    let weights: usize = groups.flat_map(|group| group.linears).map(|linear| linear.k * linear.n).sum();
    let saved = weights as f64 * (16.0 - 4.0 - 20.0 / 128.0) / 8.0;
    assert_eq!(size(rtn, "bytes"), size(source, "bytes") - saved);
    // 3 bits and two scales of f16 for every linear; the head has 6.
    assert!(
        (3.05..3.15).contains(&size(exl3, "bpw_decoder")) && (6.0..6.1).contains(&size(exl3, "bpw_head"))
    );
}

#[test]
fn the_baseline_rounds_the_decoder_and_nothing_else() {
    let checkpoint = source::open(&fixture("tiny-llama")).unwrap();
    let model = Model::from_config(checkpoint.config()).unwrap();
    let original = SourceWeights(&checkpoint);
    let rounded = RtnWeights::new(&original, &model);
    let read =
        |weights: &dyn WeightSource, linear: &str| weights.linear(linear).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(read(&rounded, "lm_head"), read(&original, "lm_head"));
    let linear = "model.layers.2.mlp.down_proj";
    for (found, source) in read(&rounded, linear).iter().zip(read(&original, linear)) {
        for (found, source) in found.chunks(128).zip(source.chunks(128)) {
            let (low, high) = source.iter().fold((0f32, 0f32), |(l, h), &w| (l.min(w), h.max(w)));
            let step = (high - low) / 15.0;
            // The scale is an f16, and the zero point is rounded.
            let bound = step * (0.5 + 0.02 + 0.5);
            assert!(found.iter().zip(source).all(|(f, s)| (f - s).abs() <= bound));
            let mut levels: Vec<f32> = found.to_vec();
            levels.sort_by(f32::total_cmp);
            levels.dedup();
            assert!((8..=16).contains(&levels.len()), "{} levels", levels.len());
        }
    }
}

#[test]
fn what_cannot_be_compared_is_refused_by_name() {
    let (model, micro) = (fixture("tiny-llama"), fixture("micro-llama"));
    run(&["compare"], &[&model, &micro]).expect(2).says(&["micro-llama cannot be compared", "vocabularies"]);
    run(&["compare"], &[&model, Path::new("nowhere")]).expect(2).says(&["nowhere is no folder"]);
    run(&["compare"], &[&model]).expect(2).says(&["<MODELS>"]);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("mine.txt"), "x").unwrap();
    let out = dir.path().to_str().unwrap();
    run(&["compare", "-o", out], &[&model, &fixture(BUNDLE)])
        .expect(2)
        .says(&["no folder of an earlier report"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
