//! Jobs and bundles: what is written, what a kill or a full disk leaves, what is refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use exl3_candle::bundle::{
    BundleContent, BundleError, FinishedBundle, JobSpec, Opened, Overwrite, Provenance, TensorMetrics,
    Writer, default_work_dir, durable, fault, list_files, open_job,
};
use exl3_candle::format::{Bits, Codebook, QuantizedLinear, TILE_LEN, packed_len, padded};
use exl3_candle::source::{self, Checkpoint};
use half::f16;
use serde_json::{Map, Value, json};

const SHARD_BYTES: u64 = 150_000;
const UNITS: usize = 3;
const CHILD: &str = "EXL3_CANDLE_TEST_CHILD";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn micro() -> Checkpoint {
    source::open(&fixture("micro-llama")).unwrap()
}

fn recipe() -> Map<String, Value> {
    let recipe = json!({ "source_sha256": "5f", "bits": "2", "codebook": "mul1", "seed": "0.1" });
    recipe.as_object().unwrap().clone()
}

fn job(dir: &Path) -> JobSpec {
    let out = dir.join("out");
    JobSpec { work: default_work_dir(&out), out, recipe: recipe(), overwrite: Overwrite::Refuse }
}

fn layer_modules(layer: usize) -> Vec<String> {
    let leaves = ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj"];
    leaves.iter().map(|leaf| format!("model.layers.{layer}.{leaf}")).collect()
}

/// The linears of one unit, filled with numbers that depend on nothing but their names.
fn unit(checkpoint: &Checkpoint, unit: usize) -> Vec<QuantizedLinear> {
    let keys = if unit < 2 { layer_modules(unit) } else { vec!["lm_head".to_owned()] };
    keys.into_iter().map(|key| linear(checkpoint, key)).collect()
}

fn linear(checkpoint: &Checkpoint, key: String) -> QuantizedLinear {
    let weight = checkpoint.tensor(&format!("{key}.weight")).unwrap();
    let (k, n) = (padded(weight.shape()[1]), padded(weight.shape()[0]));
    let bits: Bits = if key == "lm_head" { "6" } else { "2.5" }.parse().unwrap();
    let mut seed = key.bytes().fold(1u32, |seed, b| seed.wrapping_mul(31).wrapping_add(b.into()));
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 16) as u16
    };
    let mut scales = |len| (0..len).map(|_| f16::from_f32(f32::from(next()) / 1e6)).collect::<Vec<_>>();
    let (suh, svh) = (scales(k), scales(n));
    let bias = key.contains("q_proj").then(|| scales(n));
    let trellis = (0..k * n / TILE_LEN * packed_len(bits, TILE_LEN)).map(|_| next()).collect();
    QuantizedLinear { key, bits, codebook: Codebook::Mul1, trellis, suh, svh, bias }
}

fn metrics(checkpoint: &Checkpoint, linears: &[QuantizedLinear], seconds: f64) -> Vec<TensorMetrics> {
    let metrics = linears.iter().map(|linear| {
        let shape = checkpoint.tensor(&format!("{}.weight", linear.key)).unwrap().shape().to_vec();
        TensorMetrics {
            key: linear.key.clone(),
            bits: linear.bits.as_f64(),
            k: shape[1],
            n: shape[0],
            // Numbers whose shortest decimal form has 17 digits.
            proxy_error: f64::from_bits(0x3fa1_2345_6789_abcd ^ linear.key.len() as u64),
            rel_frobenius: 1.0 / 3.0,
            mse: f64::NAN,
            g_scale: 0.1 + 0.2,
            out_scales: true,
            fallback: false,
            seconds: Some(seconds),
        }
    });
    metrics.collect()
}

fn content(checkpoint: &Checkpoint) -> BundleContent<'_> {
    let mut modules = vec!["model.embed_tokens".to_owned()];
    for layer in 0..2 {
        modules.push(format!("model.layers.{layer}.input_layernorm"));
        modules.extend(layer_modules(layer));
    }
    modules.extend(["model.norm".to_owned(), "lm_head".to_owned()]);
    let quantized: Vec<String> =
        (0..2).flat_map(layer_modules).chain(["lm_head".to_owned()]).map(|m| format!("{m}.weight")).collect();
    let passthrough = checkpoint.keys().filter(|key| !quantized.iter().any(|q| q == key));
    BundleContent {
        checkpoint,
        base: "micro-llama".into(),
        modules,
        passthrough: passthrough.map(str::to_owned).collect(),
        vision: Vec::new(),
        head: Some("lm_head".into()),
        mtp: None,
        mtp_layers: None,
        bits: "2.5".parse().unwrap(),
        head_bits: Some("6".parse().unwrap()),
        codebook: Codebook::Mul1,
        out_scales: "auto".into(),
        rows: 4,
        cols: 32,
        shard_bytes: SHARD_BYTES,
    }
}

fn writer(opened: Opened) -> Writer {
    match opened {
        Opened::Fresh(writer) | Opened::Resumed(writer) => writer,
        Opened::AlreadyDone(dir) => panic!("{} is already done", dir.display()),
    }
}

fn commit(writer: &mut Writer, checkpoint: &Checkpoint, until: usize) -> Result<(), BundleError> {
    for i in writer.committed()..until {
        let linears = unit(checkpoint, i);
        let metrics = metrics(checkpoint, &linears, std::process::id().into());
        writer.commit(i, &linears, metrics)?;
    }
    Ok(())
}

/// Runs the job in `dir` to its end, from wherever it is.
fn run(dir: &Path) -> Result<Option<FinishedBundle>, BundleError> {
    let checkpoint = micro();
    let mut writer = match open_job(job(dir))? {
        Opened::Fresh(writer) | Opened::Resumed(writer) => writer,
        Opened::AlreadyDone(_) => return Ok(None),
    };
    commit(&mut writer, &checkpoint, UNITS)?;
    writer.finish(content(&checkpoint)).map(Some)
}

/// Every file below `dir` with its hash.
fn hashes(dir: &Path) -> BTreeMap<String, String> {
    let hash = |name: String| (name.clone(), durable::digest(&dir.join(&name)).unwrap().sha256);
    list_files(dir).unwrap().into_iter().map(hash).collect()
}

fn error_of(opened: Result<Opened, BundleError>) -> BundleError {
    match opened {
        Err(error) => error,
        Ok(_) => panic!("the job was opened"),
    }
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_finished_bundle_holds_everything_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let finished = run(dir.path()).unwrap().unwrap();
    let out = dir.path().join("out");

    let mut names: Vec<String> = finished.files.iter().map(|f| f.name.clone()).collect();
    names.sort();
    assert_eq!(names, list_files(&out).unwrap());
    for file in &finished.files {
        let found = durable::digest(&out.join(&file.name)).unwrap();
        assert_eq!((found.bytes, found.sha256), (file.bytes, file.sha256.clone()), "{}", file.name);
    }
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["out"], "the work folder is gone");

    let source = micro();
    let bundle = source::open(&out).unwrap();
    for key in content(&source).passthrough {
        let (expected, found) = (source.tensor(&key).unwrap(), bundle.tensor(&key).unwrap());
        assert_eq!((expected.dtype(), expected.shape()), (found.dtype(), found.shape()));
        assert!(expected.bytes() == found.bytes(), "{key}");
    }
    let provenance = Provenance::read(&out).unwrap().unwrap();
    assert_eq!(provenance.files.len(), names.len() - 1);
    assert!(provenance.tensors.iter().all(|t| t.seconds.is_none()));
    let text = fs::read_to_string(out.join("exl3-candle.json")).unwrap();
    assert!(!text.contains(&*dir.path().to_string_lossy()), "no path of this machine in the bundle");
}

#[test]
fn the_manifest_lists_every_leaf_module_as_the_reference_does() {
    let dir = tempfile::tempdir().unwrap();
    let finished = run(dir.path()).unwrap().unwrap();
    let config = read_json(&finished.dir.join("config.json"));
    let mut manifest = read_json(&finished.dir.join("quantization_config.json"));
    let storage = manifest.as_object_mut().unwrap().shift_remove("tensor_storage").unwrap();
    assert_eq!(config["quantization_config"], manifest);
    let reference = read_json(&fixture("bundles/tiny-llama-exl3-3.0bpw/config.json"));
    let keys = |v: &Value| v["quantization_config"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&config), keys(&reference));

    let q_proj = &storage["model.layers.0.self_attn.q_proj"];
    assert_eq!(q_proj["quant_format"], "exl3");
    assert_eq!(q_proj["bits_per_weight"], 2.5);
    assert_eq!(q_proj["mul1_multiplier"], 2_212_286_765u32);
    let leaves: Vec<_> = q_proj["stored_tensors"].as_object().unwrap().keys().cloned().collect();
    let expected = ["suh", "svh", "mul1", "trellis", "bias"];
    assert_eq!(leaves, expected.map(|leaf| format!("model.layers.0.self_attn.q_proj.{leaf}")));
    assert_eq!(storage["lm_head"]["bits_per_weight"], json!(6));
    let embed = &storage["model.embed_tokens"]["stored_tensors"]["model.embed_tokens.weight"];
    assert_eq!(*embed, json!({ "shape": [384, 128], "n_bytes": 98304, "dtype": "torch.bfloat16" }));
}

#[test]
fn the_index_is_what_the_shards_hold() {
    let dir = tempfile::tempdir().unwrap();
    let finished = run(dir.path()).unwrap().unwrap();
    let index = read_json(&finished.dir.join("model.safetensors.index.json"));
    let mut found = BTreeMap::new();
    let mut total = 0;
    for path in exl3_candle::bundle::shard_files(&finished.dir).unwrap() {
        let shard = exl3_candle::bundle::Shard::open(&path).unwrap();
        let bytes: u64 = shard.tensors().iter().map(|t| t.bytes()).sum();
        assert!(bytes <= SHARD_BYTES, "{}: {bytes}", path.display());
        total += bytes;
        for tensor in shard.tensors() {
            found.insert(tensor.name.clone(), path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    assert_eq!(index["weight_map"], json!(found));
    assert_eq!(index["metadata"]["total_size"], total);
}

#[test]
fn a_quantized_head_unties_the_configuration_wherever_the_flag_is() {
    let dir = tempfile::tempdir().unwrap();
    let tied = dir.path().join("tied");
    fs::create_dir(&tied).unwrap();
    for name in list_files(&fixture("micro-llama")).unwrap() {
        fs::copy(fixture("micro-llama").join(&name), tied.join(&name)).unwrap();
    }
    let mut config = read_json(&tied.join("config.json"));
    config["tie_word_embeddings"] = json!(true);
    config["text_config"] = json!({ "tie_word_embeddings": true });
    config["quantization_config"] = json!({ "quant_method": "fp8" });
    fs::write(tied.join("config.json"), config.to_string()).unwrap();
    fs::write(tied.join("README.md"), "no companion").unwrap();
    fs::create_dir(tied.join("additional_chat_templates")).unwrap();
    fs::write(tied.join("additional_chat_templates/tool.jinja"), "{{ x }}").unwrap();

    let checkpoint = source::open(&tied).unwrap();
    let mut writer = writer(open_job(job(dir.path())).unwrap());
    commit(&mut writer, &checkpoint, UNITS).unwrap();
    let finished = writer.finish(content(&checkpoint)).unwrap();
    let config = read_json(&finished.dir.join("config.json"));
    assert_eq!(config["tie_word_embeddings"], false);
    assert_eq!(config["text_config"]["tie_word_embeddings"], false);
    let section = &config["quantization_config"];
    assert_eq!(section["quant_method"], "exl3");
    assert_eq!(section["original_quantization_config"], json!({ "quant_method": "fp8" }));
    assert!(finished.dir.join("additional_chat_templates/tool.jinja").is_file());
    assert!(!finished.dir.join("README.md").exists());
}

#[test]
fn a_null_quantization_of_the_source_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    for name in list_files(&fixture("micro-llama")).unwrap() {
        fs::copy(fixture("micro-llama").join(&name), source.join(&name)).unwrap();
    }
    let mut config = read_json(&source.join("config.json"));
    config["quantization_config"] = Value::Null;
    fs::write(source.join("config.json"), config.to_string()).unwrap();
    let checkpoint = source::open(&source).unwrap();
    let mut writer = writer(open_job(job(dir.path())).unwrap());
    commit(&mut writer, &checkpoint, UNITS).unwrap();
    let finished = writer.finish(content(&checkpoint)).unwrap();
    let section = &read_json(&finished.dir.join("config.json"))["quantization_config"];
    assert!(section.get("original_quantization_config").is_none(), "{section}");
}

#[test]
fn committed_units_come_back_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = micro();
    let mut first = writer(open_job(job(dir.path())).unwrap());
    commit(&mut first, &checkpoint, 2).unwrap();
    assert!(matches!(error_of(open_job(job(dir.path()))), BundleError::Busy { .. }), "one process at a time");
    let error = first.commit(0, &[], Vec::new()).unwrap_err();
    assert!(matches!(error, BundleError::UnitOrder { expected: 2, found: 0 }), "{error}");
    drop(first);
    let Opened::Resumed(second) = open_job(job(dir.path())).unwrap() else { panic!("not resumed") };
    assert_eq!(second.committed(), 2);
    assert_eq!(second.unit(1).unwrap(), unit(&checkpoint, 1));
}

#[test]
fn a_changed_recipe_is_refused_by_the_name_of_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = micro();
    let mut first = writer(open_job(job(dir.path())).unwrap());
    commit(&mut first, &checkpoint, 1).unwrap();
    drop(first);
    for (field, value) in [("codebook", json!("mcg")), ("seed", json!("0.2")), ("new", json!("x"))] {
        let mut changed = job(dir.path());
        changed.recipe.insert(field.into(), value);
        let error = error_of(open_job(changed.clone()));
        assert!(matches!(&error, BundleError::RecipeChanged { field: f, .. } if f == field), "{error}");
        assert!(error.hint().unwrap().contains("--overwrite"));
    }
    let mut removed = job(dir.path());
    removed.recipe.shift_remove("bits");
    let text = error_of(open_job(removed)).to_string();
    assert!(text.contains("another bits: expected \"2\", found nothing"), "{text}");
    let mut replaced = job(dir.path());
    replaced.recipe.insert("bits".into(), json!("3"));
    replaced.overwrite = Overwrite::Replace;
    assert!(matches!(open_job(replaced).unwrap(), Opened::Fresh(_)));
}

#[test]
fn a_torn_last_line_is_redone_and_a_torn_middle_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = micro();
    let mut first = writer(open_job(job(dir.path())).unwrap());
    commit(&mut first, &checkpoint, 2).unwrap();
    let journal = first.work_dir().join("journal.jsonl");
    drop(first);
    let whole = fs::read(&journal).unwrap();
    let lines: Vec<&[u8]> = whole.split_inclusive(|&b| b == b'\n').collect();
    let up_to_second = lines[0].len() + lines[1].len();
    for torn in [up_to_second + 1, whole.len() - 30, whole.len() - 1] {
        fs::write(&journal, &whole[..torn]).unwrap();
        let writer = writer(open_job(job(dir.path())).unwrap());
        assert_eq!(writer.committed(), 1);
        assert_eq!(fs::read(&journal).unwrap(), whole[..up_to_second], "the torn line is cut off");
    }
    let mut middle = whole.clone();
    middle.drain(up_to_second - 40..up_to_second - 20);
    fs::write(&journal, &middle).unwrap();
    let text = error_of(open_job(job(dir.path()))).to_string();
    assert!(text.contains("journal.jsonl, line 2"), "{text}");
}

#[test]
fn a_damaged_unit_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = micro();
    let mut first = writer(open_job(job(dir.path())).unwrap());
    commit(&mut first, &checkpoint, 2).unwrap();
    let path = first.work_dir().join("unit-00001.safetensors");
    drop(first);
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    for damaged in [Some(&flipped[..]), Some(&whole[..whole.len() - 1]), None] {
        match damaged {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let error = error_of(open_job(job(dir.path())));
        assert!(matches!(error, BundleError::UnitDamaged { .. }), "{error}");
        assert!(error.to_string().contains("unit-00001.safetensors"), "{error}");
    }
    fs::write(&path, &whole).unwrap();
    assert_eq!(writer(open_job(job(dir.path())).unwrap()).committed(), 2);
}

#[test]
fn an_occupied_output_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let error = error_of(open_job(job(dir.path())));
    assert!(matches!(&error, BundleError::OutputOccupied { file, .. } if file == "notes.txt"), "{error}");
    let replace = JobSpec { overwrite: Overwrite::Replace, ..job(dir.path()) };
    let error = error_of(open_job(replace));
    assert!(matches!(&error, BundleError::ForeignFile { file, .. } if file == "notes.txt"), "{error}");
    assert!(out.join("notes.txt").is_file());
    assert!(!dir.path().join("out.work").exists());
}

#[test]
fn a_finished_bundle_is_recognized_or_replaced() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path()).unwrap().unwrap();
    let before = hashes(&dir.path().join("out"));
    assert!(run(dir.path()).unwrap().is_none(), "already done");

    let mut other = job(dir.path());
    other.recipe.insert("bits".into(), json!("4"));
    let error = error_of(open_job(other.clone()));
    assert!(
        matches!(&error, BundleError::OutputDiffers { field, expected, found, .. }
            if (field.as_str(), expected.as_str(), found.as_str()) == ("bits", "\"4\"", "\"2\"")),
        "{error}"
    );
    other.overwrite = Overwrite::Replace;
    let checkpoint = micro();
    let mut writer = writer(open_job(other).unwrap());
    commit(&mut writer, &checkpoint, UNITS).unwrap();
    writer.finish(content(&checkpoint)).unwrap();
    let after = hashes(&dir.path().join("out"));
    assert_ne!(before["exl3-candle.json"], after["exl3-candle.json"]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "only the new bundle is left");
}

#[test]
fn what_came_into_the_output_folder_meanwhile_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = micro();
    let mut other = job(dir.path());
    other.work = dir.path().join("elsewhere");
    other.recipe.insert("bits".into(), json!("4"));
    let mut late = writer(open_job(other).unwrap());
    commit(&mut late, &checkpoint, UNITS).unwrap();
    run(dir.path()).unwrap().unwrap();
    let first = hashes(&dir.path().join("out"));
    let error = late.finish(content(&checkpoint)).unwrap_err();
    assert!(matches!(error, BundleError::OutputOccupied { .. }), "{error}");
    assert_eq!(hashes(&dir.path().join("out")), first);
    assert!(dir.path().join("elsewhere/unit-00000.safetensors").is_file(), "the work is kept too");
}

#[test]
fn foreign_files_in_the_work_folder_survive() {
    let dir = tempfile::tempdir().unwrap();
    let work = dir.path().join("out.work");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("mine.txt"), "mine").unwrap();
    fs::write(work.join("states-00001.safetensors"), "stale").unwrap();
    let writer = writer(open_job(job(dir.path())).unwrap());
    assert!(!work.join("states-00001.safetensors").exists(), "states of an unknown recipe are not kept");
    drop(writer);
    run(dir.path()).unwrap().unwrap();
    assert_eq!(list_files(&work).unwrap(), ["mine.txt"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported_with_the_bytes_needed() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = micro();
    let mut writer = writer(open_job(job(dir.path())).unwrap());
    let work = writer.work_dir().to_owned();
    // Every write to this device fails as on a full disk.
    std::os::unix::fs::symlink("/dev/full", work.join(".unit-00000.safetensors.tmp")).unwrap();
    let error = commit(&mut writer, &checkpoint, 1).unwrap_err();
    let BundleError::NoSpace { path, needed_bytes, free_bytes, .. } = &error else { panic!("{error}") };
    assert_eq!(*path, work.join("unit-00000.safetensors"));
    assert!(*needed_bytes > 20_000 && *free_bytes > 0, "{error}");
    assert_eq!(list_files(&work).unwrap(), ["journal.jsonl"], "nothing of the file is left");
    commit(&mut writer, &checkpoint, 1).unwrap();
}

#[cfg(unix)]
#[test]
fn files_have_the_permissions_of_any_new_file() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("plain"), "").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let expected = mode(&dir.path().join("plain"));
    durable::write(&dir.path().join("file"), |sink| std::io::Write::write_all(sink, b"x")).unwrap();
    assert_eq!(mode(&dir.path().join("file")), expected);
}

/// Runs in a process of its own, started by the tests below: a fault strikes the whole process.
#[test]
fn child() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let [fault, step, dir] = order.splitn(3, ':').collect::<Vec<_>>().try_into().unwrap();
    let fault = if fault == "abort" { fault::Fault::Abort } else { fault::Fault::DiskFull };
    fault::arm(fault, step.parse().unwrap());
    match run(Path::new(dir)) {
        Ok(_) if fault::steps_left() > 0 => println!("not reached"),
        Ok(_) => println!("done"),
        Err(error) => println!("failed: {error}"),
    }
}

fn run_child(order: &str) -> (bool, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD, order)
        .output()
        .unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Strikes the job at every step in turn. Whatever has been written by then, there is no output
/// folder or a whole one, and the next run ends with the same bytes as one that was never
/// disturbed.
fn strike_everywhere(fault: &str, check: impl Fn(u64, bool, &str)) -> u64 {
    let undisturbed = tempfile::tempdir().unwrap();
    run(undisturbed.path()).unwrap();
    let expected = hashes(&undisturbed.path().join("out"));
    for step in 1.. {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let (success, text) = run_child(&format!("{fault}:{step}:{}", dir.path().display()));
        if text.contains("not reached") {
            return step - 1;
        }
        check(step, success, &text);
        assert!(!out.exists() || hashes(&out) == expected, "step {step}: half a bundle");
        run(dir.path()).unwrap();
        assert_eq!(hashes(&out), expected, "step {step}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "step {step}: something is left");
    }
    unreachable!()
}

#[test]
fn a_kill_at_any_step_leaves_nothing_half_done() {
    let steps = strike_everywhere("abort", |step, success, _| {
        assert!(!success, "step {step}: the child was to die");
    });
    assert!(steps > 60, "{steps} steps");
}

#[test]
fn a_full_disk_at_any_step_leaves_nothing_half_done() {
    let steps = strike_everywhere("full", |step, success, text| {
        assert!(success, "step {step}: {text}");
        let is_named = text.contains("no space for") && text.contains("bytes needed");
        assert!(is_named || text.contains("done") || text.contains("cannot re"), "step {step}: {text}");
    });
    assert!(steps > 60, "{steps} steps");
}
