//! Qwen3.5 checkpoints with random weights, in every container.

use std::fs;
use std::path::Path;

use exl3_candle::linalg::Rng;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::checkpoint::{Tensors, write_shards, write_tokenizer};

/// Where the text model lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// `model.language_model.`, beside a vision tower; the text's config in `text_config`.
    Nested,
    /// `model.`, alone.
    Flat,
    /// As `Nested`, under the prefix that some exports stack.
    TripleNested,
}

impl Container {
    pub const ALL: [Self; 3] = [Self::Nested, Self::Flat, Self::TripleNested];

    /// Of the text model's names.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Nested => "model.language_model.",
            Self::Flat => "model.",
            Self::TripleNested => "model.language_model.language_model.language_model.",
        }
    }

    fn vision_prefix(self) -> Option<&'static str> {
        match self {
            Self::Nested => Some("model.visual."),
            Self::Flat => None,
            Self::TripleNested => Some("model.language_model.visual."),
        }
    }
}

/// A hybrid of one delta net and one layer of full attention, as small as the format allows.
#[derive(Clone)]
pub struct TestHybrid {
    pub container: Container,
    /// Layers of a multi-token prediction head: in the checkpoint, and in the config.
    pub mtp_layers: usize,
    pub declared_mtp_layers: usize,
    /// `tie_word_embeddings` at the top level and beside the text's fields. A tied checkpoint has no
    /// `lm_head.weight`.
    pub tied: [Option<bool>; 2],
}

pub const HIDDEN: usize = 128;
pub const VOCAB: usize = 128;
const INTERMEDIATE: usize = 128;
const HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const KEY_HEADS: usize = 1;
const VALUE_HEADS: usize = 2;

impl TestHybrid {
    pub fn new(container: Container) -> Self {
        Self { container, mtp_layers: 1, declared_mtp_layers: 1, tied: [Some(false), None] }
    }

    /// Writes the checkpoint with a tokenizer of single characters into `dir`.
    pub fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        write_shards(dir, &self.tensors(), Dtype::BF16, 2);
        fs::write(dir.join("config.json"), self.config().to_string()).unwrap();
        fs::write(dir.join("preprocessor_config.json"), "{}").unwrap();
        write_tokenizer(dir);
    }

    pub fn config(&self) -> Value {
        let [outer_tie, inner_tie] = self.tied;
        let mut text = json!({
            "full_attention_interval": 2,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": HEAD_DIM,
            "linear_num_key_heads": KEY_HEADS,
            "linear_num_value_heads": VALUE_HEADS,
            "linear_value_head_dim": HEAD_DIM,
            "max_position_embeddings": 512,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": self.declared_mtp_layers,
            "num_attention_heads": HEADS,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25,
                "rope_theta": 10000.0, "rope_type": "default",
            },
            "tie_word_embeddings": inner_tie,
            "vocab_size": VOCAB,
        });
        if self.container == Container::Flat {
            text["architectures"] = json!(["Qwen3_5ForCausalLM"]);
            text["tie_word_embeddings"] = json!(outer_tie.or(inner_tie));
            return text;
        }
        json!({
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "tie_word_embeddings": outer_tie,
            "vision_config": { "model_type": "qwen3_5_vision" },
        })
    }

    pub fn tensors(&self) -> Tensors {
        let mut tensors = Tensors::new();
        // By its plain name, so that all containers hold the same weights.
        let mut put = |stored: String, plain: &str, shape: &[usize], mean: f32, deviation: f32| {
            let mut rng = Rng::new(11, plain);
            let values = (0..shape.iter().product()).map(|_| mean + deviation * rng.normal()).collect();
            tensors.insert(stored, (shape.to_vec(), values));
        };
        for (name, shape, deviation) in self.text() {
            let stored = format!("{}{name}", self.container.prefix());
            put(stored, &name, &shape, mean_of(&name), deviation);
        }
        let others = if self.tied.contains(&Some(true)) { Vec::new() } else { head() };
        for (name, shape, deviation) in others.into_iter().chain(mtp(self.mtp_layers)) {
            put(name.clone(), &name, &shape, mean_of(&name), deviation);
        }
        if let Some(prefix) = self.container.vision_prefix() {
            for (name, shape) in
                [("blocks.0.attn.qkv.weight", vec![96, 32]), ("pos_embed.weight", vec![16, 32])]
            {
                put(format!("{prefix}{name}"), name, &shape, 0.0, 1.0);
            }
        }
        tensors
    }

    fn text(&self) -> Vec<Named> {
        let keys = KEY_HEADS * HEAD_DIM;
        let values = VALUE_HEADS * HEAD_DIM;
        let mut tensors = vec![
            ("embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN], 1.0),
            ("norm.weight".to_owned(), vec![HIDDEN], 0.1),
        ];
        tensors.extend(around("layers.0"));
        for (name, n, k) in [
            ("in_proj_qkv", 2 * keys + values, HIDDEN),
            ("in_proj_z", values, HIDDEN),
            ("in_proj_b", VALUE_HEADS, HIDDEN),
            ("in_proj_a", VALUE_HEADS, HIDDEN),
            ("out_proj", HIDDEN, values),
        ] {
            tensors.push(linear(&format!("layers.0.linear_attn.{name}"), n, k));
        }
        for (name, shape, deviation) in [
            ("conv1d.weight", vec![2 * keys + values, 1, 4], 0.5),
            ("A_log", vec![VALUE_HEADS], 1.0),
            ("dt_bias", vec![VALUE_HEADS], 1.0),
            ("norm.weight", vec![HEAD_DIM], 0.1),
        ] {
            tensors.push((format!("layers.0.linear_attn.{name}"), shape, deviation));
        }
        tensors.extend(attention_layer("layers.1"));
        tensors
    }
}

/// Name, shape and standard deviation of a tensor.
type Named = (String, Vec<usize>, f32);

fn linear(module: &str, n: usize, k: usize) -> Named {
    (format!("{module}.weight"), vec![n, k], 1.5 / (k as f32).sqrt())
}

/// Weights of norms are offsets from 1, but for the one inside a delta net.
fn mean_of(name: &str) -> f32 {
    if name.ends_with("linear_attn.norm.weight") { 1.0 } else { 0.0 }
}

/// What every layer has around its mixing of tokens.
fn around(layer: &str) -> Vec<Named> {
    let norm = |name: &str| (format!("{layer}.{name}.weight"), vec![HIDDEN], 0.1);
    vec![
        norm("input_layernorm"),
        norm("post_attention_layernorm"),
        linear(&format!("{layer}.mlp.gate_proj"), INTERMEDIATE, HIDDEN),
        linear(&format!("{layer}.mlp.up_proj"), INTERMEDIATE, HIDDEN),
        linear(&format!("{layer}.mlp.down_proj"), HIDDEN, INTERMEDIATE),
    ]
}

fn attention_layer(layer: &str) -> Vec<Named> {
    let attention = HEADS * HEAD_DIM;
    let mut tensors = around(layer);
    for (name, n, k) in [
        ("q_proj", 2 * attention, HIDDEN),
        ("k_proj", HEAD_DIM, HIDDEN),
        ("v_proj", HEAD_DIM, HIDDEN),
        ("o_proj", HIDDEN, attention),
    ] {
        tensors.push(linear(&format!("{layer}.self_attn.{name}"), n, k));
    }
    for norm in ["q_norm", "k_norm"] {
        tensors.push((format!("{layer}.self_attn.{norm}.weight"), vec![HEAD_DIM], 0.1));
    }
    tensors
}

fn head() -> Vec<Named> {
    vec![linear("lm_head", VOCAB, HIDDEN)]
}

fn mtp(layers: usize) -> Vec<Named> {
    if layers == 0 {
        return Vec::new();
    }
    let norms = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"];
    let norms = norms.map(|norm| (format!("mtp.{norm}.weight"), vec![HIDDEN], 0.1));
    let layers = (0..layers).flat_map(|layer| attention_layer(&format!("mtp.layers.{layer}")));
    norms.into_iter().chain([linear("mtp.fc", HIDDEN, 2 * HIDDEN)]).chain(layers).collect()
}
