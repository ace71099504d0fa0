//! The kernels' sources, compiled into the program.

const FORWARD: &str = include_str!("../../../kernels/forward.cl");
const TRACE: &str = include_str!("../../../kernels/trace.cl");
/// Files that others include.
const HEADERS: [(&str, &str); 4] = [
    ("half.h", include_str!("../../../kernels/half.h")),
    ("step.h", include_str!("../../../kernels/step.h")),
    ("step_halves.h", include_str!("../../../kernels/step_halves.h")),
    ("step_emulated.h", include_str!("../../../kernels/step_emulated.h")),
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
        match HEADERS.iter().find(|(name, _)| line == format!("#include \"{name}\"")) {
            Some((_, text)) => whole.push_str(&with_headers(text)),
            None => whole.push_str(line),
        }
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
