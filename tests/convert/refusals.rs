//! What is refused: by name, with exit code 2, before anything is written.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::support::checkpoint::{Tensors, TestLlama};
use crate::support::fixture;
use crate::support::program::{Run, edit_file, names, program};

const Q_PROJ: &str = "model.layers.0.self_attn.q_proj.weight";

/// Runs `convert` on `dir/source` and expects an error that says all of `words`, and nothing but
/// the source in the folder.
#[track_caller]
fn refused(dir: &Path, change: impl FnOnce(&mut Command), words: &[&str]) {
    let before = everything(dir);
    let mut command = crate::command(&dir.join("source"), dir);
    change(&mut command);
    let run = Run::of(&mut command).expect(2);
    run.says(&["error: "]);
    run.says(words);
    assert_eq!(run.stdout, "");
    assert_eq!(everything(dir), before, "nothing is left behind");
}

fn everything(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = Vec::new();
    for name in names(dir) {
        let path = dir.join(name);
        match path.is_dir() {
            true => {
                files.push((path.clone(), Vec::new()));
                files.extend(everything(&path));
            }
            false => files.push((path.clone(), fs::read(&path).unwrap())),
        }
    }
    files
}

#[track_caller]
fn refused_source(write: impl FnOnce(&Path), words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("source"));
    refused(dir.path(), |_| {}, words);
}

#[track_caller]
fn refused_config(field: &'static str, value: Value, words: &[&str]) {
    refused_source(|source| TestLlama::nano().with_config(field, value).write(source), words);
}

/// Runs `convert` on a sound checkpoint with `args` and no other settings.
#[track_caller]
fn refused_nano(args: &[&str], words: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    TestLlama::nano().write(&source);
    let mut command = program(["convert"]);
    command.args(args).arg(&source).arg("--output").arg(dir.path().join("out"));
    Run::of(command.arg("--calibration").arg(fixture("corpus/northanger.txt"))).expect(2).says(words);
    assert_eq!(names(dir.path()), ["source"]);
}

#[test]
fn weights_that_are_not_finite() {
    for (value, name) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let spoil = |tensors: &mut Tensors| tensors.get_mut(Q_PROJ).unwrap().1[321] = value;
        refused_source(
            |source| TestLlama::nano().write_edited(source, spoil),
            &["model.safetensors", Q_PROJ, name, "flat index 321"],
        );
    }
    // Also where the tensor would only be copied.
    let spoil = |tensors: &mut Tensors| tensors.get_mut("model.norm.weight").unwrap().1[5] = f32::INFINITY;
    refused_source(
        |source| TestLlama::nano().write_edited(source, spoil),
        &["model.norm.weight", "inf at flat index 5"],
    );
}

#[test]
fn shards_that_are_damaged_or_missing() {
    let sharded = TestLlama { shards: 2, ..TestLlama::nano() };
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let write = |damage: &dyn Fn(&Path)| {
        let (sharded, dir) = (&sharded, tempfile::tempdir().unwrap());
        sharded.write(&dir.path().join("source"));
        damage(&dir.path().join("source"));
        dir
    };
    let truncated = write(&|source| edit_file(&source.join(second), |b| b.truncate(b.len() - 1)));
    refused(truncated.path(), |_| {}, &[second, "truncated"]);
    let empty = write(&|source| fs::write(source.join(first), []).unwrap());
    refused(empty.path(), |_| {}, &[first, "is empty (0 bytes)"]);
    let missing = write(&|source| fs::remove_file(source.join(first)).unwrap());
    refused(missing.path(), |_| {}, &[first, "is missing"]);
}

/// All that is missing or wrong is named at once.
#[test]
fn tensors_that_are_missing_or_of_another_shape() {
    let spoil = |tensors: &mut Tensors| {
        tensors.remove(Q_PROJ).unwrap();
        tensors.remove("model.norm.weight").unwrap();
        tensors.remove("lm_head.weight").unwrap();
        tensors.get_mut("model.layers.0.mlp.up_proj.weight").unwrap().0 = vec![64, 256];
    };
    let head = "tensor \"lm_head.weight\": expected BF16/F16/F32 [128, 128], found nothing";
    let up = "tensor \"model.layers.0.mlp.up_proj.weight\"";
    refused_source(
        |source| TestLlama::nano().write_edited(source, spoil),
        &[Q_PROJ, "\"model.norm.weight\"", head, up, "found BF16 [64, 256]"],
    );
    let biased = TestLlama::nano().with_config("attention_bias", json!(true));
    refused_source(|source| biased.write(source), &["self_attn.o_proj.bias", "self_attn.k_proj.bias"]);
}

/// It would be used, so it must fit, whether or not the config asks for it.
#[test]
fn a_bias_of_another_length_that_the_config_does_not_ask_for() {
    for module in ["model.layers.0.mlp.down_proj", "lm_head"] {
        let bias = format!("{module}.bias");
        let add = |tensors: &mut Tensors| drop(tensors.insert(bias.clone(), (vec![300], vec![0.0; 300])));
        refused_source(|s| TestLlama::nano().write_edited(s, add), &[&bias, "[128]", "[300]"]);
    }
}

/// It is copied at the end of a job, so it is looked at before.
#[test]
fn a_companion_that_cannot_be_copied() {
    for spoil in [
        |path: &Path| std::os::unix::fs::symlink("gone", path).unwrap(),
        |path: &Path| fs::create_dir(path).unwrap(),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        TestLlama::nano().write(&source);
        fs::create_dir(source.join("additional_chat_templates")).unwrap();
        spoil(&source.join("additional_chat_templates/tool.jinja"));
        let run = Run::of(&mut crate::command(&source, dir.path())).expect(2);
        run.says(&["error: ", "additional_chat_templates/tool.jinja"]);
        assert_eq!(names(dir.path()), ["source"]);
    }
}

/// Numbers of a config that would overflow or fill the memory before a tensor is looked at.
#[test]
fn configs_with_absurd_sizes() {
    let huge = json!(1u64 << 62);
    for field in ["head_dim", "hidden_size", "vocab_size", "intermediate_size"] {
        refused_config(field, huge.clone(), &[field, "at most"]);
    }
    refused_config("num_hidden_layers", json!(1_000_000_000), &["num_hidden_layers: expected at most"]);
    refused_source(
        |source| {
            let llama = TestLlama::nano().with_config("head_dim", Value::Null);
            let llama = llama.with_config("num_attention_heads", json!(1000));
            llama.with_config("num_key_value_heads", json!(1000)).write(source);
        },
        &["num_attention_heads", "at most hidden_size, 128"],
    );
}

#[test]
fn models_that_are_not_computed() {
    for name in ["GemmaForCausalLM", "Qwen3MoeForCausalLM"] {
        refused_config("architectures", json!([name]), &["architectures", name, "LlamaForCausalLM"]);
    }
    refused_config("hidden_act", json!("gelu"), &["hidden_act", "gelu", "silu"]);
    refused_config("sliding_window", json!(64), &["sliding_window", "64"]);
    refused_config("rope_theta", Value::Null, &["rope_theta is missing"]);
    refused_config("hidden_size", json!("128"), &["hidden_size", "a whole number above zero"]);
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0 });
    refused_config("rope_scaling", yarn, &["rope_scaling.rope_type", "yarn", "llama3"]);
    let gptq = json!({ "quant_method": "gptq", "bits": 4 });
    refused_config("quantization_config", gptq, &["already quantized", "gptq"]);
}

#[test]
fn a_bundle_is_no_source() {
    let dir = crate::base().done();
    fs::rename(dir.path().join("out"), dir.path().join("source")).unwrap();
    refused(dir.path(), |_| {}, &["already quantized", "exl3"]);
    let bundle = dir.path().join("source");
    let mut verify =
        program(["verify".as_ref(), bundle.as_os_str(), "--source".as_ref(), bundle.as_os_str()]);
    Run::of(&mut verify).expect(2).says(&["source is quantized", "made from"]);
}

#[test]
fn folders_and_files_that_are_not_there() {
    let dir = tempfile::tempdir().unwrap();
    refused(dir.path(), |_| {}, &["source is no folder with a config.json"]);
    refused_source(|source| fs::create_dir(source).unwrap(), &["source is no folder with a config.json"]);
    refused_source(
        |source| {
            TestLlama::nano().write(source);
            fs::remove_file(source.join("tokenizer.json")).unwrap();
        },
        &["source/tokenizer.json", "cannot be read"],
    );
    refused_source(
        |source| {
            TestLlama::nano().write(source);
            fs::write(source.join("config.json"), "{").unwrap();
        },
        &["source/config.json is not valid JSON"],
    );
    refused_source(
        |source| {
            TestLlama::nano().write(source);
            fs::remove_file(source.join("model.safetensors")).unwrap();
        },
        &["source holds no safetensors file"],
    );
}

#[test]
fn rates_and_sizes_that_do_not_exist() {
    let rates = "expected 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7 or 8";
    let convert =
        |args: &[&str]| Run::of(&mut program(["convert", "s", "-o", "o"].iter().chain(args))).expect(2);
    convert(&["--bits", "4.5"]).says(&["--bits", "4.5 bits per weight do not exist", rates]);
    convert(&["--bits", "9"]).says(&["--bits", rates]);
    convert(&["--bits", "3", "--head-bits", "12"]).says(&["--head-bits", rates]);
    convert(&["--bits", "3", "--codebook", "4inst"]).says(&["--codebook", "expected mul1, mcg or 3inst"]);
    convert(&["--bits", "3", "--out-scales", "yes"]).says(&["--out-scales", "auto"]);
    convert(&["--bits", "3", "--shard-size", "0"]).says(&["--shard-size", "500MB"]);
    refused_nano(
        &["--bits", "3", "--head-bits", "2.5", "--codebook", "mcg"],
        &["mcg has no 2.5-bit trellis", "mul1"],
    );
    refused_nano(&["--bits", "1.5", "--codebook", "3inst"], &["3inst has no 1.5-bit trellis"]);
}

#[test]
fn calibration_that_does_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    TestLlama::nano().write(&dir.path().join("source"));
    let file = |name: &str, content: &str| {
        fs::write(dir.path().join(name), content).unwrap();
        dir.path().join(name)
    };
    let with = |file: &Path, words: &[&str]| {
        let mut command = program(["convert", "--bits", "3", "--rows", "8", "--cols", "64"]);
        command.arg(dir.path().join("source")).arg("--output").arg(dir.path().join("out"));
        let run = Run::of(command.arg("--calibration").arg(file)).expect(2);
        run.says(words);
        assert!(!names(dir.path()).iter().any(|name| name == "out" || name == "out.work"));
    };
    with(&file("short.txt", "Too short."), &["short.txt", "need 512 tokens, have 11"]);
    with(&file("short.jsonl", "{\"text\": \"ab\"}\n{\"text\": \"c\"}\n"), &["need 512 tokens, have 5"]);
    let rows = |ids: usize| json!({ "format": "t", "rows": vec![vec![5; ids]; 8] }).to_string();
    with(&file("narrow.json", &rows(63)), &["row 0", "need 64 tokens, have 63"]);
    let outside = rows(64).replacen('5', "128", 1);
    with(&file("outside.json", &outside), &["token id 128", "vocabulary of 128"]);
    with(&dir.path().join("absent.txt"), &["absent.txt", "cannot be read"]);
    fs::write(dir.path().join("binary"), [b'a', 0xff, b'b']).unwrap();
    with(&dir.path().join("binary"), &["binary", "invalid byte at offset 1"]);
}

#[test]
fn rows_longer_than_the_model_has_positions_for() {
    refused_nano(&["--bits", "3", "--rows", "2", "--cols", "513"], &["513", "512"]);
    refused_nano(&["--bits", "3", "--rows", "0", "--cols", "64"], &["0 rows of 64 tokens"]);
}

/// The folders of a job are cleared and replaced, and the source must not be among them.
#[test]
fn an_output_folder_that_is_the_source_or_lies_in_it() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("models/source");
    TestLlama::nano().write(&source);
    std::os::unix::fs::symlink(&source, dir.path().join("link")).unwrap();
    let before = everything(dir.path());
    for (out, work) in [
        ("models/source", "work"),
        ("models/source/.", "work"),
        ("models/source/out", "work"),
        ("link", "work"),
        ("link/deep/er", "work"),
        ("models", "work"),
        ("out", "models/source"),
        ("out", "models/source/work"),
        ("out", "models"),
    ] {
        for overwrite in [&[][..], &["--overwrite"]] {
            let mut command = program(["convert", "--bits", "3"]);
            command.arg(&source).args(overwrite);
            command.arg("--output").arg(dir.path().join(out)).arg("--work").arg(dir.path().join(work));
            let run = Run::of(&mut command).expect(2);
            run.says(&["cannot be used: it coincides with the source folder", "hint: choose another"]);
            assert_eq!(everything(dir.path()), before, "{out} {work}");
        }
    }
}

/// Names that a job gives its own folders beside the output folder.
#[test]
fn a_source_that_lies_where_a_job_would_work() {
    for suffix in ["partial", "replaced", "work"] {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join(format!("model.{suffix}"));
        TestLlama::nano().write(&source);
        let before = everything(dir.path());
        let mut command = program(["convert", "--bits", "3", "--overwrite"]);
        command.arg(&source).arg("--output").arg(dir.path().join("model"));
        Run::of(&mut command).expect(2).says(&["coincides with the source folder", suffix]);
        assert_eq!(everything(dir.path()), before);
    }
}

#[test]
fn numbers_that_are_none() {
    let of = |args: &[&str]| Run::of(&mut program(args)).expect(2);
    let whole = "expected a whole number, 0 or more, found";
    for (option, value) in [("--seed", "-1"), ("--seed", "x"), ("--rows", "-3"), ("--cols", "1.5")] {
        of(&["convert", "s", "-o", "o", "-b", "3", option, value]).says(&[option, whole, value]);
    }
    of(&["bench", "encoder", "--seconds", "-1"]).says(&["invalid value '-1' for '--seconds"]);
    of(&["eval", "ppl", "m", "--text", "t", "--max-perplexity", "nan"]).says(&["--max-perplexity", "nan"]);
    of(&["eval", "kl", "s", "m", "--text", "t", "--max-kl", "nan"]).says(&["--max-kl", "nan"]);
    let rows = usize::MAX.to_string();
    refused_nano(&["--bits", "3", "--rows", &rows, "--cols", "64"], &["64 tokens are no corpus", "2^64"]);
}

/// What would make the last step of a conversion fail is found before the first.
#[test]
fn output_folders_that_cannot_appear() {
    let dir = tempfile::tempdir().unwrap();
    TestLlama::nano().write(&dir.path().join("source"));
    fs::write(dir.path().join("file"), "").unwrap();
    std::os::unix::fs::symlink("nowhere", dir.path().join("dangling")).unwrap();
    let before = names(dir.path());
    for (out, words) in [
        ("file/out", ["file cannot be written into", "caused by", "hint: choose another output folder"]),
        ("dangling", ["dangling is a link to nothing", "caused by", "hint: remove the link"]),
        ("dangling/", ["dangling is a link to nothing", "caused by", "hint: remove the link"]),
    ] {
        let mut command = program(["convert", "--bits", "1", "--rows", "2", "--cols", "64"]);
        command.arg(dir.path().join("source")).arg("--output").arg(dir.path().join(out));
        Run::of(command.arg("--work").arg(dir.path().join("work"))).expect(2).says(&words);
        assert_eq!(names(dir.path()), before, "{out}");
    }
}
