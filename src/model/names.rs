//! The names a checkpoint gives to a model's tensors.
//!
//! The same weights lie under `model.`, under `model.language_model.` beside a vision tower, or
//! under prefixes with further such parts, which some exports stack. A model speaks of its
//! checkpoint's own names; what must not depend on the container goes by [`Names::canonical`].

/// Parts a prefix can have.
const PARTS: [&str; 2] = ["model", "language_model"];
const PREFIX: &str = "model";
const HEAD: &str = "lm_head";
const EMBEDDING: &str = "embed_tokens";
const MTP: &str = "mtp";
/// A part of the name of every tensor of a vision tower.
const VISION: &str = "visual";

/// Where the text model and the head lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Of everything but the head, without the last dot.
    prefix: String,
    /// Module name of the head.
    pub head: String,
    embedding: String,
    final_norm: String,
    /// Layers of the multi-token prediction head; 0 without one.
    pub mtp_layers: usize,
}

impl Names {
    /// The names of a plain text model.
    pub fn plain() -> Self {
        Self::new(PREFIX, HEAD)
    }

    /// The names in a checkpoint with the tensors `keys`: its embedding and its head tell.
    pub fn find<'a>(keys: impl Iterator<Item = &'a str>) -> Self {
        let (mut prefix, mut head) = (PREFIX, HEAD);
        let mut mtp_layers = 0;
        for key in keys {
            mtp_layers = mtp_layers.max(mtp_layer(key).map_or(0, |layer| layer + 1));
            let module = key.rsplit_once('.').map_or(key, |(module, _)| module);
            let (parent, name) = module.rsplit_once('.').unwrap_or(("", module));
            if !parent.split('.').all(|part| part.is_empty() || PARTS.contains(&part)) {
                continue;
            }
            match name {
                EMBEDDING => prefix = parent,
                HEAD => head = module,
                _ => {}
            }
        }
        Self { mtp_layers, ..Self::new(prefix, head) }
    }

    fn new(prefix: &str, head: &str) -> Self {
        let below = |name: &str| if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
        Self {
            embedding: below(&format!("{EMBEDDING}.weight")),
            final_norm: below("norm.weight"),
            prefix: prefix.to_owned(),
            head: head.to_owned(),
            mtp_layers: 0,
        }
    }

    /// Module name of the multi-token prediction head: no container renames it.
    pub fn mtp(&self) -> &'static str {
        MTP
    }

    pub fn embedding(&self) -> &str {
        &self.embedding
    }

    pub fn final_norm(&self) -> &str {
        &self.final_norm
    }

    /// Module name of a decoder layer.
    pub fn layer(&self, layer: usize) -> String {
        match self.prefix.as_str() {
            "" => format!("layers.{layer}"),
            prefix => format!("{prefix}.layers.{layer}"),
        }
    }

    /// The name that `key`, of a module or a tensor, has in a plain text model.
    pub fn canonical(&self, key: &str) -> String {
        let after =
            |prefix: &str| key.strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with('.'));
        match (after(&self.head), after(&self.prefix)) {
            (Some(rest), _) => format!("{HEAD}{rest}"),
            (None, Some(rest)) => format!("{PREFIX}{rest}"),
            (None, None) if self.prefix.is_empty() && key.starts_with("layers.") => format!("{PREFIX}.{key}"),
            (None, None) => key.to_owned(),
        }
    }
}

/// The layer of a multi-token prediction head that a tensor belongs to.
fn mtp_layer(key: &str) -> Option<usize> {
    key.strip_prefix(MTP)?.strip_prefix(".layers.")?.split('.').next()?.parse().ok()
}

/// Whether a tensor is part of a vision tower.
pub(super) fn is_vision(key: &str) -> bool {
    key.split('.').any(|part| part == VISION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_linear_has_one_canonical_name_under_every_prefix() {
        for prefix in [
            "model",
            "model.language_model",
            "language_model.model",
            "model.language_model.language_model.language_model",
            "",
        ] {
            let key =
                |rest: &str| if prefix.is_empty() { rest.to_owned() } else { format!("{prefix}.{rest}") };
            let keys = [key("embed_tokens.weight"), "mtp.embed_tokens.weight".into(), key("norm.weight")];
            let names = Names::find(keys.iter().map(String::as_str));
            assert_eq!(names.layer(3), key("layers.3"));
            assert_eq!(names.embedding(), keys[0]);
            assert_eq!(names.final_norm(), keys[2]);
            assert_eq!(names.canonical(&key("layers.3.mlp.up_proj")), "model.layers.3.mlp.up_proj");
            assert_eq!(names.canonical("lm_head.weight"), "lm_head.weight");
            assert_eq!(names.canonical("mtp.fc"), "mtp.fc");
        }
        let names = Names::find(
            ["language_model.lm_head.trellis", "language_model.model.embed_tokens.weight"].into_iter(),
        );
        assert_eq!(names.canonical("language_model.lm_head"), "lm_head");
        assert_eq!(names.canonical(&names.layer(0)), "model.layers.0");
        assert_eq!(Names::find(std::iter::empty()), Names::plain());
    }
}
