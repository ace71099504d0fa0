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

/// A size such as `500MB`, `4GiB` or `1000000`.
pub fn bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 7] = [
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("KB", 1_000),
        ("B", 1),
    ];
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number, *unit)))
        .unwrap_or((text, 1));
    let bytes = number.trim().parse::<u64>().ok().and_then(|n| n.checked_mul(unit)).filter(|&n| n > 0);
    bytes.ok_or_else(|| format!("\"{text}\" is no size; expected something like 500MB or 4GiB"))
}

/// A whole number above zero.
pub fn positive(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|&number: &usize| number > 0);
    number.ok_or_else(|| format!("expected a whole number above 0, found \"{text}\""))
}
