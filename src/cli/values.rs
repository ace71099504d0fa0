//! Values of options, with errors that say what was expected.

use std::str::FromStr;

/// A whole number, 0 or more.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected a whole number, 0 or more, found \"{text}\""))
}

/// A limit: finite, 0 or more.
pub fn amount(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| format!("expected a number, 0 or more, found \"{text}\""))
}

/// A whole number above zero.
pub fn positive(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|&number: &usize| number > 0);
    number.ok_or_else(|| format!("expected a whole number above 0, found \"{text}\""))
}
