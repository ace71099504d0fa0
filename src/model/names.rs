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
    /// Module name of the multi-token prediction head.
    pub mtp: String,
    /// Its layers; 0 without one.
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
        let (mut mtp, mut mtp_layers) = (MTP, 0);
        for key in keys {
            if let Some((module, layer)) = mtp_layer(key) {
                (mtp, mtp_layers) = (module, mtp_layers.max(layer + 1));
            }
            let module = key.rsplit_once('.').map_or(key, |(module, _)| module);
            let (parent, name) = module.rsplit_once('.').unwrap_or(("", module));
            if !is_prefix(parent) {
                continue;
            }
            match name {
                EMBEDDING => prefix = parent,
                HEAD => head = module,
                _ => {}
            }
        }
        Self { mtp: mtp.to_owned(), mtp_layers, ..Self::new(prefix, head) }
    }

    fn new(prefix: &str, head: &str) -> Self {
        let below = |name: &str| if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
        Self {
            embedding: below(&format!("{EMBEDDING}.weight")),
            final_norm: below("norm.weight"),
            prefix: prefix.to_owned(),
            head: head.to_owned(),
            mtp: MTP.to_owned(),
            mtp_layers: 0,
        }
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
        let below = |module: &str, plain: &str| {
            let rest = key.strip_prefix(module).filter(|rest| rest.is_empty() || rest.starts_with('.'))?;
            Some(format!("{plain}{rest}"))
        };
        let text = match self.prefix.as_str() {
            "" => key.starts_with("layers.").then(|| format!("{PREFIX}.{key}")),
            prefix => below(prefix, PREFIX),
        };
        let own = below(&self.head, HEAD).or_else(|| below(&self.mtp, MTP)).or(text);
        own.unwrap_or_else(|| key.to_owned())
    }
}

fn is_prefix(module: &str) -> bool {
    module.is_empty() || module.split('.').all(|part| PARTS.contains(&part))
}

/// The multi-token prediction head that a tensor belongs to, and its layer there.
fn mtp_layer(key: &str) -> Option<(&str, usize)> {
    let (module, rest) = key.split_once(".layers.")?;
    let parent = module.strip_suffix(MTP)?;
    let layer = rest.split('.').next()?.parse().ok()?;
    is_prefix(parent.strip_suffix('.').unwrap_or(parent)).then_some((module, layer))
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

        let keys = ["model.mtp.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"];
        let names = Names::find(keys.into_iter());
        assert_eq!((names.mtp.as_str(), names.mtp_layers), ("model.mtp", 2));
        assert_eq!(names.canonical("model.mtp.fc"), "mtp.fc");
    }
}
