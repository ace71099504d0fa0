//! The kernels' sources, compiled into the program.

const FORWARD: &str = include_str!("../../../kernels/forward.cl");
const TRACE: &str = include_str!("../../../kernels/trace.cl");
/// Files that others include.
const HEADERS: [(&str, &str); 2] = [
    ("half.h", include_str!("../../../kernels/half.h")),
    ("step.h", include_str!("../../../kernels/step.h")),
];

pub fn forward() -> String {
    with_headers(FORWARD)
}

pub fn trace() -> String {
    with_headers(TRACE)
}

/// Drivers get one string and no folder to include from.
fn with_headers(source: &str) -> String {
    let mut whole = String::new();
    for line in source.lines() {
        let header = HEADERS.iter().find(|(name, _)| line == format!("#include \"{name}\""));
        whole.push_str(header.map_or(line, |(_, text)| text));
        whole.push('\n');
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_inclusion_is_left() {
        for source in [forward(), trace()] {
            assert!(!source.contains("#include"));
        }
    }
}
