//! Qwen3.5 hybrids: the trained model against independent measurements, and small ones in every
//! container, converted.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{D, Tensor};
use exl3_candle::corpus::{self, Shape};
use exl3_candle::eval::{self, Protocol, Subject, Windows};
use exl3_candle::model::{Model, ModelError, NoTap, SourceWeights, Tap, WeightSource};
use exl3_candle::plan::{self, Plan, Recipe, UnitKind};
use exl3_candle::quantize::OutScales;
use exl3_candle::source::{self, Checkpoint};
use serde_json::{Value, json};
use support::fixture;
use support::hybrid::{Container, TestHybrid};
use support::program::{Run, names, program, read_json};

fn persuasion(rows: usize, cols: usize) -> Vec<Vec<u32>> {
    let tokenizer = corpus::load_tokenizer(&fixture("tiny-llama")).unwrap();
    let text = fixture("corpus/persuasion.txt");
    corpus::from_file(&tokenizer, &text, Shape { rows, cols }, 4096).unwrap().rows().to_vec()
}

/// `fixtures/tiny-qwen3_5/reference_ppl.json`: an f32 forward of transformers. A row knows nothing
/// of the others, so no state of a convolution or recurrence is carried over.
#[test]
fn perplexity_is_that_of_transformers_in_any_order_of_rows() {
    let checkpoint = source::open(&support::tiny_qwen3_5()).unwrap();
    let model = Model::of(&checkpoint).unwrap();
    let subject = Subject { model: &model, weights: &SourceWeights(&checkpoint) };
    let windows = |rows: &[Vec<u32>]| Windows::new(Protocol::Rows, rows.to_vec(), None);
    let of = |rows: &[Vec<u32>]| eval::perplexity(subject, &windows(rows)).unwrap();
    let mut rows = persuasion(8, 512);
    let found = of(&rows).perplexity;
    assert!((found / 65.62688811591818 - 1.0).abs() < 1e-3, "perplexity {found}");
    rows.swap(0, 5);
    rows.rotate_left(3);
    let moved = of(&rows).perplexity;
    assert!((moved / found - 1.0).abs() < 1e-12, "{moved} instead of {found}");
}

/// A converted checkpoint of a container.
struct Converted {
    dir: tempfile::TempDir,
    run: Run,
}

fn convert(hybrid: &TestHybrid) -> Converted {
    let dir = tempfile::tempdir().unwrap();
    hybrid.write(&dir.path().join("source"));
    let mut command = program(["convert", "--json", "--bits", "3", "--head-bits", "4", "--rows", "4"]);
    command.args(["--cols", "96", "--calibration"]).arg(fixture("corpus/northanger.txt"));
    command.arg(dir.path().join("source")).arg("--output").arg(dir.path().join("out"));
    let run = Run::of(&mut command).expect(0);
    Converted { dir, run }
}

impl Converted {
    fn bundle(&self) -> Checkpoint {
        source::open(&self.dir.path().join("out")).unwrap()
    }

    fn manifest(&self) -> Value {
        read_json(&self.dir.path().join("out/quantization_config.json"))
    }

    /// Every tensor of the quantized modules, under the name it has in a plain text model.
    fn quantized(&self, prefix: &str) -> BTreeMap<String, Vec<u8>> {
        let bundle = self.bundle();
        let module_of = |key: &str| key.rsplit_once('.').unwrap().0.to_owned();
        let is_quantized = |key: &str| bundle.get(&format!("{}.trellis", module_of(key))).is_some();
        let plain = |key: &str| match key.strip_prefix(prefix) {
            Some(rest) => format!("model.{rest}"),
            None => key.to_owned(),
        };
        let keys = bundle.keys().filter(|key| is_quantized(key));
        keys.map(|key| (plain(key), bundle.get(key).unwrap().bytes().to_vec())).collect()
    }
}

#[test]
fn every_container_gives_the_same_quantized_bytes_and_loses_nothing() {
    // A prediction head as declared, one that is declared only, and none.
    let all: Vec<(Container, Converted)> = [(1, 1), (0, 1), (0, 0)]
        .into_iter()
        .zip(Container::ALL)
        .map(|((mtp_layers, declared_mtp_layers), container)| {
            let hybrid = TestHybrid { mtp_layers, declared_mtp_layers, ..TestHybrid::new(container) };
            (container, convert(&hybrid))
        })
        .collect();
    let mut expected = all[0].1.quantized(Container::Nested.prefix());
    assert!(expected.contains_key("mtp.fc.trellis"));
    assert_eq!(all[0].1.manifest()["tensor_storage"]["mtp.fc"]["bits_per_weight"], 4);
    assert_eq!(all[0].1.manifest()["tensor_storage"]["mtp.norm"]["quant_format"], Value::Null);
    expected.retain(|key, _| !key.starts_with("mtp."));
    assert!(expected.contains_key("model.layers.0.linear_attn.in_proj_z.trellis"));
    for (container, converted) in &all {
        let mut quantized = converted.quantized(container.prefix());
        quantized.retain(|key, _| !key.starts_with("mtp."));
        assert!(quantized == expected, "{container:?}");
        assert_eq!(converted.run.json()["left_out"], json!([]), "{container:?}");
        assert!(!converted.run.stderr.contains("without calibration"), "{}", converted.run.stderr);
        let is_noted = converted.run.stderr.contains("the bundle's config.json says 0");
        assert_eq!(is_noted, *container == Container::Flat, "{}", converted.run.stderr);
        assert_whole(*container, converted);
    }
    assert_measured(&all);
    assert_exported(&all);
    // The same weights under other names are the same source.
    let nested = tempfile::tempdir().unwrap();
    TestHybrid { mtp_layers: 0, ..TestHybrid::new(Container::Nested) }.write(nested.path());
    let bundle = all[2].1.dir.path().join("out");
    assert_verified(&bundle, nested.path());
    list_as_the_reference_does(&bundle);
    assert_verified(&bundle, nested.path());
}

/// The reference lists leaf modules only, to which a convolution does not count, and has no record
/// like ours.
fn list_as_the_reference_does(bundle: &Path) {
    let path = bundle.join("quantization_config.json");
    let mut manifest = read_json(&path);
    let storage = manifest["tensor_storage"].as_object_mut().unwrap();
    let listed = storage.len();
    storage.retain(|module, _| !module.ends_with(".linear_attn") && !module.ends_with(".conv1d"));
    assert_eq!(storage.len(), listed - 2);
    std::fs::write(&path, manifest.to_string()).unwrap();
    std::fs::remove_file(bundle.join("exl3-candle.json")).unwrap();
}

fn assert_verified(bundle: &Path, source: &Path) {
    let mut command = program(["verify", "--json"]);
    command.arg(bundle).arg("--source").arg(source);
    assert_eq!(Run::of(&mut command).expect(0).json()["failures"], json!([]));
}

/// All tensors are there and listed, those of the vision tower in a file of their own.
fn assert_whole(container: Container, converted: &Converted) {
    let dir = converted.dir.path();
    assert_verified(&dir.join("out"), &dir.join("source"));

    let storage = &converted.manifest()["tensor_storage"];
    let listed: Vec<&String> = storage
        .as_object()
        .unwrap()
        .values()
        .flat_map(|m| m["stored_tensors"].as_object().unwrap().keys())
        .collect();
    let bundle = converted.bundle();
    assert!(bundle.keys().eq({
        let mut listed = listed.clone();
        listed.sort();
        listed.into_iter().map(String::as_str)
    }));
    let config = bundle.config();
    let text = if container == Container::Flat { config } else { &config["text_config"] };
    assert_eq!(text["mtp_num_hidden_layers"], i32::from(container == Container::Nested));
    let files: Vec<String> =
        names(&dir.join("out")).into_iter().filter(|name| name.ends_with(".safetensors")).collect();
    if container == Container::Flat {
        assert_eq!(files, ["model.safetensors"]);
        return;
    }
    assert_eq!(files, ["model.safetensors", "vision.safetensors"]);
    let index = read_json(&dir.join("out/model.safetensors.index.json"));
    for (tensor, file) in index["weight_map"].as_object().unwrap() {
        assert_eq!(file == "vision.safetensors", tensor.contains(".visual."), "{tensor}");
    }
}

/// A bundle is measured against a source with other names as against its own.
fn assert_measured(all: &[(Container, Converted)]) {
    let kl = |source: usize, bundle: usize| {
        let mut command = program(["eval", "kl", "--json", "--rows", "2", "--cols", "64", "--text"]);
        command.arg(fixture("corpus/persuasion.txt")).arg(all[source].1.dir.path().join("source"));
        Run::of(command.arg(all[bundle].1.dir.path().join("out"))).expect(0).json()
    };
    let own = kl(0, 0);
    let mean = own["kl"]["mean"].as_f64().unwrap();
    assert!(mean > 0.0 && mean < 1.0, "{mean}");
    for (source, bundle) in [(0, 1), (1, 2), (2, 0)] {
        assert_eq!(kl(source, bundle)["kl"], own["kl"]);
    }
}

/// Whatever the container, one runtime finds everything under the same names.
fn assert_exported(all: &[(Container, Converted)]) {
    let mut texts = Vec::new();
    for (container, converted) in all {
        let (bundle, out) = (converted.dir.path().join("out"), converted.dir.path().join("exported"));
        Run::of(program(["export", "--for", "exllamav3"]).arg(bundle).arg("-o").arg(&out)).expect(0);
        assert_verified(&out, &converted.dir.path().join("source"));
        let exported = source::open(&out).unwrap();
        let others = ["model.language_model.", "model.visual.", "mtp.", "lm_head."];
        assert!(exported.keys().all(|key| others.iter().any(|prefix| key.starts_with(prefix))));
        let has_vision = exported.keys().any(|key| key.starts_with("model.visual."));
        assert_eq!(has_vision, *container != Container::Flat);
        Model::of(&exported).unwrap().check(&exported).unwrap();
        let is_text = |key: &&str| key.starts_with("model.language_model.") || key.starts_with("lm_head.");
        let bytes = |key: &str| (key.to_owned(), exported.get(key).unwrap().bytes().to_vec());
        texts.push(exported.keys().filter(is_text).map(bytes).collect::<BTreeMap<_, _>>());
    }
    assert!(texts.iter().all(|text| *text == texts[0]));
}

fn plan_of(hybrid: &TestHybrid, mtp_bits: Option<&str>) -> Plan {
    let dir = tempfile::tempdir().unwrap();
    hybrid.write(dir.path());
    let checkpoint = source::open(dir.path()).unwrap();
    let recipe = Recipe {
        bits: "3".parse().unwrap(),
        head_bits: None,
        mtp_bits: mtp_bits.map(|bits| bits.parse().unwrap()),
        codebook: "mul1".parse().unwrap(),
        out_scales: OutScales::Auto,
        seed: 0,
    };
    plan::build(&Model::of(&checkpoint).unwrap(), &checkpoint, recipe).unwrap()
}

#[test]
fn a_head_that_is_not_quantized_or_not_there_is_planned_and_told() {
    let hybrid = TestHybrid::new(Container::Nested);
    let plan = plan_of(&hybrid, Some("2.5"));
    assert_eq!(plan.units.last().map(|unit| unit.kind), Some(UnitKind::Mtp));
    assert_eq!((plan.notes.len(), plan.mtp_layers), (0, None));

    let plan = plan_of(&hybrid, None);
    assert!(plan.units.iter().all(|unit| unit.kind != UnitKind::Mtp));
    assert!(plan.passthrough.iter().any(|key| key == "mtp.fc.weight"));
    assert_eq!((plan.mtp, plan.left_out), (None, Vec::new()));

    let plan = plan_of(&TestHybrid { declared_mtp_layers: 0, ..hybrid.clone() }, Some("4"));
    assert!(plan.notes[0].contains("mtp_num_hidden_layers is 0"), "{:?}", plan.notes);
    assert_eq!((plan.mtp.as_deref(), plan.mtp_layers), (Some("mtp"), Some(1)));

    let plan = plan_of(&TestHybrid { mtp_layers: 0, ..hybrid }, Some("4"));
    assert!(plan.notes[0].contains("mtp_num_hidden_layers is 1"), "{:?}", plan.notes);
    assert_eq!((plan.mtp, plan.mtp_layers), (None, Some(0)));
}

#[test]
fn the_head_is_tied_by_a_flag_at_either_level() {
    for tied in [[Some(true), None], [None, Some(true)], [Some(true), Some(true)]] {
        let plan = plan_of(&TestHybrid { tied, ..TestHybrid::new(Container::Nested) }, Some("4"));
        assert!(plan.passthrough.iter().all(|key| !key.starts_with("lm_head")));
    }
    let contradictory = TestHybrid { tied: [Some(true), Some(false)], ..TestHybrid::new(Container::Nested) };
    let error = Model::from_config(&contradictory.config()).unwrap_err().to_string();
    assert!(error.contains("tie_word_embeddings"), "{error}");
}

/// The inputs of the linears, in order.
#[derive(Default)]
struct Inputs(Vec<(String, Tensor)>);

impl Tap for Inputs {
    fn input(&mut self, linears: &[String], x: &Tensor) -> Result<(), ModelError> {
        self.0.push((linears[0].clone(), x.clone()));
        Ok(())
    }

    fn gated(&mut self, _: &str, _: &str, _: &Tensor, _: &Tensor) -> Result<(), ModelError> {
        Ok(())
    }
}

/// `(1 + w) x / rms(x)`
fn offset_norm(w: &dyn WeightSource, key: &str, x: &Tensor) -> candle_core::Result<Tensor> {
    let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?;
    x.broadcast_div(&rms)?.broadcast_mul(&(w.tensor(key).unwrap() + 1.0)?)
}

#[test]
fn a_prediction_head_sees_the_next_embedding_and_the_normed_state() {
    let dir = tempfile::tempdir().unwrap();
    TestHybrid::new(Container::Nested).write(dir.path());
    let checkpoint = source::open(dir.path()).unwrap();
    let (model, w) = (Model::of(&checkpoint).unwrap(), SourceWeights(&checkpoint));
    let (x, next) = (model.embed(&w, &[3, 9, 50]).unwrap(), model.embed(&w, &[9, 50, 7]).unwrap());
    let x = model.layer(&w, 0).unwrap().forward(&x, &mut NoTap).unwrap();
    let mut seen = Inputs::default();
    let y = model.mtp(&w).unwrap().forward(&x, &next, &mut seen).unwrap();
    assert_eq!(y.dims(), [3, 128]);

    let state = offset_norm(&w, "model.language_model.norm.weight", &x).unwrap();
    let state = offset_norm(&w, "mtp.pre_fc_norm_hidden.weight", &state).unwrap();
    let next = offset_norm(&w, "mtp.pre_fc_norm_embedding.weight", &next).unwrap();
    let expected = Tensor::cat(&[next, state], 1).unwrap();
    let difference = (&seen.0[0].1 - expected).unwrap().abs().unwrap().flatten_all().unwrap();
    assert!(difference.max(0).unwrap().to_scalar::<f32>().unwrap() < 1e-5);
    let names: Vec<&str> = seen.0.iter().map(|(name, _)| name.as_str()).collect();
    let layer = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"];
    let layer = layer.map(|name| format!("mtp.layers.0.{name}"));
    assert_eq!(names[0], "mtp.fc");
    assert_eq!(names[1..], layer);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let with = |path: &str, value: Value| {
        let mut config = TestHybrid::new(Container::Nested).config();
        *config.pointer_mut(path).unwrap() = value;
        Model::from_config(&config).unwrap_err().to_string()
    };
    for (path, value, words) in [
        (
            "/architectures",
            json!(["Qwen3_5MoeForConditionalGeneration"]),
            ["Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration"],
        ),
        ("/architectures", json!(["Qwen3_5MoeForCausalLM"]), ["Qwen3_5MoeForCausalLM", "LlamaForCausalLM"]),
        ("/architectures", json!(["Qwen3NextForCausalLM"]), ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"]),
        ("/model_type", json!("qwen3_5_moe"), ["model_type \"qwen3_5_moe\"", "qwen3_5"]),
        ("/text_config/hidden_act", json!("gelu"), ["text_config.hidden_act \"gelu\"", "silu"]),
        (
            "/text_config/rope_parameters/rope_type",
            json!("yarn"),
            ["text_config.rope_parameters.rope_type \"yarn\"", "default"],
        ),
        ("/text_config/linear_num_value_heads", json!(0), ["linear_num_value_heads", "above zero"]),
        ("/text_config/full_attention_interval", json!(0), ["full_attention_interval", "above zero"]),
    ] {
        let error = with(path, value);
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let mut config = TestHybrid::new(Container::Flat).config();
    config["layer_types"] = json!(["linear_attention", "sliding_attention"]);
    let error = Model::from_config(&config).unwrap_err().to_string();
    assert!(error.contains("layer_types") && error.contains("sliding_attention"), "{error}");
}
