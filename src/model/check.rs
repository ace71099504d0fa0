//! Whether a checkpoint holds what a model needs: all problems at once, before any work.

use std::fmt;

use safetensors::Dtype;

use super::{Group, Model, ModelError};
use crate::format::padded;
use crate::source::{Checkpoint, TensorRef};

/// One tensor that is missing or not as the model needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorProblem {
    pub tensor: String,
    pub expected: String,
    pub found: String,
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, expected, found } = self;
        write!(f, "tensor \"{tensor}\": expected {expected}, found {found}")
    }
}

/// The problems, one a line.
pub(super) fn listing(problems: &[TensorProblem]) -> String {
    problems.iter().map(|problem| format!("\n    {problem}")).collect()
}

pub(super) fn expected_tensors(model: &Model) -> Vec<(String, Vec<usize>)> {
    let mut expected =
        vec![(model.embedding_key().to_owned(), vec![model.vocab_size(), model.hidden_size()])];
    let layers = (0..model.layer_count()).map(|layer| (model.layer_others(layer), model.layer_groups(layer)));
    for (others, groups) in layers.chain([(model.mtp_others(), model.mtp_groups())]) {
        expected.extend(others);
        for linear in groups.into_iter().flat_map(|group: Group| group.linears) {
            if linear.has_bias {
                expected.push((format!("{}.bias", linear.key), vec![linear.n]));
            }
            expected.push((format!("{}.weight", linear.key), vec![linear.n, linear.k]));
        }
    }
    expected.push((model.final_norm_key().to_owned(), vec![model.hidden_size()]));
    if !model.tied_head() {
        expected.push(head_weight(model));
    }
    expected
}

fn head_weight(model: &Model) -> (String, Vec<usize>) {
    let head = model.head();
    (format!("{}.weight", head.key), vec![head.n, head.k])
}

pub(super) fn check(model: &Model, checkpoint: &Checkpoint) -> Result<(), ModelError> {
    let mut expected = expected_tensors(model);
    let (head, head_shape) = head_weight(model);
    if model.tied_head() && checkpoint.get(&head).is_some() {
        expected.push((head, head_shape));
    }
    expected.extend(unasked_biases(model, checkpoint));
    let mut problems = Vec::new();
    for (key, shape) in expected {
        match key.rsplit_once('.') {
            Some((module, leaf)) if checkpoint.get(&format!("{module}.trellis")).is_some() => {
                problems.extend(quantized_problems(checkpoint, module, leaf, &shape));
            }
            _ => problems.extend(problem(checkpoint, &key, &shape, &PLAIN)),
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(ModelError::Tensors { dir: checkpoint.dir().to_owned(), problems })
}

/// Biases that the checkpoint has although the config does not ask for them: they are used.
fn unasked_biases(model: &Model, checkpoint: &Checkpoint) -> Vec<(String, Vec<usize>)> {
    model
        .linears()
        .filter(|linear| !linear.has_bias)
        .map(|linear| (format!("{}.bias", linear.key), vec![linear.n]))
        .filter(|(bias, _)| checkpoint.get(bias).is_some())
        .collect()
}

const PLAIN: [Dtype; 3] = [Dtype::BF16, Dtype::F16, Dtype::F32];

/// The problems of a quantized linear where the plain model has `leaf` of `shape`.
fn quantized_problems(
    checkpoint: &Checkpoint,
    module: &str,
    leaf: &str,
    shape: &[usize],
) -> Vec<TensorProblem> {
    let key = |leaf: &str| format!("{module}.{leaf}");
    match *shape {
        [n, k] => {
            let scales = [("suh", padded(k)), ("svh", padded(n))]
                .into_iter()
                .filter_map(|(leaf, len)| problem(checkpoint, &key(leaf), &[len], &[Dtype::F16]));
            scales.chain(trellis_problem(checkpoint, &key("trellis"), padded(k), padded(n))).collect()
        }
        [n] => problem(checkpoint, &key(leaf), &[padded(n)], &PLAIN).into_iter().collect(),
        _ => Vec::new(),
    }
}

fn trellis_problem(checkpoint: &Checkpoint, key: &str, k: usize, n: usize) -> Option<TensorProblem> {
    let found = checkpoint.get(key)?;
    let fits = match *found.shape() {
        [tiles_k, tiles_n, _] => [tiles_k, tiles_n] == [k / 16, n / 16] && found.dtype() == Dtype::I16,
        _ => false,
    };
    (!fits).then(|| TensorProblem {
        tensor: key.to_owned(),
        expected: format!("I16 [{}, {}, 16*bits]", k / 16, n / 16),
        found: describe(&found),
    })
}

fn problem(checkpoint: &Checkpoint, key: &str, shape: &[usize], dtypes: &[Dtype]) -> Option<TensorProblem> {
    let found = checkpoint.get(key);
    if found.is_some_and(|found| found.shape() == shape && dtypes.contains(&found.dtype())) {
        return None;
    }
    let names: Vec<String> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
    Some(TensorProblem {
        tensor: key.to_owned(),
        expected: format!("{} {shape:?}", names.join("/")),
        found: found.map_or_else(|| "nothing".to_owned(), |found| describe(&found)),
    })
}

fn describe(tensor: &TensorRef<'_>) -> String {
    format!("{:?} {:?}", tensor.dtype(), tensor.shape())
}
