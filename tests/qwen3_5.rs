//! Qwen3.5 hybrids: the trained model against independent measurements.

mod support;

use exl3_candle::corpus::{self, Shape};
use exl3_candle::eval;
use exl3_candle::model::{Model, SourceWeights};
use exl3_candle::source;
use support::fixture;

fn persuasion(rows: usize, cols: usize) -> Vec<Vec<u32>> {
    let tokenizer = corpus::load_tokenizer(&fixture("tiny-llama")).unwrap();
    let text = fixture("corpus/persuasion.txt");
    corpus::from_file(&tokenizer, &text, Shape { rows, cols }, 4096).unwrap().rows().to_vec()
}

/// `fixtures/tiny-qwen3_5/reference_ppl.json`: an f32 forward of transformers. A row knows nothing
/// of the others, so no state of a convolution or recurrence is carried over.
#[test]
fn perplexity_is_that_of_transformers_in_any_order_of_rows() {
    let checkpoint = source::open(&support::tiny_qwen3_5()).unwrap();
    let model = Model::of(&checkpoint).unwrap();
    let of = |rows: &[Vec<u32>]| eval::perplexity(&model, &SourceWeights(&checkpoint), rows).unwrap();
    let mut rows = persuasion(8, 512);
    let found = of(&rows).perplexity;
    assert!((found / 65.62688811591818 - 1.0).abs() < 1e-3, "perplexity {found}");
    rows.swap(0, 5);
    rows.rotate_left(3);
    let moved = of(&rows).perplexity;
    assert!((moved / found - 1.0).abs() < 1e-12, "{moved} instead of {found}");
}
