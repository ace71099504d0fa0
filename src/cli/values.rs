//! Values of options, with errors that say what was expected.

use std::num::NonZeroUsize;
use std::str::FromStr;

/// A whole number, 0 or more.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected a whole number, 0 or more, found \"{text}\""))
}

/// A whole number, 1 or more.
pub fn count(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| format!("expected a whole number, 1 or more, found \"{text}\""))
}

/// A number of seconds, or a limit: finite, 0 or more.
pub fn amount(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| format!("expected a number, 0 or more, found \"{text}\""))
}
