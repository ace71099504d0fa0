//! Files to token rows: the plain-text protocol, JSON lines, pre-tokenized rows, the bundled mix.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use exl3_candle::corpus::{
    Bos, Corpus, CorpusError, Mix, Shape, SourceKind, Tokenizer, default_mix, from_file, load_tokenizer,
};
use serde_json::{Value, json};
use tempfile::TempDir;

const TINY_VOCAB: usize = 4096;
const BOS: u32 = 0;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(name: &str) -> PathBuf {
    root().join("fixtures").join(name)
}

fn tiny() -> Tokenizer {
    load_tokenizer(&fixture("tiny-llama")).unwrap()
}

fn shape(rows: usize, cols: usize) -> Shape {
    Shape { rows, cols }
}

/// The tiny model's tokenizer with edited files.
fn edited(edit: impl FnOnce(&mut Value, &mut Value)) -> Result<Tokenizer, CorpusError> {
    let dir = TempDir::new().unwrap();
    let read = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(fixture("tiny-llama").join(name)).unwrap()).unwrap()
    };
    let (mut tokenizer, mut config) = (read("tokenizer.json"), read("tokenizer_config.json"));
    edit(&mut tokenizer, &mut config);
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    load_tokenizer(dir.path())
}

struct Files(TempDir);

impl Files {
    fn new() -> Files {
        Files(TempDir::new().unwrap())
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, content).unwrap();
        path
    }
}

fn tiny_corpus(file: &Path, rows: usize, cols: usize) -> Result<Corpus, CorpusError> {
    from_file(&tiny(), file, shape(rows, cols), TINY_VOCAB)
}

/// The message with its causes, as a user would see it.
fn message(result: Result<Corpus, CorpusError>) -> String {
    let error = result.expect_err("an error was expected");
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// Token ids as the tokenizers crate itself gives them, with special tokens.
fn oracle(text: &str) -> Vec<u32> {
    let tokenizer = tokenizers::Tokenizer::from_file(fixture("tiny-llama/tokenizer.json")).unwrap();
    tokenizer.encode(text, true).unwrap().get_ids().to_vec()
}

// Plain text.

#[test]
fn text_is_encoded_once_as_a_whole_and_cut_without_overlap() {
    let file = fixture("corpus/northanger.txt");
    let corpus = tiny_corpus(&file, 128, 512).unwrap();
    let whole = oracle(&fs::read_to_string(&file).unwrap());
    assert_eq!(corpus.rows().concat(), whole[..128 * 512]);
    assert_eq!(corpus.shape(), shape(128, 512));
    assert_eq!(corpus.bos(), Bos::Once { id: BOS });
    assert_eq!(corpus.rows().iter().flatten().filter(|&&id| id == BOS).count(), 1);
    assert_eq!(corpus.rows()[0][0], BOS);
}

#[test]
fn evaluation_rows_equal_the_input_of_the_golden_forward() {
    let bytes = fs::read(fixture("tiny-llama/golden_forward.safetensors")).unwrap();
    let golden = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids: Vec<u32> = golden
        .tensor("input_ids")
        .unwrap()
        .data()
        .chunks_exact(8)
        .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32)
        .collect();
    let corpus = tiny_corpus(&fixture("corpus/persuasion.txt"), 1, ids.len()).unwrap();
    assert_eq!(corpus.rows()[0], ids);
}

#[test]
fn a_beginning_of_a_text_gives_the_tokens_of_the_whole() {
    let file = fixture("corpus/persuasion.txt");
    let text = fs::read_to_string(&file).unwrap();
    for model in ["tiny-llama", "micro-llama"] {
        let tokenizer = load_tokenizer(&fixture(model)).unwrap();
        let whole = tokenizer.encode(&text).unwrap();
        for (rows, cols) in [(1, 1), (3, 17), (16, 64), (9, 512)] {
            let corpus = from_file(&tokenizer, &file, shape(rows, cols), TINY_VOCAB).unwrap();
            assert_eq!(corpus.rows().concat(), whole[..rows * cols], "{model} {rows} x {cols}");
        }
    }
    // Without a pre-tokenizer the whole text is one piece for the merges.
    let tokenizer = edited(|tokenizer, _| tokenizer["pre_tokenizer"]["use_regex"] = json!(false)).unwrap();
    let whole = tokenizer.encode(&text).unwrap();
    let corpus = from_file(&tokenizer, &file, shape(8, 64), TINY_VOCAB).unwrap();
    assert_eq!(corpus.rows().concat(), whole[..512]);
}

#[test]
fn a_text_of_few_tokens_per_byte_is_read_further() {
    let files = Files::new();
    // Runs of spaces are one token each for the tiny tokenizer: far more than 8 bytes per token.
    let text = format!("word{}", " ".repeat(60)).repeat(6000);
    let file = files.write("spaces.txt", &text);
    let whole = oracle(&text);
    let rows = whole.len() / 64;
    assert_eq!(tiny_corpus(&file, rows, 64).unwrap().rows().concat(), whole[..rows * 64]);
    let early = tiny_corpus(&file, 2, 64).unwrap();
    assert_eq!(early.rows().concat(), whole[..128]);
}

#[test]
fn a_huge_line_without_a_space_is_cut_to_rows() {
    let files = Files::new();
    let text = "ab".repeat(300_000);
    let corpus = tiny_corpus(&files.write("line.txt", &text), 4, 64).unwrap();
    assert_eq!(corpus.rows().concat(), oracle(&text[..20_000])[..256]);
}

#[test]
fn a_text_too_short_says_what_it_needs_and_has() {
    let files = Files::new();
    let file = files.write("short.txt", "A short text.");
    let have = oracle("A short text.").len();
    let text = message(tiny_corpus(&file, 3, 50));
    assert!(text.contains(&format!("need 150 tokens, have {have}")), "{text}");
    assert!(text.contains("short.txt"), "{text}");
    assert!(tiny_corpus(&file, 1, have).is_ok());
    assert!(tiny_corpus(&file, 1, have + 1).is_err());
    assert!(message(tiny_corpus(&files.write("empty.txt", ""), 1, 8)).contains("need 8 tokens, have 1"));
}

#[test]
fn a_byte_order_mark_is_no_text() {
    let files = Files::new();
    let with = tiny_corpus(&files.write("with.txt", "\u{feff}one two three four five"), 1, 4).unwrap();
    let without = tiny_corpus(&files.write("without.txt", "one two three four five"), 1, 4).unwrap();
    assert_eq!(with.rows(), without.rows());
}

#[test]
fn faults_of_files_are_named() {
    let files = Files::new();
    let text = message(tiny_corpus(&files.write("latin1.txt", b"caf\xe9 au lait"), 1, 2));
    assert!(text.contains("latin1.txt") && text.contains("offset 3"), "{text}");
    let text = message(tiny_corpus(&files.0.path().join("absent.txt"), 1, 2));
    assert!(text.contains("absent.txt"), "{text}");
    let file = files.write("a.txt", "some words to be encoded");
    assert!(matches!(tiny_corpus(&file, 0, 5), Err(CorpusError::Shape { .. })));
    assert!(matches!(tiny_corpus(&file, 5, 0), Err(CorpusError::Shape { .. })));
    assert!(matches!(tiny_corpus(&file, usize::MAX, 2), Err(CorpusError::Shape { .. })));
    let text = message(from_file(&tiny(), &file, shape(1, 3), 2));
    assert!(text.contains("a.txt") && text.contains("vocabulary of 2"), "{text}");
}

// BOS.

#[test]
fn bos_is_there_exactly_once_or_not_at_all() {
    let add = |value: Value| move |_: &mut Value, config: &mut Value| config["add_bos_token"] = value;
    let no_processor = |tokenizer: &mut Value, _: &mut Value| tokenizer["post_processor"] = Value::Null;
    let both_silent = |tokenizer: &mut Value, config: &mut Value| {
        tokenizer["post_processor"] = Value::Null;
        config.as_object_mut().unwrap().remove("add_bos_token");
    };
    let flagged = |tokenizer: &mut Value, config: &mut Value| {
        tokenizer["post_processor"] = Value::Null;
        config["bos_token"] = json!({"content": "<|begin_of_text|>", "special": true});
    };
    let plain = oracle("plain text")[1..].to_vec();
    let with_bos: Vec<u32> = [&[BOS], &plain[..]].concat();
    let ids = |tokenizer: Tokenizer, text| tokenizer.encode(text).unwrap();
    assert_eq!(ids(tiny(), "plain text"), with_bos);
    assert_eq!(ids(edited(add(json!(true))).unwrap(), "plain text"), with_bos);
    assert_eq!(ids(edited(add(Value::Null)).unwrap(), "plain text"), with_bos);
    assert_eq!(ids(edited(add(json!(false))).unwrap(), "plain text"), plain);
    assert_eq!(ids(edited(no_processor).unwrap(), "plain text"), with_bos);
    assert_eq!(ids(edited(flagged).unwrap(), "plain text"), with_bos);
    assert_eq!(ids(edited(both_silent).unwrap(), "plain text"), plain);
    assert_eq!(ids(tiny(), "<|begin_of_text|>plain text"), with_bos);
    assert_eq!(edited(both_silent).unwrap().bos_id(), None);
    let files = Files::new();
    let file = files.write("a.txt", "plain text");
    let corpus = from_file(&edited(both_silent).unwrap(), &file, shape(1, 2), TINY_VOCAB).unwrap();
    assert_eq!(corpus.bos(), Bos::Absent);
}

#[test]
fn a_bos_that_cannot_be_found_is_an_error() {
    let nameless = edited(|_, config| {
        config.as_object_mut().unwrap().remove("bos_token");
    });
    assert!(matches!(nameless, Err(CorpusError::Bos { .. })));
    let Err(error) = edited(|_, config| config["bos_token"] = json!("<s>")) else {
        panic!("a BOS outside the vocabulary was accepted");
    };
    assert!(error.to_string().contains("\"<s>\" is not in the vocabulary"), "{error}");
}

#[test]
fn truncation_and_padding_of_the_tokenizer_file_are_ignored() {
    let tokenizer = edited(|tokenizer, _| {
        tokenizer["truncation"] =
            json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0});
        tokenizer["padding"] = json!({"strategy": {"Fixed": 4096}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 2, "pad_type_id": 0, "pad_token": "<|pad|>"});
    })
    .unwrap();
    let text = "a text of clearly more than eight tokens, if one counts them all";
    assert_eq!(tokenizer.encode(text).unwrap(), oracle(text));
}

#[test]
fn a_folder_without_a_tokenizer_is_an_error_that_names_it() {
    let files = Files::new();
    let Err(error) = load_tokenizer(files.0.path()) else { panic!("no error") };
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    files.write("tokenizer.json", "{\"version\": 17}");
    assert!(matches!(load_tokenizer(files.0.path()), Err(CorpusError::Tokenizer { .. })));
}

#[test]
fn the_micro_tokenizer_covers_every_text() {
    let tokenizer = load_tokenizer(&fixture("micro-llama")).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.bos_id()), (384, Some(BOS)));
    let text = "The abbey, größer, 城南, \u{1f600}\n\ttabs";
    let ids = tokenizer.encode(text).unwrap();
    assert!(ids.iter().all(|&id| id < 384));
    assert_eq!(tokenizer.decode(&ids[1..]).unwrap(), text);
    assert!(ids.len() < text.len(), "merges are applied");
}

// JSON lines.

#[test]
fn json_lines_are_documents_each_with_its_bos() {
    let files = Files::new();
    let lines =
        "{\"text\": \"First document.\", \"id\": 1}\n\n{\"text\": \"\"}\n{\"text\":\"Second\\none.\"}";
    let expected = [oracle("First document."), oracle("Second\none.")].concat();
    for name in ["a.jsonl", "a.ndjson", "a.JSONL", "a.json"] {
        let corpus = tiny_corpus(&files.write(name, lines), 1, expected.len()).unwrap();
        assert_eq!(corpus.rows()[0], expected, "{name}");
        assert_eq!(corpus.bos(), Bos::PerDocument { id: BOS });
    }
    let text = message(tiny_corpus(&files.write("a.jsonl", lines), 9, 9));
    assert!(text.contains(&format!("need 81 tokens, have {}", expected.len())), "{text}");
}

#[test]
fn a_long_document_of_a_json_line_is_cut_to_rows() {
    let files = Files::new();
    let novel = fs::read_to_string(fixture("corpus/persuasion.txt")).unwrap();
    let file = files.write("novel.jsonl", json!({ "text": novel }).to_string());
    let corpus = tiny_corpus(&file, 5, 100).unwrap();
    assert_eq!(corpus.rows().concat(), oracle(&novel)[..500]);
}

#[test]
fn a_bad_json_line_is_named_by_its_number() {
    let files = Files::new();
    for (bad, what) in [
        ("{\"content\": \"x\"}", "only \"content\""),
        ("{\"text\": 5}", "no string"),
        ("{\"text\": \"x\"", "no JSON"),
        ("[1]", "another JSON value"),
        ("{}", "an empty object"),
    ] {
        let file = files.write("bad.jsonl", format!("{{\"text\": \"good\"}}\n\n{bad}\n"));
        let text = message(tiny_corpus(&file, 10, 10));
        assert!(text.contains("line 3") && text.contains(what) && text.contains("bad.jsonl"), "{text}");
    }
}

// Pre-tokenized rows.

fn safetensors_file(
    files: &Files,
    name: &str,
    dtype: safetensors::Dtype,
    dims: Vec<usize>,
    data: &[u8],
) -> PathBuf {
    let view = safetensors::tensor::TensorView::new(dtype, dims, data).unwrap();
    files.write("rows.safetensors", safetensors::serialize([(name, view)], None).unwrap())
}

#[test]
fn pretokenized_rows_are_cropped_and_otherwise_untouched() {
    let files = Files::new();
    let rows = json!([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]);
    let document = json!({"format": "token-rows", "rows": rows, "tokenizer": "tiny", "seed": 3});
    let file = files.write("rows.json", document.to_string());
    let from_json = tiny_corpus(&file, 2, 3).unwrap();
    assert_eq!(from_json.rows(), [[5, 6, 7], [9, 10, 11]]);
    assert_eq!(from_json.bos(), Bos::AsGiven);
    let wide: Vec<u8> = (5..17i64).flat_map(i64::to_le_bytes).collect();
    let narrow: Vec<u8> = (5..17i32).flat_map(i32::to_le_bytes).collect();
    for (dtype, data) in [(safetensors::Dtype::I64, wide), (safetensors::Dtype::I32, narrow)] {
        let file = safetensors_file(&files, "input_ids", dtype, vec![3, 4], &data);
        let corpus = tiny_corpus(&file, 2, 3).unwrap();
        assert_eq!((corpus.rows(), corpus.fingerprint()), (from_json.rows(), from_json.fingerprint()));
    }
}

#[test]
fn pretokenized_rows_that_do_not_fit_are_refused() {
    let files = Files::new();
    let json_file = |rows: Value| files.write("rows.json", json!({"format": "x", "rows": rows}).to_string());
    let text = message(tiny_corpus(&json_file(json!([[1, 2, 3]])), 2, 3));
    assert!(text.contains("need 2 rows, have 1"), "{text}");
    let text = message(tiny_corpus(&json_file(json!([[1, 2, 3], [4, 5]])), 2, 3));
    assert!(text.contains("row 1 is too short") && text.contains("need 3 tokens, have 2"), "{text}");
    let text = message(tiny_corpus(&json_file(json!([[1, 2, 4096]])), 1, 3));
    assert!(text.contains("token id 4096") && text.contains("vocabulary of 4096"), "{text}");
    for broken in [json!([[1, -2, 3]]), json!([[1, 2.5, 3]]), json!("rows"), json!(null)] {
        let text = message(tiny_corpus(&json_file(broken), 1, 3));
        assert!(text.contains("rows.json") && text.contains("token ids"), "{text}");
    }
    let eight = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let i64s = safetensors::Dtype::I64;
    let text = message(tiny_corpus(
        &safetensors_file(&files, "input_ids", i64s, vec![1, 2], &eight(&[3, -1])),
        1,
        2,
    ));
    assert!(text.contains("-1"), "{text}");
    let text =
        message(tiny_corpus(&safetensors_file(&files, "input_ids", i64s, vec![2], &eight(&[3, 4])), 1, 2));
    assert!(text.contains("[rows, cols]"), "{text}");
    let text =
        message(tiny_corpus(&safetensors_file(&files, "input_ids", i64s, vec![1, 1], &eight(&[3])), 1, 2));
    assert!(text.contains("need 2 tokens, have 1"), "{text}");
    let text = message(tiny_corpus(&safetensors_file(&files, "input_ids", i64s, vec![2, 0], &[]), 1, 2));
    assert!(text.contains("have 0"), "{text}");
    let text = message(tiny_corpus(&safetensors_file(&files, "ids", i64s, vec![1, 1], &eight(&[3])), 1, 1));
    assert!(text.contains("input_ids"), "{text}");
    let f64s = safetensors::Dtype::F64;
    let text =
        message(tiny_corpus(&safetensors_file(&files, "input_ids", f64s, vec![1, 1], &eight(&[3])), 1, 1));
    assert!(text.contains("F64"), "{text}");
    let text = message(tiny_corpus(&files.write("cut.safetensors", b"\x40\0\0\0\0\0\0\0{}"), 1, 1));
    assert!(text.contains("cut.safetensors"), "{text}");
}

// Fingerprint.

#[test]
fn the_fingerprint_is_the_hash_of_shape_and_ids() {
    use sha2::{Digest, Sha256};
    let files = Files::new();
    let file = files.write("rows.json", json!({"rows": [[1, 2], [3, 4], [1, 2, 3, 4]]}).to_string());
    let corpus = tiny_corpus(&file, 2, 2).unwrap();
    let mut bytes = [2u64.to_le_bytes(), 2u64.to_le_bytes()].concat();
    bytes.extend([1u32, 2, 3, 4].iter().flat_map(|id| id.to_le_bytes()));
    let expected: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(corpus.fingerprint(), expected);
    // The same ids in another shape are another corpus.
    let flat = files.write("flat.json", json!({"rows": [[1, 2, 3, 4]]}).to_string());
    assert_ne!(tiny_corpus(&flat, 1, 4).unwrap().fingerprint(), expected);
}

// The bundled mix.

#[test]
fn every_file_in_configs_is_parsed_and_used() {
    let mut listed = BTreeSet::new();
    for entry in fs::read_dir(root().join("configs")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            continue;
        }
        assert_eq!(path.extension().unwrap(), "toml", "{} is of no known kind", path.display());
        let mix = Mix::parse(&fs::read_to_string(&path).unwrap()).unwrap();
        assert!(mix.sources.iter().any(|s| s.kind == SourceKind::RandomTokens));
        for source in &mix.sources {
            assert!(!source.licence.is_empty() && !source.origin.is_empty(), "{}", source.name);
            listed.extend(source.files.iter().map(|file| root().join("configs").join(file)));
        }
    }
    let mut found = BTreeSet::new();
    let mut folders = vec![root().join("configs/calibration")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { assert!(found.insert(path)) }
        }
    }
    assert_eq!(listed, found);
}

#[test]
fn a_mix_file_that_makes_no_sense_is_refused() {
    let source = |text: &str| {
        format!("description = \"d\"\n[[source]]\nname = \"n\"\nlicence = \"l\"\norigin = \"o\"\n{text}")
    };
    for (toml, what) in [
        (source("kind = \"text\"\nweight = 1.0\nfiles = [\"calibration/absent.txt\"]"), "not bundled"),
        (source("kind = \"text\"\nweight = 1.0"), "has files"),
        (source("kind = \"random-tokens\"\nweight = 0.0"), "weight 0"),
        (source("kind = \"random-tokens\"\nweight = nan"), "weight NaN"),
        (source("kind = \"poetry\"\nweight = 1.0"), "poetry"),
        (source("kind = \"random-tokens\"\nweight = 1.0\nsize = 3"), "size"),
        ("description = \"d\"\nsource = []".into(), "no sources"),
    ] {
        let error = Mix::parse(&toml).expect_err(what).to_string();
        assert!(error.contains(what), "{what}: {error}");
    }
}

#[test]
fn the_default_mix_fills_the_default_shape_for_any_tokenizer() {
    // One token per word is less than any real vocabulary gives, however large.
    let words = edited(|tokenizer, config| {
        tokenizer["model"] =
            json!({"type": "WordLevel", "vocab": {"<unk>": 5, "the": 6, "of": 7}, "unk_token": "<unk>"});
        tokenizer["pre_tokenizer"] = json!({"type": "WhitespaceSplit"});
        config["add_bos_token"] = json!(true);
    })
    .unwrap();
    for tokenizer in [tiny(), load_tokenizer(&fixture("micro-llama")).unwrap(), words] {
        let corpus = default_mix(&tokenizer, shape(128, 512), 1, TINY_VOCAB).unwrap();
        assert_eq!(corpus.shape(), shape(128, 512));
        assert!(corpus.rows().iter().all(|row| row.len() == 512));
    }
}

#[test]
fn the_default_mix_has_its_shares_and_depends_on_seed_only_in_its_random_rows() {
    let mix = |seed| default_mix(&tiny(), shape(100, 128), seed, TINY_VOCAB).unwrap();
    let (first, again, other) = (mix(1), mix(1), mix(2));
    assert_eq!(first, again);
    assert_ne!(first.fingerprint(), other.fingerprint());
    let differing: Vec<usize> = (0..100).filter(|&row| first.rows()[row] != other.rows()[row]).collect();
    assert_eq!(differing, (90..100).collect::<Vec<_>>());
    for row in &first.rows()[90..] {
        assert_eq!(row[0], BOS);
        assert!(row[1..].iter().all(|&id| id > 2), "special tokens are never drawn");
        assert!(row.iter().collect::<BTreeSet<_>>().len() > 100, "hardly any draws repeat");
    }
    let description = first.description();
    for part in ["62 english-prose", "20 code", "8 multilingual", "10 random-tokens"] {
        assert!(description.contains(part), "{description}");
    }
    let texts: Vec<String> = first.rows()[82..90].iter().map(|row| tiny().decode(row).unwrap()).collect();
    let scripts = [('а'..='я'), ('α'..='ω'), ('一'..='龥'), ('가'..='힣'), ('ا'..='ي')];
    let heard = scripts.iter().filter(|script| texts.concat().chars().any(|c| script.contains(&c))).count();
    assert!(heard >= 3, "only {heard} of {} scripts are in the multilingual rows", scripts.len());
}

#[test]
fn small_and_single_shapes_of_the_default_mix_work() {
    for (rows, cols) in [(1, 1), (1, 64), (2, 32), (7, 16)] {
        let corpus = default_mix(&tiny(), shape(rows, cols), 5, TINY_VOCAB).unwrap();
        assert_eq!(corpus.shape(), shape(rows, cols));
    }
}

#[test]
fn a_default_mix_that_is_too_short_points_to_the_option() {
    let text = message(default_mix(&tiny(), shape(2048, 512), 1, TINY_VOCAB));
    assert!(text.contains("--calibration") && text.contains("need 1843 rows"), "{text}");
    assert!(matches!(default_mix(&tiny(), shape(0, 1), 1, TINY_VOCAB), Err(CorpusError::Shape { .. })));
    let text = message(default_mix(&tiny(), shape(4, 16), 1, 100));
    assert!(text.contains("vocabulary of 100"), "{text}");
}
