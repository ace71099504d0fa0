//! `export`: a bundle as a checkpoint folder for a runtime.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use exl3_candle::bundle::{self, Shard};
use serde_json::{Value, json};
use tempfile::TempDir;

use support::fixture;
use support::program::{ABORT_AT, Run, copy_dir, edit_file, names, program, read_json};

const BUNDLE: &str = "bundles/tiny-llama-exl3-3.0bpw";

/// The reference's bundle with fields of `config.json` changed.
fn bundle(changes: &[(&str, Value)]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let bundle = dir.path().join("bundle");
    copy_dir(&fixture(BUNDLE), &bundle);
    edit_file(&bundle.join("config.json"), |bytes| {
        let mut config: Value = serde_json::from_slice(bytes).unwrap();
        for (field, value) in changes {
            config[field] = value.clone();
        }
        *bytes = config.to_string().into_bytes();
    });
    (dir, bundle)
}

fn export(bundle: &Path, out: &Path, runtime: &str) -> Run {
    Run::of(program(["export", "--json", "--for", runtime]).arg(bundle).arg("-o").arg(out))
}

/// Every tensor by name with its bytes.
fn tensors(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let shards = bundle::shard_files(dir).unwrap();
    let shards = shards.iter().map(|path| Shard::open(path).unwrap());
    let read = |shard: Shard| {
        let read = |tensor| {
            (shard.get(tensor).unwrap().name.clone(), shard.read(shard.get(tensor).unwrap()).unwrap())
        };
        shard.tensors().iter().map(|tensor| read(tensor.name.as_str())).collect::<Vec<_>>()
    };
    shards.flat_map(read).collect()
}

/// What an exported folder promises, whatever the runtime.
fn check_folder(dir: &Path) {
    let verified = Run::of(program(["verify", "--json"]).arg(dir)).expect(0).json();
    assert_eq!(verified["failures"], json!([]));
    let manifest = read_json(&dir.join("quantization_config.json"));
    assert_eq!(read_json(&dir.join("config.json"))["quantization_config"], manifest);
    let index = read_json(&dir.join("model.safetensors.index.json"));
    let tensors = tensors(dir);
    let mut indexed: Vec<&String> = index["weight_map"].as_object().unwrap().keys().collect();
    indexed.sort();
    assert_eq!(indexed, tensors.keys().collect::<Vec<_>>());
    let total: usize = tensors.values().map(Vec::len).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    assert!(dir.join("tokenizer.json").is_file());
}

#[test]
fn names_that_fit_are_linked() {
    let (dir, bundle) = bundle(&[]);
    for runtime in ["vllm", "exllamav3"] {
        let out = dir.path().join(runtime);
        let report = export(&bundle, &out, runtime).expect(0).json();
        assert_eq!((&report["renamed"], &report["prefix"]), (&json!(0), &json!("model")));
        assert_eq!(
            report["files"][0],
            json!({ "name": "model.safetensors", "bytes": fs::metadata(bundle.join("model.safetensors")).unwrap().len(), "origin": "linked" })
        );
        let inode = |dir: &Path| fs::metadata(dir.join("model.safetensors")).unwrap().ino();
        assert_eq!(inode(&out), inode(&bundle));
        check_folder(&out);
    }
    let perplexity = |dir: &Path| {
        let mut command = program(["eval", "ppl", "--json", "--rows", "2", "--cols", "64"]);
        let command = command.arg(dir).arg("--text").arg(fixture("corpus/persuasion.txt"));
        Run::of(command).expect(0).json()["perplexity"].as_f64().unwrap()
    };
    assert_eq!(perplexity(&bundle), perplexity(&dir.path().join("vllm")));
}

/// The names of a flat Qwen3.5 fit one runtime; the other reads the nested ones alone.
#[test]
fn names_that_do_not_fit_are_rewritten() {
    let flat = [("architectures", json!(["Qwen3_5ForCausalLM"]))];
    let (dir, bundle) = bundle(&flat);
    let before = tensors(&bundle);
    let out = dir.path().join("vllm");
    assert_eq!(export(&bundle, &out, "vllm").expect(0).json()["renamed"], 0);
    let out = dir.path().join("exllamav3");
    let report = export(&bundle, &out, "exllamav3").expect(0).json();
    assert_eq!(report["prefix"], "model.language_model");
    assert_eq!(report["files"][0]["origin"], "written");
    check_folder(&out);
    let after = tensors(&out);
    assert_eq!(before.len(), after.len());
    for (name, bytes) in &before {
        let name = name.replace("model.", "model.language_model.");
        assert!(after.get(&name) == Some(bytes), "{name}");
    }
    let nested = before.keys().filter(|name| name.starts_with("model.")).count();
    assert_eq!(report["renamed"], nested);

    // And back, from the nested container.
    let plain = dir.path().join("plain");
    export(&out, &plain, "vllm").expect(0);
    assert!(tensors(&plain) == before);
}

#[test]
fn what_cannot_be_exported_is_refused() {
    let (dir, bundle) = bundle(&[("architectures", json!(["Gemma3ForCausalLM"]))]);
    let out = dir.path().join("out");
    export(&bundle, &out, "vllm").expect(2).says(&["Gemma3ForCausalLM", "for vllm", "LlamaForCausalLM"]);
    export(&fixture("micro-llama"), &out, "vllm").expect(2).says(&["expected an EXL3 bundle"]);
    export(&fixture(BUNDLE), &out, "ollama").expect(2).says(&["vllm or exllamav3"]);
    assert_eq!(names(dir.path()), ["bundle"]);
    fs::create_dir(&out).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    export(&fixture(BUNDLE), &out, "vllm").expect(2).says(&["already holds \"notes.txt\""]);
    export(&fixture(BUNDLE), &fixture(BUNDLE).join("out"), "vllm").expect(2).says(&["lies in it"]);
    assert_eq!(names(dir.path()), ["bundle", "out"]);
}

/// Killed at any step, there is no folder or a whole one, and the next attempt succeeds.
#[test]
fn a_killed_export_leaves_no_half_folder() {
    let (dir, bundle) = bundle(&[]);
    let out = dir.path().join("out");
    let mut kills = 0;
    for step in 1.. {
        let mut command = program(["export", "--for", "vllm"]);
        let run = Run::of(command.arg(&bundle).arg("-o").arg(&out).env(ABORT_AT, step.to_string()));
        if !run.aborted() {
            run.expect(0);
            break;
        }
        assert!(!out.exists());
        kills += 1;
    }
    assert!(kills > 10, "{kills}");
    check_folder(&out);
    assert_eq!(names(dir.path()), ["bundle", "out"]);
}
