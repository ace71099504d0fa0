//! Llama checkpoints with random weights, in every form that a source can have.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use exl3_candle::linalg::Rng;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};
use serde_json::{Map, Value, json};

/// Where the output projection is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Head {
    Own,
    /// It is the embedding.
    Tied,
    /// It is the embedding, and stored a second time.
    TiedAndStored,
}

/// A Llama as small as the format allows.
#[derive(Clone)]
pub struct TestLlama {
    pub layers: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub vocab: usize,
    pub heads: usize,
    pub dtype: Dtype,
    pub head: Head,
    pub biases: bool,
    /// One file comes without an index.
    pub shards: usize,
    /// Fields of `config.json` that differ; null removes one.
    pub config: Vec<(&'static str, Value)>,
    /// Factor of all linear weights.
    pub gain: f32,
}

pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

const HEAD_DIM: usize = 64;

impl TestLlama {
    pub fn nano() -> Self {
        Self {
            layers: 1,
            hidden: 128,
            intermediate: 128,
            vocab: 128,
            heads: 2,
            dtype: Dtype::BF16,
            head: Head::Own,
            biases: false,
            shards: 1,
            config: Vec::new(),
            gain: 1.0,
        }
    }

    pub fn with_config(mut self, field: &'static str, value: Value) -> Self {
        self.config.push((field, value));
        self
    }

    /// Writes the checkpoint with a tokenizer of single characters into `dir`.
    pub fn write(&self, dir: &Path) {
        self.write_edited(dir, |_| {});
    }

    /// As `write`, with the tensors changed by `edit` before.
    pub fn write_edited(&self, dir: &Path, edit: impl FnOnce(&mut Tensors)) {
        fs::create_dir_all(dir).unwrap();
        let mut tensors = self.tensors();
        edit(&mut tensors);
        write_shards(dir, &tensors, self.dtype, self.shards);
        fs::write(dir.join("config.json"), self.config().to_string()).unwrap();
        write_tokenizer(dir);
    }

    fn config(&self) -> Value {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": self.biases,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 512,
            "mlp_bias": self.biases,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": self.head != Head::Own,
            "vocab_size": self.vocab,
        });
        let fields = config.as_object_mut().unwrap();
        for (field, value) in &self.config {
            match value {
                Value::Null => drop(fields.shift_remove(*field)),
                value => drop(fields.insert((*field).to_owned(), value.clone())),
            }
        }
        config
    }

    fn tensors(&self) -> Tensors {
        let (hidden, inner, attention) = (self.hidden, self.intermediate, self.heads * HEAD_DIM);
        let mut tensors = Tensors::new();
        let mut put = |key: String, shape: &[usize], mean: f32, deviation: f32| {
            let mut rng = Rng::new(7, &key);
            let values = (0..shape.iter().product()).map(|_| mean + deviation * rng.normal()).collect();
            tensors.insert(key, (shape.to_vec(), values));
        };
        // As a head, it gives logits that are not all on one token.
        let embedding = if self.head == Head::Own { 1.0 } else { 2.0 / (hidden as f32).sqrt() };
        put("model.embed_tokens.weight".into(), &[self.vocab, hidden], 0.0, embedding);
        put("model.norm.weight".into(), &[hidden], 1.0, 0.1);
        for layer in (0..self.layers).map(|i| format!("model.layers.{i}")) {
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                put(format!("{layer}.{norm}.weight"), &[hidden], 1.0, 0.1);
            }
            for (module, n, k) in [
                ("self_attn.q_proj", attention, hidden),
                ("self_attn.k_proj", HEAD_DIM, hidden),
                ("self_attn.v_proj", HEAD_DIM, hidden),
                ("self_attn.o_proj", hidden, attention),
                ("mlp.gate_proj", inner, hidden),
                ("mlp.up_proj", inner, hidden),
                ("mlp.down_proj", hidden, inner),
            ] {
                let key = format!("{layer}.{module}");
                put(format!("{key}.weight"), &[n, k], 0.0, self.gain / (k as f32).sqrt());
                if self.biases {
                    put(format!("{key}.bias"), &[n], 0.0, 0.5);
                }
            }
        }
        if self.head == Head::Own {
            put(
                "lm_head.weight".into(),
                &[self.vocab, hidden],
                0.0,
                2.0 * self.gain / (hidden as f32).sqrt(),
            );
        }
        if self.head == Head::TiedAndStored {
            let embedding = tensors["model.embed_tokens.weight"].clone();
            tensors.insert("lm_head.weight".into(), embedding);
        }
        tensors
    }
}

/// Writes tensors as one file, or as several with an index.
pub fn write_shards(dir: &Path, tensors: &Tensors, dtype: Dtype, shards: usize) {
    let stored: Vec<(&String, &Vec<usize>, Vec<u8>)> =
        tensors.iter().map(|(key, (shape, values))| (key, shape, bytes(dtype, values))).collect();
    let mut map = Map::new();
    for (i, part) in stored.chunks(stored.len().div_ceil(shards)).enumerate() {
        let name = match shards {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let views = part
            .iter()
            .map(|(key, shape, data)| (key, TensorView::new(dtype, shape.to_vec(), data).unwrap()));
        fs::write(dir.join(&name), serialize(views, None).unwrap()).unwrap();
        map.extend(part.iter().map(|(key, ..)| ((*key).clone(), json!(name))));
    }
    if shards > 1 {
        let index = json!({ "metadata": {}, "weight_map": map });
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }
}

fn bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        Dtype::F32 => values.iter().flat_map(|&v| v.to_le_bytes()).collect(),
        other => panic!("no test checkpoint in {other:?}"),
    }
}

/// One token per character of ASCII, below 128 in number.
pub fn write_tokenizer(dir: &Path) {
    let characters = std::iter::once('\n').chain(' '..='~').map(String::from);
    let specials = ["<s>", "</s>", "<unk>"].map(String::from).into_iter();
    let vocab: Map<String, Value> =
        specials.chain(characters).enumerate().map(|(id, token)| (token, json!(id))).collect();
    let special = |id: usize, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true })
    };
    let bos = json!({ "SpecialToken": { "id": "<s>", "type_id": 0 } });
    let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<s>"), special(1, "</s>"), special(2, "<unk>")],
        "normalizer": null, "pre_tokenizer": null, "decoder": null,
        "post_processor": {
            "type": "TemplateProcessing", "single": [bos, text("A")], "pair": [text("A"), text("B")],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } },
        },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    });
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config =
        json!({ "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": true });
    fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
}
