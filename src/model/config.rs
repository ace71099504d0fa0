//! Reading `config.json`: every field by name, and every refusal too.

use serde_json::{Map, Value};

use super::ModelError;

/// Far above any model. The product of two sizes, and a list of all layers' tensors, are made before
/// the config is compared with the checkpoint, so neither may overflow nor fill the memory.
const MAX_SIZE: usize = 1 << 26;
pub(super) const MAX_LAYERS: usize = 10_000;

/// The fields of a config object; `prefix` is where it lies, for messages.
pub(super) struct Fields<'a> {
    object: &'a Map<String, Value>,
    prefix: String,
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rope {
    pub theta: f32,
    pub scaling: RopeScaling,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RopeScaling {
    None,
    /// Frequencies below `original_positions / low_freq_factor` wavelengths are divided by
    /// `factor`, those above `original_positions / high_freq_factor` are kept.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_positions: f32,
    },
}

impl<'a> Fields<'a> {
    pub fn new(config: &'a Value) -> Result<Self, ModelError> {
        match config.as_object() {
            Some(object) => Ok(Self { object, prefix: String::new() }),
            None => Err(ModelError::Field {
                field: "the whole file".to_owned(),
                expected: "an object".to_owned(),
                found: brief(config),
            }),
        }
    }

    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The field, unless it is missing or null.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, expected: &str, found: &Value) -> ModelError {
        ModelError::Field { field: self.name(key), expected: expected.to_owned(), found: brief(found) }
    }

    fn required(&self, key: &str, expected: &'static str) -> Result<&'a Value, ModelError> {
        self.get(key).ok_or_else(|| ModelError::MissingField { field: self.name(key), expected })
    }

    /// A whole number above zero.
    pub fn count(&self, key: &str) -> Result<usize, ModelError> {
        const EXPECTED: &str = "a whole number above zero";
        let value = self.required(key, EXPECTED)?;
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        count.filter(|&count| count > 0).ok_or_else(|| self.wrong(key, EXPECTED, value))
    }

    /// A whole number above zero, of what a model has of one kind or along one dimension.
    pub fn size(&self, key: &str) -> Result<usize, ModelError> {
        let size = self.count(key)?;
        self.at_most(key, size, MAX_SIZE)
    }

    /// [`Fields::size`], or `default` where the field is missing or null.
    pub fn size_or(&self, key: &str, default: usize) -> Result<usize, ModelError> {
        if self.get(key).is_some() { self.size(key) } else { Ok(default) }
    }

    /// A number of layers that may be zero, which a missing field is too.
    pub fn count_or_none(&self, key: &str) -> Result<usize, ModelError> {
        match self.get(key) {
            None => Ok(0),
            Some(value) if value.as_u64() == Some(0) => Ok(0),
            Some(_) => self.layers(key),
        }
    }

    /// The number of decoder layers.
    pub fn layers(&self, key: &str) -> Result<usize, ModelError> {
        let layers = self.count(key)?;
        self.at_most(key, layers, MAX_LAYERS)
    }

    fn at_most(&self, key: &str, value: usize, limit: usize) -> Result<usize, ModelError> {
        if value <= limit {
            return Ok(value);
        }
        let (field, expected) = (self.name(key), format!("at most {limit}"));
        Err(ModelError::Field { field, expected, found: value.to_string() })
    }

    /// A finite number above zero.
    pub fn positive(&self, key: &str) -> Result<f32, ModelError> {
        const EXPECTED: &str = "a number above zero";
        let value = self.required(key, EXPECTED)?;
        let number = value.as_f64().map(|number| number as f32);
        number.filter(|n| n.is_finite() && *n > 0.0).ok_or_else(|| self.wrong(key, EXPECTED, value))
    }

    /// A list of names, if there is one.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let names = value.as_array().map(|list| list.iter().map(Value::as_str).collect::<Option<_>>());
        names.flatten().map(Some).ok_or_else(|| self.wrong(key, "a list of names", value))
    }

    /// A flag that is off where it is missing.
    pub fn flag(&self, key: &str) -> Result<bool, ModelError> {
        match self.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false", value)),
        }
    }

    /// Refuses every value of `key` but `expected`; a missing field is taken as `expected`.
    pub fn only(&self, key: &str, expected: Value) -> Result<(), ModelError> {
        match self.get(key) {
            Some(value) if *value != expected => Err(ModelError::Unsupported {
                field: self.name(key),
                found: brief(value),
                expected: expected.to_string(),
            }),
            _ => Ok(()),
        }
    }

    /// Refuses an attention window smaller than `positions`.
    pub fn no_window_below(&self, key: &str, positions: usize) -> Result<(), ModelError> {
        if self.get(key).is_none() {
            return Ok(());
        }
        let window = self.count(key)?;
        if window >= positions {
            return Ok(());
        }
        Err(ModelError::Unsupported {
            field: self.name(key),
            found: window.to_string(),
            expected: format!("no attention window, or one of at least max_position_embeddings, {positions}"),
        })
    }

    /// Refuses `layer_types` with anything but full attention.
    pub fn only_full_attention(&self) -> Result<(), ModelError> {
        const FULL: &str = "full_attention";
        let Some(value) = self.get("layer_types") else { return Ok(()) };
        let types = value.as_array().ok_or_else(|| self.wrong("layer_types", "a list", value))?;
        match types.iter().find(|kind| *kind != FULL) {
            None => Ok(()),
            Some(other) => Err(ModelError::Unsupported {
                field: self.name("layer_types"),
                found: brief(other),
                expected: format!("\"{FULL}\" for every layer"),
            }),
        }
    }

    /// `tie_word_embeddings` at the top level or in `text_config`; off where it is in neither.
    pub fn tied_head(&self) -> Result<bool, ModelError> {
        const TIE: &str = "tie_word_embeddings";
        let text_config = self.object("text_config")?;
        let inner = text_config.filter(|inner| inner.get(TIE).is_some());
        let Some(inner) = inner.map(|inner| inner.flag(TIE)).transpose()? else { return self.flag(TIE) };
        match self.get(TIE) {
            Some(value) if self.flag(TIE)? != inner => {
                Err(self.wrong(TIE, &format!("{inner}, as in text_config"), value))
            }
            _ => Ok(inner),
        }
    }

    /// The single entry of `architectures`.
    pub fn architecture(&self) -> Result<&'a str, ModelError> {
        const EXPECTED: &str = "a list with the name of one architecture";
        let value = self.required("architectures", EXPECTED)?;
        match value.as_array().map(Vec::as_slice) {
            Some([Value::String(name)]) => Ok(name),
            _ => Err(self.wrong("architectures", EXPECTED, value)),
        }
    }

    /// The fields of the object `key`, if there is one.
    pub fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => {
                Ok(Some(Fields { object, prefix: format!("{}.", self.name(key)) }))
            }
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// The rotary embedding of whole heads.
    pub fn rope(&self) -> Result<Rope, ModelError> {
        for place in self.rope_places()? {
            place.only("partial_rotary_factor", 1.0.into())?;
        }
        self.partial_rope()
    }

    /// The share of a head's elements that are rotated, at the top level or in `rope_parameters`.
    pub fn partial_rotary_factor(&self, default: f32) -> Result<f32, ModelError> {
        const KEY: &str = "partial_rotary_factor";
        let mut found = None;
        for place in self.rope_places()?.into_iter().filter(|place| place.get(KEY).is_some()) {
            let factor = place.positive(KEY)?;
            if factor > 1.0 || found.is_some_and(|found| found != factor) {
                let expected = found.map_or("at most 1".to_owned(), |found| format!("{found}, as elsewhere"));
                let (field, found) = (place.name(KEY), factor.to_string());
                return Err(ModelError::Field { field, expected, found });
            }
            found = Some(factor);
        }
        Ok(found.unwrap_or(default))
    }

    /// Where fields of the rotary embedding can be.
    fn rope_places(&self) -> Result<Vec<Fields<'a>>, ModelError> {
        let own = Fields { object: self.object, prefix: self.prefix.clone() };
        let inner = [self.object("rope_parameters")?, self.object("rope_scaling")?];
        Ok([own].into_iter().chain(inner.into_iter().flatten()).collect())
    }

    /// The rotary embedding, of whatever share of a head. `rope_theta` lies at the top level or in
    /// `rope_parameters`, the scaling in `rope_parameters` or in `rope_scaling`, depending on the
    /// version that wrote it.
    pub fn partial_rope(&self) -> Result<Rope, ModelError> {
        let parameters = self.object("rope_parameters")?;
        let scaling = self.object("rope_scaling")?;
        let inner = parameters.as_ref().filter(|p| p.get("rope_theta").is_some());
        let theta = match inner {
            Some(parameters) => parameters.positive("rope_theta")?,
            None => self.positive("rope_theta")?,
        };
        if inner.is_some() && self.get("rope_theta").is_some() && self.positive("rope_theta")? != theta {
            return Err(ModelError::Field {
                field: "rope_theta".to_owned(),
                expected: format!("{theta}, as in rope_parameters"),
                found: self.positive("rope_theta")?.to_string(),
            });
        }
        let by_parameters = parameters.as_ref().map(Fields::rope_scaling).transpose()?;
        let by_scaling = scaling.as_ref().map(Fields::rope_scaling).transpose()?;
        if let (Some(a), Some(b)) = (by_parameters, by_scaling)
            && a != b
        {
            return Err(ModelError::Field {
                field: "rope_scaling".to_owned(),
                expected: format!("{a:?}, as in rope_parameters"),
                found: format!("{b:?}"),
            });
        }
        Ok(Rope { theta, scaling: by_parameters.or(by_scaling).unwrap_or(RopeScaling::None) })
    }

    fn rope_scaling(&self) -> Result<RopeScaling, ModelError> {
        // Older configs call it `type`.
        let key = if self.get("rope_type").is_some() { "rope_type" } else { "type" };
        match self.get(key).map(|value| (value, value.as_str())) {
            None | Some((_, Some("default"))) => Ok(RopeScaling::None),
            Some((_, Some("llama3"))) => self.llama3(),
            Some((value, _)) => Err(ModelError::Unsupported {
                field: self.name(key),
                found: brief(value),
                expected: "\"default\" or \"llama3\"".to_owned(),
            }),
        }
    }

    fn llama3(&self) -> Result<RopeScaling, ModelError> {
        let low_freq_factor = self.positive("low_freq_factor")?;
        let high_freq_factor = self.positive("high_freq_factor")?;
        if high_freq_factor <= low_freq_factor {
            let value = &self.object["high_freq_factor"];
            return Err(self.wrong("high_freq_factor", "more than low_freq_factor", value));
        }
        Ok(RopeScaling::Llama3 {
            factor: self.positive("factor")?,
            low_freq_factor,
            high_freq_factor,
            original_positions: self.positive("original_max_position_embeddings")?,
        })
    }
}

/// Refuses a size that its use cannot divide.
pub(super) fn divides(field: &str, value: usize, by: &str, divisor: usize) -> Result<(), ModelError> {
    if value.is_multiple_of(divisor) {
        return Ok(());
    }
    Err(ModelError::Field {
        field: field.to_owned(),
        expected: format!("a multiple of {divisor} ({by})"),
        found: value.to_string(),
    })
}

/// A JSON value short enough for a message.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { text.chars().take(57).chain("...".chars()).collect() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rope(config: Value) -> Result<Rope, String> {
        Fields::new(&config).and_then(|fields| fields.rope()).map_err(|error| error.to_string())
    }

    #[test]
    fn rope_theta_is_found_in_either_place_and_never_assumed() {
        for config in [json!({"rope_theta": 5e5}), json!({"rope_parameters": {"rope_theta": 500000}})] {
            assert_eq!(rope(config), Ok(Rope { theta: 5e5, scaling: RopeScaling::None }));
        }
        for config in
            [json!({}), json!({"rope_parameters": {"rope_type": "default"}}), json!({"rope_theta": null})]
        {
            assert!(rope(config).unwrap_err().contains("rope_theta is missing"));
        }
        let error = rope(json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}})).unwrap_err();
        assert!(error.contains("rope_theta: expected 500000"), "{error}");
    }

    #[test]
    fn llama3_scaling_is_read_in_either_place() {
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let mut parameters = scaling.clone();
        parameters["rope_theta"] = json!(5e5);
        let old = rope(json!({"rope_theta": 5e5, "rope_scaling": scaling})).unwrap();
        assert_eq!(old, rope(json!({"rope_parameters": parameters})).unwrap());
        assert!(matches!(old.scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
        let mut incomplete = scaling;
        incomplete["original_max_position_embeddings"] = Value::Null;
        let error = rope(json!({"rope_theta": 5e5, "rope_scaling": incomplete})).unwrap_err();
        assert!(error.contains("rope_scaling.original_max_position_embeddings is missing"), "{error}");
    }

    #[test]
    fn unknown_scaling_is_refused_by_name() {
        for (scaling, name) in [
            (json!({"type": "linear", "factor": 2.0}), "rope_scaling.type \"linear\""),
            (json!({"rope_type": "yarn"}), "rope_scaling.rope_type \"yarn\""),
            (json!({"partial_rotary_factor": 0.5}), "rope_scaling.partial_rotary_factor 0.5"),
        ] {
            let error = rope(json!({"rope_theta": 1e4, "rope_scaling": scaling})).unwrap_err();
            assert!(error.contains(name), "{error}");
        }
    }
}
