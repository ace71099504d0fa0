//! SVG to PNG, with a font of its own so that every machine draws the same.

use std::sync::Arc;

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::{Options, Tree, fontdb};

use super::CompareError;

const FONT: &[u8] = include_bytes!("../../../assets/DejaVuSans-Latin.ttf");
const FAMILY: &str = "DejaVu Sans";

/// Pixels of a unit.
const SCALE: f32 = 2.0;

/// The PNG file of a chart.
pub fn png(name: &str, svg: &str) -> Result<Vec<u8>, CompareError> {
    let failed = |found: String| CompareError::Plot { plot: name.to_owned(), found };
    let mut fonts = fontdb::Database::new();
    fonts.load_font_data(FONT.to_vec());
    fonts.set_sans_serif_family(FAMILY);
    let options = Options { font_family: FAMILY.to_owned(), fontdb: Arc::new(fonts), ..Options::default() };
    let tree = Tree::from_str(svg, &options).map_err(|error| failed(error.to_string()))?;
    let size = tree.size().to_int_size().scale_by(SCALE).ok_or_else(|| failed("no size".to_owned()))?;
    let mut pixels =
        Pixmap::new(size.width(), size.height()).ok_or_else(|| failed("too large".to_owned()))?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    pixels.encode_png().map_err(|error| failed(error.to_string()))
}
