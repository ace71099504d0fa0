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
