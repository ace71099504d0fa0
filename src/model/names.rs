//! The names a checkpoint gives to a model's tensors.
//!
//! The same weights lie under `model.`, under `model.language_model.` beside a vision tower, or
//! under prefixes with further such parts, which some exports stack. A model speaks of its
//! checkpoint's own names; what must not depend on the container goes by [`canonical`] ones.

use super::config::MAX_LAYERS;

/// Parts a prefix can have.
const PARTS: [&str; 2] = ["model", "language_model"];
const PREFIX: &str = "model";
const HEAD: &str = "lm_head";
const EMBEDDING: &str = "embed_tokens";
const LAYERS: &str = "layers";
const NORM: &str = "norm";
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
            final_norm: below(&format!("{NORM}.weight")),
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
            "" => format!("{LAYERS}.{layer}"),
            prefix => format!("{prefix}.{LAYERS}.{layer}"),
        }
    }
}

/// The name that the module or tensor `name` has where the text model lies under `prefix`: head and
/// prediction head at the top, a vision tower below `model`. What it is now does not matter, as
/// containers only differ in how many parts they put in front.
pub fn renamed(name: &str, prefix: &str) -> String {
    let mut rest = name;
    while let Some(after) = PARTS.iter().find_map(|part| rest.strip_prefix(part)?.strip_prefix('.')) {
        rest = after;
    }
    match rest.split('.').next().unwrap_or_default() {
        HEAD | MTP => rest.to_owned(),
        VISION => format!("{PREFIX}.{rest}"),
        EMBEDDING | LAYERS | NORM => format!("{prefix}.{rest}"),
        _ => name.to_owned(),
    }
}

/// The name that the module or tensor `name` has in a plain text model, the same in every container.
pub fn canonical(name: &str) -> String {
    renamed(name, PREFIX)
}

fn is_prefix(module: &str) -> bool {
    module.is_empty() || module.split('.').all(|part| PARTS.contains(&part))
}

/// The multi-token prediction head that a tensor belongs to, and its layer there.
fn mtp_layer(key: &str) -> Option<(&str, usize)> {
    let (module, rest) = key.split_once(".layers.")?;
    let parent = module.strip_suffix(MTP)?;
    let layer = rest.split('.').next()?.parse().ok().filter(|&layer| layer < MAX_LAYERS)?;
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
            assert_eq!(canonical(&key("layers.3.mlp.up_proj")), "model.layers.3.mlp.up_proj");
            assert_eq!(canonical("lm_head.weight"), "lm_head.weight");
            assert_eq!(canonical("mtp.fc"), "mtp.fc");
        }
        let names = Names::find(
            ["language_model.lm_head.trellis", "language_model.model.embed_tokens.weight"].into_iter(),
        );
        assert_eq!(canonical("language_model.lm_head"), "lm_head");
        assert_eq!(canonical(&names.layer(0)), "model.layers.0");
        assert_eq!(Names::find(std::iter::empty()), Names::plain());

        let keys = ["model.mtp.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"];
        let names = Names::find(keys.into_iter());
        assert_eq!((names.mtp.as_str(), names.mtp_layers), ("model.mtp", 2));
        assert_eq!(canonical("model.mtp.fc"), "mtp.fc");
    }

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
                assert_eq!(renamed(&format!("{container}{rest}"), "model.language_model"), nested);
            }
            assert_eq!(renamed(&format!("{container}layers.0.x"), PREFIX), "model.layers.0.x");
        }
        assert_eq!(renamed("score.weight", "model.language_model"), "score.weight");
    }
}
