//! Checkpoints: what is read from good ones, and what is said about bad ones.

use std::fs;
use std::path::{Path, PathBuf};

use exl3_candle::model::Model;
use exl3_candle::source::{self, SourceError};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(path)
}

/// A copy of `micro-llama`: two bf16 shards with an index.
fn copy_of_micro_llama() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture("micro-llama")).unwrap() {
        let path = entry.unwrap().path();
        fs::write(dir.path().join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
    }
    dir
}

fn edit_bytes(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    edit(&mut bytes);
    fs::write(path, bytes).unwrap();
}

fn edit_json(path: &Path, edit: impl FnOnce(&mut Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    edit(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

/// A safetensors file of a header and its data.
fn shard(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Rewrites the header of a shard.
fn edit_header(path: &Path, edit: impl FnOnce(&mut Value)) {
    edit_bytes(path, |bytes| {
        let data = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..data]).unwrap();
        edit(&mut header);
        *bytes = shard(&header, &bytes[data..]);
    });
}

/// The error with its causes, as the program prints it.
fn told(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

type Damage = fn(&Path);

const BROKEN_FILES: &[(&str, Damage, &[&str])] = &[
    (
        "a truncated shard",
        |d| edit_bytes(&d.join(SECOND), |b| b.truncate(b.len() - 10)),
        &[SECOND, "truncated"],
    ),
    ("trailing bytes", |d| edit_bytes(&d.join(FIRST), |b| b.push(0)), &[FIRST, "bytes after its header"]),
    (
        "a header longer than the file",
        |d| edit_bytes(&d.join(FIRST), |b| b[..8].copy_from_slice(&(1u64 << 40).to_le_bytes())),
        &[FIRST, "the header claims 1099511627776 bytes"],
    ),
    (
        "a header length that overflows",
        |d| edit_bytes(&d.join(FIRST), |b| b[..8].fill(0xff)),
        &[FIRST, "the header claims 18446744073709551615 bytes"],
    ),
    ("an empty shard", |d| fs::write(d.join(FIRST), []).unwrap(), &[FIRST, "is empty (0 bytes)"]),
    ("a shard of 3 bytes", |d| fs::write(d.join(FIRST), [1, 2, 3]).unwrap(), &[FIRST, "the file has 3"]),
    (
        "a header that is no JSON",
        |d| edit_bytes(&d.join(FIRST), |b| b[8] = b'x'),
        &[FIRST, "header is broken", "JSON"],
    ),
    (
        "overlapping tensors",
        |d| edit_header(&d.join(SECOND), |h| h["model.norm.weight"]["data_offsets"] = json!([0, 256])),
        &[SECOND, "header is broken", "invalid"],
    ),
    (
        "offsets that do not fit the shape",
        |d| edit_header(&d.join(SECOND), |h| h["model.norm.weight"]["shape"] = json!([127])),
        &[SECOND, "header is broken", "shape"],
    ),
    (
        "a shape whose size overflows",
        |d| {
            edit_header(&d.join(SECOND), |h| {
                h["model.norm.weight"]["shape"] = json!([1u64 << 40, 1u64 << 40])
            })
        },
        &[SECOND, "header is broken", "overflow"],
    ),
    (
        "a dtype that does not exist",
        |d| edit_header(&d.join(SECOND), |h| h["model.norm.weight"]["dtype"] = json!("Q7")),
        &[SECOND, "header is broken", "Q7"],
    ),
    (
        "one tensor in two shards",
        |d| {
            let again = json!({"model.norm.weight": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}});
            fs::write(d.join("third.safetensors"), shard(&again, &[1, 2])).unwrap();
            edit_json(&d.join(INDEX), |i| i["weight_map"]["model.norm.weight"] = json!("third.safetensors"));
        },
        &["\"model.norm.weight\" is in two shards", SECOND, "third.safetensors"],
    ),
    (
        "a missing shard",
        |d| fs::remove_file(d.join(SECOND)).unwrap(),
        &[SECOND, "is missing, though the index puts tensor"],
    ),
    (
        "an index with a tensor that is nowhere",
        |d| edit_json(&d.join(INDEX), |i| i["weight_map"]["model.extra"] = json!(FIRST)),
        &["\"model.extra\" is not in", FIRST],
    ),
    (
        "an index with a tensor in the wrong shard",
        |d| edit_json(&d.join(INDEX), |i| i["weight_map"]["model.norm.weight"] = json!(FIRST)),
        &["\"model.norm.weight\" is not in", FIRST],
    ),
    (
        "an index that leaves the folder",
        |d| edit_json(&d.join(INDEX), |i| i["weight_map"]["x"] = json!("../x.safetensors")),
        &[INDEX, "\"../x.safetensors\", which is not a plain file name"],
    ),
    (
        "an index without a map",
        |d| fs::write(d.join(INDEX), "{\"metadata\": {}}").unwrap(),
        &[INDEX, "expected an object \"weight_map\""],
    ),
    (
        "an index with a number for a file",
        |d| edit_json(&d.join(INDEX), |i| i["weight_map"]["x"] = json!(3)),
        &[INDEX, "expected a file name, found 3"],
    ),
    ("an index that is no JSON", |d| fs::write(d.join(INDEX), "{").unwrap(), &[INDEX, "is not valid JSON"]),
    (
        "an index that is gone",
        |d| fs::remove_file(d.join(INDEX)).unwrap(),
        &["2 safetensors files but no model.safetensors.index.json"],
    ),
    (
        "no weights at all",
        |d| [INDEX, FIRST, SECOND].iter().for_each(|file| fs::remove_file(d.join(file)).unwrap()),
        &["holds no safetensors file"],
    ),
    ("no config", |d| fs::remove_file(d.join("config.json")).unwrap(), &["is no folder with a config.json"]),
    (
        "a config that is no JSON",
        |d| fs::write(d.join("config.json"), "nope").unwrap(),
        &["config.json is not valid JSON"],
    ),
];

#[test]
fn broken_files_are_refused_by_name() {
    for (what, damage, expected) in BROKEN_FILES {
        let dir = copy_of_micro_llama();
        source::open(dir.path()).unwrap();
        damage(dir.path());
        let text = told(&source::open(dir.path()).expect_err(what));
        for part in *expected {
            assert!(text.contains(part), "{what}: \"{part}\" is not in: {text}");
        }
    }
}

fn config(edit: impl FnOnce(&mut Value)) -> Result<Model, String> {
    let mut config = serde_json::from_slice(&fs::read(fixture("tiny-llama/config.json")).unwrap()).unwrap();
    edit(&mut config);
    Model::from_config(&config).map_err(|error| error.to_string())
}

type Edit = fn(&mut Value);

const REFUSED_CONFIGS: &[(Edit, &str)] = &[
    (
        |c| c["architectures"] = json!(["GemmaForCausalLM"]),
        "architectures \"GemmaForCausalLM\" is not supported",
    ),
    (|c| c["architectures"] = json!([]), "architectures: expected a list with the name of one architecture"),
    (|c| drop(c.as_object_mut().unwrap().remove("architectures")), "architectures is missing"),
    (|c| c["model_type"] = json!("mistral"), "model_type \"mistral\""),
    (|c| c["hidden_act"] = json!("gelu"), "hidden_act \"gelu\" is not supported; expected \"silu\""),
    (|c| c["sliding_window"] = json!(64), "sliding_window 64 is not supported"),
    (|c| c["rope_parameters"]["rope_type"] = json!("yarn"), "rope_parameters.rope_type \"yarn\""),
    (|c| c["rope_scaling"] = json!({"type": "linear", "factor": 2.0}), "rope_scaling.type \"linear\""),
    (|c| c["rope_parameters"] = Value::Null, "rope_theta is missing"),
    (
        |c| c["rope_parameters"]["rope_theta"] = json!("10000"),
        "rope_parameters.rope_theta: expected a number",
    ),
    (|c| c["hidden_size"] = json!(-256), "hidden_size: expected a whole number above zero, found -256"),
    (|c| c["num_hidden_layers"] = Value::Null, "num_hidden_layers is missing"),
    (|c| c["num_key_value_heads"] = json!(3), "num_attention_heads: expected a multiple of 3"),
    (|c| c["tie_word_embeddings"] = json!("yes"), "tie_word_embeddings: expected true or false"),
    (|c| *c = json!([1]), "expected an object, found [1]"),
];

#[test]
fn configs_that_cannot_be_computed_are_refused_by_name() {
    config(|_| ()).unwrap();
    for (edit, expected) in REFUSED_CONFIGS {
        let error = config(edit).expect_err(expected);
        assert!(error.contains(expected), "\"{expected}\" is not in: {error}");
    }
}

#[test]
fn all_problems_of_the_tensors_are_told_at_once() {
    let dir = copy_of_micro_llama();
    let gone = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"];
    for file in [FIRST, SECOND] {
        edit_header(&dir.path().join(file), |header| {
            let header = header.as_object_mut().unwrap();
            for key in gone {
                if let Some(info) = header.remove(key) {
                    header.insert(format!("renamed.{key}"), info);
                }
            }
            if let Some(info) = header.get_mut("model.layers.0.self_attn.k_proj.weight") {
                let count: u64 =
                    info["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).product();
                info["shape"] = json!([count]);
            }
            if let Some(info) = header.get_mut("model.layers.0.input_layernorm.weight") {
                info["dtype"] = json!("I16");
            }
        });
    }
    fs::remove_file(dir.path().join(INDEX)).unwrap();
    write_index(dir.path(), &[FIRST, SECOND]);

    let checkpoint = source::open(dir.path()).unwrap();
    let model = Model::from_config(checkpoint.config()).unwrap();
    let text = told(&model.check(&checkpoint).unwrap_err());
    assert!(text.contains("4 of the model's tensors cannot be used"), "{text}");
    for key in gone {
        assert!(text.contains(&format!("\"{key}\": expected BF16/F16/F32")), "{text}");
    }
    assert!(text.contains("\"model.layers.0.self_attn.k_proj.weight\""), "{text}");
    assert!(
        text.contains("\"model.layers.0.input_layernorm.weight\": expected BF16/F16/F32 [128], found I16")
    );
    assert!(text.contains(&dir.path().display().to_string()));
}

/// An index of what the shards hold.
fn write_index(dir: &Path, shards: &[&str]) {
    let mut map = serde_json::Map::new();
    for name in shards {
        let bytes = fs::read(dir.join(name)).unwrap();
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        map.extend(metadata.tensors().into_keys().map(|key| (key, json!(name))));
    }
    fs::write(dir.join(INDEX), json!({ "weight_map": map }).to_string()).unwrap();
}

#[test]
fn a_weight_that_is_not_finite_is_named_with_its_index() {
    for (bits, value) in [(0x7fc0u16, "NaN"), (0xff80, "-inf")] {
        let dir = copy_of_micro_llama();
        let checkpoint = source::open(dir.path()).unwrap();
        let target = checkpoint.tensor("model.norm.weight").unwrap();
        let offset = target.bytes().as_ptr() as usize - checkpoint.shards()[1].bytes().as_ptr() as usize;
        drop(checkpoint);
        edit_bytes(&dir.path().join(SECOND), |bytes| {
            bytes[offset + 2 * 5..][..2].copy_from_slice(&bits.to_le_bytes());
        });
        let error = source::open(dir.path()).unwrap().check_finite_and_hash().unwrap_err();
        assert!(matches!(&error, SourceError::NonFinite { index: 5, .. }), "{error}");
        let expected = format!("tensor \"model.norm.weight\" holds {value} at flat index 5");
        assert!(error.to_string().contains(&expected), "{error}");
        assert!(error.to_string().contains(SECOND), "{error}");
    }
}

#[test]
fn the_hash_is_that_of_the_contents() {
    let hash = |dir: &Path| source::open(dir).unwrap().check_finite_and_hash().unwrap();
    let (a, b) = (copy_of_micro_llama(), copy_of_micro_llama());
    assert_eq!(hash(a.path()), hash(b.path()));
    assert_eq!(hash(a.path()).len(), 64);
    edit_bytes(&b.path().join(SECOND), |bytes| *bytes.last_mut().unwrap() ^= 1);
    assert_ne!(hash(a.path()), hash(b.path()));
    edit_json(&a.path().join("config.json"), |config| config["note"] = json!(1));
    assert_ne!(hash(a.path()), hash(&fixture("micro-llama")));
}

/// A single file of any name, with dtypes the model has no use for.
#[test]
fn tensors_of_every_dtype_are_held_and_floats_are_read() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), "{\"b\": 1, \"a\": 2}").unwrap();
    let header = json!({
        "__metadata__": {"format": "pt"},
        "bool": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]},
        "bf16": {"dtype": "BF16", "shape": [3, 1], "data_offsets": [3, 9]},
        "f16": {"dtype": "F16", "shape": [1], "data_offsets": [9, 11]},
        "f32": {"dtype": "F32", "shape": [], "data_offsets": [11, 15]},
        "none": {"dtype": "I8", "shape": [0, 4], "data_offsets": [15, 15]},
    });
    // Nothing here is aligned to its element size.
    let data = [
        &[1u8, 0, 255][..],
        &[0x80, 0x3f, 0x00, 0xc0, 0x01, 0x00], // 1, -2, the smallest subnormal
        &[0x01, 0x00],                         // 2^-24
        &(-1.5f32).to_le_bytes(),
    ]
    .concat();
    fs::write(dir.path().join("weights.safetensors"), shard(&header, &data)).unwrap();

    let checkpoint = source::open(dir.path()).unwrap();
    assert_eq!(checkpoint.keys().collect::<Vec<_>>(), ["bf16", "bool", "f16", "f32", "none"]);
    assert_eq!(checkpoint.config().as_object().unwrap().keys().collect::<Vec<_>>(), ["b", "a"]);
    let tensor = |key: &str| checkpoint.tensor(key).unwrap();
    assert_eq!(tensor("bf16").to_f32().unwrap(), [1.0, -2.0, f32::from_bits(0x1_0000)]);
    assert_eq!(tensor("f16").to_f32().unwrap(), [2f32.powi(-24)]);
    assert_eq!(tensor("f32").to_tensor().unwrap().to_scalar::<f32>().unwrap(), -1.5);
    assert_eq!((tensor("bool").dtype(), tensor("bool").bytes()), (Dtype::BOOL, &[1, 0, 255][..]));
    assert_eq!((tensor("none").shape(), tensor("none").bytes().len()), (&[0, 4][..], 0));
    let rows = tensor("bf16").rows_to_tensor(&[1, 1, 0]).unwrap();
    assert_eq!(rows.to_vec2::<f32>().unwrap(), [[-2.0], [-2.0], [1.0]]);
    checkpoint.check_finite_and_hash().unwrap();

    let error = tensor("bool").to_f32().unwrap_err().to_string();
    assert!(error.contains("tensor \"bool\" is BOOL; expected BF16, F16 or F32"), "{error}");
    let error = tensor("bf16").rows_to_tensor(&[3]).unwrap_err().to_string();
    assert!(error.contains("expected at least 4 rows, found shape [3, 1]"), "{error}");
    let error = checkpoint.tensor("x").unwrap_err().to_string();
    assert!(error.contains("has no tensor \"x\"") && error.contains(&dir.path().display().to_string()));
}

/// The test vectors beside the model are safetensors too, and none of its tensors.
#[test]
fn only_files_of_the_index_belong_to_a_checkpoint() {
    let checkpoint = source::open(&fixture("tiny-llama")).unwrap();
    assert_eq!(checkpoint.shards().len(), 2);
    assert!(checkpoint.get("logits").is_none());
    let model = Model::from_config(checkpoint.config()).unwrap();
    let mut expected: Vec<String> = model.expected_tensors().into_iter().map(|(key, _)| key).collect();
    expected.sort();
    assert_eq!(checkpoint.keys().collect::<Vec<_>>(), expected);
}
