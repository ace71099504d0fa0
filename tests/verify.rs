//! `verify`: passes what is right, names what is not.

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use exl3_candle::bundle::{
    BundleContent, JobSpec, Opened, Overwrite, Shard, TensorMetrics, default_work_dir, list_files, open_job,
    read_linear,
};
use exl3_candle::format::{Bits, Codebook, QuantizedLinear};
use exl3_candle::source;
use exl3_candle::verify::{self, VerifyReport};
use half::f16;
use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize};
use serde_json::{Value, json};
use tempfile::TempDir;

const Q_PROJ: &str = "model.layers.1.self_attn.q_proj";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn reference() -> PathBuf {
    fixture("bundles/tiny-llama-exl3-3.0bpw")
}

fn run(bundle: &Path) -> VerifyReport {
    verify::run(bundle, Some(&fixture("tiny-llama"))).unwrap()
}

/// A copy of the reference's bundle.
fn reference_copy() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in list_files(&reference()).unwrap() {
        fs::write(dir.path().join(&name), fs::read(reference().join(&name)).unwrap()).unwrap();
    }
    dir
}

/// The reference's linears in a bundle of our own making, in several shards.
fn own_bundle(dir: &Path) -> PathBuf {
    let checkpoint = source::open(&fixture("tiny-llama")).unwrap();
    let reference = Shard::open(&self::reference().join("model.safetensors")).unwrap();
    let errors = run(&self::reference()).tensors;
    let (mut units, mut modules) = (vec![Vec::new(); 7], Vec::new());
    let mut passthrough = Vec::new();
    for name in checkpoint.keys() {
        let module = name.strip_suffix(".weight").unwrap();
        modules.push(module.to_owned());
        if reference.get(&format!("{module}.trellis")).is_none() {
            passthrough.push(name.to_owned());
            continue;
        }
        let layer = module.split('.').nth(2).map_or(6, |layer| layer.parse().unwrap());
        units[layer].push(read_linear(&reference, module).unwrap());
    }
    let out = dir.join("own");
    let recipe = json!({ "bits": "3" }).as_object().unwrap().clone();
    let spec = JobSpec { work: default_work_dir(&out), out, recipe, overwrite: Overwrite::Refuse };
    let Opened::Fresh(mut writer) = open_job(spec).unwrap() else { panic!("not fresh") };
    for (i, unit) in units.iter().enumerate() {
        let metrics = unit.iter().map(|linear| metrics_of(linear, &errors));
        writer.commit(i, unit, metrics.collect()).unwrap();
    }
    let content = BundleContent {
        checkpoint: &checkpoint,
        base: "tiny-llama".into(),
        modules,
        passthrough,
        vision: Vec::new(),
        head: Some("lm_head".into()),
        mtp: None,
        mtp_layers: None,
        bits: Bits::whole(3).unwrap(),
        head_bits: Some(Bits::whole(6).unwrap()),
        codebook: Codebook::Mul1,
        out_scales: "auto".into(),
        rows: 128,
        cols: 512,
        shard_bytes: 1 << 20,
    };
    writer.finish(content).unwrap().dir
}

fn metrics_of(linear: &QuantizedLinear, errors: &[verify::TensorReport]) -> TensorMetrics {
    let error = errors.iter().find(|t| t.key == linear.key).unwrap();
    TensorMetrics {
        key: linear.key.clone(),
        bits: linear.bits.as_f64(),
        k: linear.k(),
        n: linear.n(),
        proxy_error: 0.01,
        rel_frobenius: error.rel_frobenius.unwrap(),
        mse: 0.0,
        g_scale: 1.0,
        out_scales: true,
        fallback: false,
        seconds: None,
    }
}

/// The tensors of a safetensors file by name: dtype, shape, bytes.
type Tensors = Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)>;

/// Rewrites a file with its tensors changed.
fn edit(path: &Path, change: impl FnOnce(&mut Tensors)) {
    let bytes = fs::read(path).unwrap();
    let parsed = SafeTensors::deserialize(&bytes).unwrap();
    let owned = |(name, view): (String, TensorView<'_>)| {
        (name, view.dtype(), view.shape().to_vec(), view.data().to_vec())
    };
    let mut tensors: Tensors = parsed.tensors().into_iter().map(owned).collect();
    change(&mut tensors);
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(path, serialize(views, None).unwrap()).unwrap();
}

fn bytes_of<'a>(tensors: &'a mut Tensors, name: &str) -> &'a mut Vec<u8> {
    &mut tensors.iter_mut().find(|t| t.0 == name).unwrap().3
}

fn edit_json(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

#[track_caller]
fn assert_fails(report: &VerifyReport, check: &str, name: &str) {
    let found = report.failures.iter().any(|f| f.check == check && f.name.contains(name));
    assert!(found, "no failure \"{check}\" of {name} in {:#?}", report.failures);
}

/// Damages a copy of the reference's bundle; `verify` must name the damage, and nothing else.
#[track_caller]
fn damaged(check: &str, name: &str, damage: impl FnOnce(&Path)) {
    let dir = reference_copy();
    damage(dir.path());
    let report = run(dir.path());
    assert_fails(&report, check, name);
    let others: Vec<_> = report.failures.iter().filter(|f| !f.name.contains(name)).collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[track_caller]
fn damaged_tensors(check: &str, name: &str, change: impl FnOnce(&mut Tensors)) {
    damaged(check, name, |dir| edit(&dir.join("model.safetensors"), change));
}

#[test]
fn the_reference_bundle_is_right() {
    let report = run(&reference());
    assert_eq!(report.failures, []);
    assert!(report.checks > 1000, "{}", report.checks);
    assert_eq!(report.tensors.len(), 43);
    for tensor in &report.tensors {
        let error = tensor.rel_frobenius.unwrap();
        let (low, high) = if tensor.key == "lm_head" { (0.015, 0.03) } else { (0.125, 0.2) };
        assert!((low..high).contains(&error), "{}: {error}", tensor.key);
    }
    let alone = verify::run(&reference(), None).unwrap();
    assert!(alone.is_ok() && alone.checks < report.checks);
    assert!(alone.tensors.iter().all(|t| t.rel_frobenius.is_none()));
}

#[test]
fn a_bundle_of_our_own_is_right() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = own_bundle(dir.path());
    assert!(bundle.join("model.safetensors.index.json").is_file());
    assert_eq!(run(&bundle).failures, []);
}

#[test]
fn any_flipped_byte_of_our_bundle_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = own_bundle(dir.path());
    for name in list_files(&bundle).unwrap() {
        let path = bundle.join(&name);
        let whole = fs::read(&path).unwrap();
        for at in [0, whole.len() / 3, whole.len() - 1] {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x10;
            fs::write(&path, &flipped).unwrap();
            let report = verify::run(&bundle, None).unwrap();
            if name == "exl3-candle.json" {
                // Not covered by a hash itself; what matters in it is compared.
                continue;
            }
            assert_fails(&report, "files", &name);
        }
        fs::write(&path, &whole).unwrap();
    }
    fs::write(bundle.join("exl3-candle.json"), "{").unwrap();
    assert_fails(&run(&bundle), "files", "exl3-candle.json");
}

#[test]
fn a_wrong_index_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = own_bundle(dir.path());
    let index = bundle.join("model.safetensors.index.json");
    let whole = fs::read(&index).unwrap();
    let norm = "model.norm.weight";
    edit_json(&index, |v| v["weight_map"][norm] = json!("model-00001-of-00009.safetensors"));
    assert_fails(&run(&bundle), "index", norm);
    fs::write(&index, &whole).unwrap();
    edit_json(&index, |v| v["weight_map"]["model.ghost"] = json!("model-00001-of-00009.safetensors"));
    assert_fails(&run(&bundle), "index", "model.ghost");
    fs::write(&index, &whole).unwrap();
    edit_json(&index, |v| v["metadata"]["total_size"] = json!(1));
    assert_fails(&run(&bundle), "index", "total_size");
    fs::remove_file(&index).unwrap();
    assert_fails(&run(&bundle), "index", "model.safetensors.index.json");
}

#[test]
fn an_error_other_than_the_recorded_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = own_bundle(dir.path());
    edit_json(&bundle.join("exl3-candle.json"), |v| v["tensors"][0]["rel_frobenius"] = json!(0.3));
    let key = "model.layers.0.mlp.down_proj";
    assert_fails(&run(&bundle), "accuracy", key);
}

#[test]
fn a_scale_that_is_not_finite_is_named() {
    let name = format!("{Q_PROJ}.suh");
    damaged("finite", Q_PROJ, |dir| {
        edit(&dir.join("model.safetensors"), |tensors| {
            bytes_of(tensors, &name)[6..8].copy_from_slice(&f16::NAN.to_le_bytes());
        });
    });
}

#[test]
fn wrong_weights_are_named() {
    let suh = format!("{Q_PROJ}.suh");
    damaged_tensors("accuracy", Q_PROJ, |tensors| {
        // Every sign of one side turned.
        bytes_of(tensors, &suh).chunks_exact_mut(2).for_each(|half| half[1] ^= 0x80);
    });
    let trellis = format!("{Q_PROJ}.trellis");
    damaged_tensors("accuracy", Q_PROJ, |tensors| {
        let other = bytes_of(tensors, "model.layers.2.self_attn.q_proj.trellis").clone();
        *bytes_of(tensors, &trellis) = other;
    });
}

#[test]
fn a_changed_tensor_that_is_passed_through_is_named() {
    damaged_tensors("pass_through", "model.norm.weight", |tensors| {
        bytes_of(tensors, "model.norm.weight")[100] ^= 1;
    });
}

#[test]
fn a_missing_tensor_is_named() {
    for name in ["model.norm.weight".to_owned(), format!("{Q_PROJ}.svh"), format!("{Q_PROJ}.trellis")] {
        let module = name.rsplit_once('.').unwrap().0;
        damaged_tensors("tensor_set", module, |tensors| tensors.retain(|t| t.0 != name));
    }
}

#[test]
fn a_stray_tensor_or_file_is_named() {
    damaged_tensors("tensor_set", "stray.weight", |tensors| {
        tensors.push(("stray.weight".into(), safetensors::Dtype::I8, vec![2], vec![1, 2]));
    });
    damaged("files", "adapter.safetensors", |dir| {
        let empty = serialize(Vec::<(String, TensorView)>::new(), None).unwrap();
        fs::write(dir.join("adapter.safetensors"), empty).unwrap();
    });
    let dir = reference_copy();
    fs::copy(dir.path().join("model.safetensors"), dir.path().join("copy.safetensors")).unwrap();
    let report = run(dir.path());
    assert_fails(&report, "files", "copy.safetensors");
    assert_fails(&report, "tensor_set", "model.norm.weight");
}

#[test]
fn a_record_that_points_elsewhere_is_named_and_not_followed() {
    for name in ["/dev/zero", "../secret", "notes.txt"] {
        let dir = tempfile::tempdir().unwrap();
        let bundle = own_bundle(dir.path());
        edit_json(&bundle.join("exl3-candle.json"), |record| record["files"][0]["name"] = json!(name));
        assert_fails(&verify::run(&bundle, None).unwrap(), "files", name);
    }
}

#[test]
fn a_truncated_or_empty_shard_is_named() {
    for keep in [0, 7, 2000, 4_000_000] {
        damaged("shard", "model.safetensors", |dir| {
            let path = dir.join("model.safetensors");
            let whole = fs::read(&path).unwrap();
            fs::write(&path, &whole[..keep]).unwrap();
        });
    }
}

#[test]
fn a_wrong_marker_or_multiplier_is_named() {
    let name = format!("{Q_PROJ}.mul1");
    damaged_tensors("codebook", Q_PROJ, |tensors| bytes_of(tensors, &name)[0] ^= 1);
    damaged("codebook", Q_PROJ, |dir| {
        edit_json(&dir.join("quantization_config.json"), |v| {
            v["tensor_storage"][Q_PROJ]["mul1_multiplier"] = json!(7);
        });
    });
}

#[test]
fn a_missing_or_broken_file_is_named() {
    for name in ["quantization_config.json", "config.json"] {
        damaged("manifest", name, |dir| fs::remove_file(dir.join(name)).unwrap());
        damaged("manifest", name, |dir| fs::write(dir.join(name), "{ \"quant_method\": ").unwrap());
    }
    damaged("manifest", "tensor_storage", |dir| {
        let remove = |v: &mut Value| drop(v.as_object_mut().unwrap().remove("tensor_storage"));
        edit_json(&dir.join("quantization_config.json"), remove);
    });
}

#[test]
fn a_wrong_manifest_entry_is_named() {
    type Change = fn(&mut Value);
    let changes: [(&str, &str, Change); 6] = [
        ("manifest", "quantization_config", |v| v["head_bits"] = json!(5)),
        ("manifest", "quant_method", |v| v["quant_method"] = json!("exl2")),
        ("geometry", Q_PROJ, |v| v["tensor_storage"][Q_PROJ]["bits_per_weight"] = json!(4)),
        ("storage", "model.norm.weight", |v| {
            v["tensor_storage"]["model.norm"]["stored_tensors"]["model.norm.weight"]["dtype"] =
                json!("torch.int8");
        }),
        ("storage", "model.norm.weight", |v| {
            v["tensor_storage"]["model.norm"]["stored_tensors"]["model.norm.weight"]["shape"] = json!([255]);
        }),
        ("tensor_set", "model.norm.weight", |v| {
            v["tensor_storage"].as_object_mut().unwrap().remove("model.norm");
        }),
    ];
    for (check, name, change) in changes {
        let dir = reference_copy();
        edit_json(&dir.path().join("quantization_config.json"), change);
        assert_fails(&run(dir.path()), check, name);
    }
    damaged("manifest", "tie_word_embeddings", |dir| {
        edit_json(&dir.join("config.json"), |v| v["tie_word_embeddings"] = json!(true));
    });
}

#[test]
fn no_flipped_header_byte_goes_unnoticed() {
    let dir = reference_copy();
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header_bytes = u64::from_le_bytes(*whole.first_chunk().unwrap()) as usize;
    for at in (0..8 + header_bytes).step_by(397).chain(0..8) {
        for bit in [0x01, 0x20, 0x80] {
            let mut flipped = whole.clone();
            flipped[at] ^= bit;
            fs::write(&path, &flipped).unwrap();
            assert!(!verify::run(dir.path(), None).unwrap().is_ok(), "byte {at}, bit {bit:#x}");
        }
    }
}

fn program() -> Command {
    Command::cargo_bin("exl3-candle").unwrap()
}

#[test]
fn the_exit_code_is_the_answer() {
    let source = fixture("tiny-llama");
    program().arg("verify").arg(reference()).arg("--source").arg(&source).assert().code(0);

    let dir = reference_copy();
    edit(&dir.path().join("model.safetensors"), |tensors| {
        bytes_of(tensors, "model.norm.weight")[0] ^= 1;
    });
    let output = program()
        .args(["--json", "verify"])
        .arg(dir.path())
        .arg("--source")
        .arg(&source)
        .assert()
        .code(1)
        .get_output()
        .stdout
        .clone();
    let report: Value = serde_json::from_slice(&output).unwrap();
    let keys = |v: &Value| v.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&report), ["checks", "failures", "tensors"]);
    assert_eq!(keys(&report["failures"][0]), ["check", "name", "expected", "found"]);
    assert_eq!(report["failures"][0]["name"], "model.norm.weight");
    assert_eq!(keys(&report["tensors"][0]), ["key", "bits", "codebook", "k", "n", "rel_frobenius"]);

    let nowhere = dir.path().join("nowhere");
    program()
        .arg("verify")
        .arg(&nowhere)
        .assert()
        .code(2)
        .stderr(predicates::str::contains("is not a folder"));
    program().arg("verify").arg(reference()).arg("--source").arg(&nowhere).assert().code(2);
}
