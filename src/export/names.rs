//! The names that a runtime reads.

use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value, json};

use super::ExportError;

/// Who is going to read the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runtime {
    Vllm,
    Exllamav3,
}

const PLAIN: &str = "model";
const NESTED: &str = "model.language_model";

/// Where each runtime expects the text model of an architecture: vLLM and exllamav3. The second reads
/// Qwen3.5 from one place, whatever the container.
const PREFIXES: [(&str, [&str; 2]); 6] = [
    ("LlamaForCausalLM", [PLAIN, PLAIN]),
    ("MistralForCausalLM", [PLAIN, PLAIN]),
    ("Qwen2ForCausalLM", [PLAIN, PLAIN]),
    ("Qwen3ForCausalLM", [PLAIN, PLAIN]),
    ("Qwen3_5ForCausalLM", [PLAIN, NESTED]),
    ("Qwen3_5ForConditionalGeneration", [NESTED, NESTED]),
];

impl Runtime {
    pub const ALL: [Self; 2] = [Self::Vllm, Self::Exllamav3];

    pub fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Exllamav3 => "exllamav3",
        }
    }

    /// The prefix of the text model's names.
    pub(super) fn text_prefix(self, config: &Map<String, Value>) -> Result<&'static str, ExportError> {
        let found = config.get("architectures").unwrap_or(&Value::Null);
        let known = PREFIXES.iter().find(|(architecture, _)| *found == json!([architecture]));
        match known {
            Some((_, [vllm, exllamav3])) => Ok(match self {
                Self::Vllm => vllm,
                Self::Exllamav3 => exllamav3,
            }),
            None => Err(ExportError::Architecture {
                runtime: self,
                found: found.to_string(),
                expected: PREFIXES.map(|(architecture, _)| architecture).join(", "),
            }),
        }
    }
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Runtime {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let runtime = Self::ALL.into_iter().find(|runtime| runtime.name() == name);
        runtime.ok_or_else(|| format!("expected {}", Self::ALL.map(Self::name).join(" or ")))
    }
}

/// The name of a tensor or module for a runtime that reads the text model under `prefix`. Containers
/// differ in how many parts `model` and `language_model` they put in front.
pub(super) fn renamed(name: &str, prefix: &str) -> String {
    let mut rest = name;
    while let Some(after) =
        [PLAIN, "language_model"].iter().find_map(|part| rest.strip_prefix(part)?.strip_prefix('.'))
    {
        rest = after;
    }
    match rest.split('.').next().unwrap_or_default() {
        "lm_head" | "mtp" => rest.to_owned(),
        "visual" => format!("{PLAIN}.{rest}"),
        "embed_tokens" | "layers" | "norm" => format!("{prefix}.{rest}"),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_container_becomes_the_one_that_is_read() {
        for container in ["", "model.", "model.language_model.", "model.language_model.language_model."] {
            for (rest, nested) in [
                ("embed_tokens.weight", "model.language_model.embed_tokens.weight"),
                ("layers.3.mlp.up_proj", "model.language_model.layers.3.mlp.up_proj"),
                ("norm.weight", "model.language_model.norm.weight"),
                ("visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.weight"),
                ("mtp.layers.0.mlp.up_proj.trellis", "mtp.layers.0.mlp.up_proj.trellis"),
                ("lm_head.trellis", "lm_head.trellis"),
            ] {
                assert_eq!(renamed(&format!("{container}{rest}"), NESTED), nested);
            }
            assert_eq!(renamed(&format!("{container}layers.0.x"), PLAIN), "model.layers.0.x");
        }
        assert_eq!(renamed("score.weight", NESTED), "score.weight");
    }
}
