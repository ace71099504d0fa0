//! One 384x256 linear, stage by stage, against the reference quantizer.

mod support;

use exl3_candle::encode::{Cpu, TrellisSpec};
use exl3_candle::format::{Bits, Codebook, TILE_LEN, tile_position, unpack};
use exl3_candle::linalg::{Matrix, Rng};
use exl3_candle::quantize::{
    Calibrated, Calibration, Hessian, LinearInput, OutScales, QuantizeError, Settings, Uncalibrated, decode,
    group, ldlq, output_error, refit, regularize, search_scale,
};
use support::Golden;

const K: usize = 384;
const N: usize = 256;

struct Layer {
    golden: Golden,
    calibrated: Calibrated,
}

/// A case of `golden/layer.safetensors.xz`.
struct Case {
    name: &'static str,
    spec: TrellisSpec,
}

fn cases() -> Vec<Case> {
    let case = |name: &'static str, codebook, bits: &str| Case {
        name,
        spec: TrellisSpec::new(codebook, bits.parse().unwrap(), TILE_LEN).unwrap(),
    };
    vec![
        case("mul1.k2", Codebook::Mul1, "2"),
        case("mul1.k2.5", Codebook::Mul1, "2.5"),
        case("mul1.k3", Codebook::Mul1, "3"),
        case("mul1.k4", Codebook::Mul1, "4"),
        case("mcg.k3", Codebook::Mcg, "3"),
    ]
}

impl Layer {
    fn load() -> Self {
        let golden = Golden::open("golden/layer.safetensors.xz");
        let sum = Matrix::from_vec(K, K, golden.f32("hessian_sum"));
        let rows = golden.i64("rows")[0] as u64;
        let signs = golden.f32("shared.su_signs");
        let Calibration::Calibrated(calibrated) =
            Hessian::from_sum(sum, rows).finish_with_signs(signs, "layer").unwrap()
        else {
            panic!("the Hessian is not dead")
        };
        Self { golden, calibrated }
    }

    fn weight(&self) -> Matrix {
        Matrix::from_vec(K, N, self.golden.f32("weight"))
    }

    fn matrix(&self, name: &str) -> Matrix {
        let shape = self.golden.shape(name);
        Matrix::from_vec(shape[0], shape[1], self.golden.f32(name))
    }

    /// The states of a case, tile by tile, from the reference's packed words.
    fn states(&self, case: &Case) -> Vec<u16> {
        let name = format!("{}.out.trellis", case.name);
        let words = self.golden.shape(&name)[2];
        let packed = self.golden.u16(&name);
        packed.chunks(words).flat_map(|tile| unpack(tile, case.spec.bits(), TILE_LEN)).collect()
    }

    /// The decoded tiles of a case, `[k, n]` in the rotated basis.
    fn values(&self, case: &Case) -> Matrix {
        let states = self.states(case);
        let mut values = Matrix::zeros(K, N);
        for (at, state) in states.into_iter().enumerate() {
            let (tile, (row, col)) = (at / TILE_LEN, tile_position(at % TILE_LEN));
            let (tk, tn) = (tile / (N / 16), tile % (N / 16));
            values.set(tk * 16 + row, tn * 16 + col, case.spec.codebook().value(state).to_f32());
        }
        values
    }
}

/// Largest difference, relative to the largest expected magnitude.
fn distance(ours: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(ours.len(), expected.len());
    let scale = expected.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    ours.iter().zip(expected).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / scale
}

fn assert_near(what: &str, ours: &[f32], expected: &[f32], tolerance: f32) {
    let distance = distance(ours, expected);
    println!("{what}: {distance:.2e}");
    assert!(distance <= tolerance, "{what}: {distance:e} exceeds {tolerance:e}");
}

#[test]
fn the_factor_of_the_rotated_hessian_matches() {
    let layer = Layer::load();
    assert_near("L", layer.calibrated.factor.data(), &layer.golden.f32("shared.L"), 5e-5);
    let diagonal: Vec<f32> = layer.calibrated.damped.diagonal().collect();
    assert_near("damped diagonal", &diagonal, &layer.golden.f32("shared.h_diag"), 1e-6);
}

#[test]
fn regularization_and_scale_search_match() {
    let layer = Layer::load();
    let sv = layer.golden.f32("shared.sv_signs");
    for case in cases() {
        let name = |leaf: &str| format!("{}.{leaf}", case.name);
        let mut ours = regularize(layer.weight(), &layer.calibrated.signs, &sv, true);
        let found = search_scale(&ours.weight, &case.spec, &Cpu::detect()).unwrap();
        ours.apply_scale(found);
        // The reference sums the losses in f32, and at 4 bits the parabola through them is so flat
        // that the rounding shows in its minimum.
        let tolerance = if case.name == "mul1.k4" { 5e-5 } else { 2e-6 };
        assert_near(&name("g_scale"), &[found as f32], &layer.golden.f32(&name("g_scale")), tolerance);
        assert_near(&name("weight_r"), ours.weight.data(), &layer.golden.f32(&name("weight_r")), tolerance);
        assert_near(&name("su"), &ours.su, &layer.golden.f32(&name("su")), tolerance);
        assert_near(&name("sv"), &ours.sv, &layer.golden.f32(&name("sv")), 2e-6);
    }
}

/// From the reference's own factor and regularized weight, so that no rounding of an earlier stage
/// can move a tile: every state must be the same.
#[test]
fn every_tile_of_ldlq_is_the_reference_s() {
    let layer = Layer::load();
    let factor = layer.matrix("shared.L");
    for case in cases() {
        let weight = layer.matrix(&format!("{}.weight_r", case.name));
        let ours = ldlq(&[&weight], Some(&factor), &case.spec, &Cpu::detect()).unwrap();
        let expected = layer.states(&case);
        let wrong =
            ours[0].states.chunks(TILE_LEN).zip(expected.chunks(TILE_LEN)).filter(|(a, b)| a != b).count();
        assert_eq!(wrong, 0, "{}: {wrong} of 384 tiles differ", case.name);
        assert_eq!(ours[0].values, layer.values(&case), "{}", case.name);
    }
}

#[test]
fn refit_and_both_errors_match() {
    let layer = Layer::load();
    for case in cases() {
        let name = |leaf: &str| format!("{}.{leaf}", case.name);
        let (su, sv) = (layer.golden.f32(&name("su")), layer.golden.f32(&name("sv")));
        let basis = |su: &[f32], sv: &[f32]| original_basis(layer.values(&case), su, sv);
        let q = basis(&su, &sv);
        let before = output_error(&layer.weight(), &q, &layer.calibrated);
        let scales = refit(&layer.weight(), q, &layer.calibrated.damped);
        let su: Vec<f32> = su.iter().zip(&scales.rows).map(|(s, r)| s * r).collect();
        let sv: Vec<f32> = sv.iter().zip(&scales.columns).map(|(s, c)| s * c).collect();
        assert_near(&name("su_refit"), &su, &layer.golden.f32(&name("su_refit")), 5e-6);
        assert_near(&name("sv_refit"), &sv, &layer.golden.f32(&name("sv_refit")), 5e-6);
        let after = output_error(&layer.weight(), &basis(&su, &sv), &layer.calibrated);
        let expected = layer.golden.f32(&name("err_before_after"));
        for (ours, expected) in [(before, expected[0]), (after, expected[1])] {
            assert!((ours - f64::from(expected)).abs() < 2e-5 * f64::from(expected), "{ours} {expected}");
        }
    }
}

/// `diag(su) Had(q) Had diag(sv)`, written out with the dense Hadamard matrix.
fn original_basis(q: Matrix, su: &[f32], sv: &[f32]) -> Matrix {
    let had = |size: usize| {
        let mut h = Matrix::zeros(size, size);
        for i in 0..size {
            for j in i / 128 * 128..i / 128 * 128 + 128 {
                let sign = if ((i % 128) & (j % 128)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                h.set(i, j, sign / 128f32.sqrt());
            }
        }
        h
    };
    let mut left = had(K).matmul(&q);
    for (i, &s) in su.iter().enumerate() {
        left.row_mut(i).iter_mut().for_each(|v| *v *= s);
    }
    let mut w = left.matmul(&had(N));
    for i in 0..K {
        w.row_mut(i).iter_mut().zip(sv).for_each(|(v, s)| *v *= s);
    }
    w
}

fn settings(out_scales: OutScales) -> Settings {
    Settings { codebook: Codebook::Mul1, out_scales, seed: 0 }
}

fn input(key: &str, weight: Matrix) -> LinearInput {
    LinearInput { key: key.to_owned(), sign_key: key.to_owned(), weight, bias: None, sensitivity: None }
}

fn random(rows: usize, cols: usize, key: &str) -> Matrix {
    let mut rng = Rng::new(9, key);
    Matrix::from_vec(rows, cols, (0..rows * cols).map(|_| rng.normal() * 0.02).collect())
}

#[test]
fn a_whole_linear_reaches_the_reference_s_error() {
    let layer = Layer::load();
    let bits: Bits = "3".parse().unwrap();
    let expected = layer.golden.f32("mul1.k3.proxy_err")[0];
    let weight = layer.weight();
    let calibration = Calibration::Calibrated(layer.calibrated);
    let done =
        group(vec![input("a", weight)], &calibration, bits, &settings(OutScales::Auto), &Cpu::detect());
    let proxy = done.unwrap()[0].metrics.errors.proxy as f32;
    // Other output signs, so the error agrees in size only.
    assert!((proxy / expected - 1.0).abs() < 0.05, "{proxy} {expected}");
}

#[test]
fn side_by_side_is_one_by_one() {
    let layer = Layer::load();
    let calibration = Calibration::Calibrated(layer.calibrated);
    let bits: Bits = "2".parse().unwrap();
    let settings = settings(OutScales::Auto);
    let inputs = || vec![input("a", random(K, 128, "a")), input("b", random(K, 256, "b"))];
    let together = group(inputs(), &calibration, bits, &settings, &Cpu::detect()).unwrap();
    for (one, together) in inputs().into_iter().zip(together) {
        let alone = group(vec![one], &calibration, bits, &settings, &Cpu::detect()).unwrap().remove(0);
        assert_eq!(alone.linear, together.linear);
        assert_eq!(alone.metrics.errors, together.metrics.errors);
    }
}

#[test]
fn zero_columns_stay_zero_and_dead_inputs_do_no_harm() {
    let mut weight = random(128, 128, "w");
    for i in 0..128 {
        weight.set(i, 5, 0.0);
    }
    // One calibration token, with a dead channel.
    let mut token: Vec<f32> = (0..128).map(|i| (i as f32).sin()).collect();
    token[7] = 0.0;
    let mut hessian = Hessian::new(128);
    hessian.add(&token);
    let calibration = hessian.finish(0, "w", "w").unwrap();
    assert!(calibration.calibrated().is_some());
    for out_scales in [OutScales::Auto, OutScales::Never] {
        let bits = Bits::whole(4).unwrap();
        let done = group(
            vec![input("w", weight.clone())],
            &calibration,
            bits,
            &settings(out_scales),
            &Cpu::detect(),
        );
        let linear = done.unwrap().remove(0).linear;
        let decoded = decode(&linear);
        assert!((0..128).all(|i| decoded.get(i, 5) == 0.0));
        assert!(decoded.data().iter().all(|v| v.is_finite()));
    }
}

#[test]
fn tokens_that_are_not_finite_are_left_out_and_counted() {
    let mut hessian = Hessian::new(128);
    let mut tokens = vec![1.0f32; 3 * 128];
    tokens[128 + 3] = f32::NAN;
    hessian.add(&tokens);
    assert_eq!(hessian.dropped(), 1);
    assert!(hessian.finish(0, "w", "w").unwrap().calibrated().is_some());
}

#[test]
fn without_tokens_a_linear_is_quantized_all_the_same() {
    for (tokens, why) in [(vec![], Uncalibrated::NoTokens), (vec![0.0; 256], Uncalibrated::Dead)] {
        let mut hessian = Hessian::new(128);
        hessian.add(&tokens);
        let calibration = hessian.finish(0, "w", "w").unwrap();
        assert!(matches!(&calibration, Calibration::Uncalibrated { why: found, .. } if *found == why));
        let bits = Bits::whole(4).unwrap();
        let weight = random(128, 128, "w");
        let done =
            group(vec![input("w", weight)], &calibration, bits, &settings(OutScales::Auto), &Cpu::detect());
        let metrics = done.unwrap().remove(0).metrics;
        assert!(metrics.fallback && !metrics.out_scales);
        assert!(metrics.errors.rel_frobenius < 0.09, "{}", metrics.errors.rel_frobenius);
    }
}

#[test]
fn a_weight_that_overflows_is_named() {
    let weight = Matrix::from_vec(128, 128, vec![3e38; 128 * 128]);
    let input =
        LinearInput { key: "huge".into(), sign_key: "huge".into(), weight, bias: None, sensitivity: None };
    let settings = Settings { codebook: Codebook::Mul1, out_scales: OutScales::Never, seed: 0 };
    let calibration = Hessian::new(128).finish(0, "huge", "huge").unwrap();
    let result = group(vec![input], &calibration, Bits::whole(2).unwrap(), &settings, &Cpu::detect());
    assert!(matches!(result, Err(QuantizeError::Overflow { key }) if key == "huge"));
}
