//! One suite for all encoders: the reference encoder's vectors, bit for bit.

mod support;

use exl3_candle::encode::opencl::{OpenCl, Tuning};
use exl3_candle::encode::{Cpu, Scalar, SimdLevel, TileEncoder, TrellisSpec, op};
use exl3_candle::format::{Bits, Codebook, pack, unpack};
use proptest::prelude::*;
use support::Golden;
use support::opencl::{Devices, opencl_devices, policy};

/// Every encoder that this machine can run, with the OpenCL devices that some of them are on.
fn encoders() -> (Vec<Box<dyn TileEncoder>>, Devices) {
    let simd = SimdLevel::ALL.into_iter().filter_map(|level| Cpu::with_level(level).ok());
    let mut all: Vec<Box<dyn TileEncoder>> = vec![Box::new(Scalar)];
    all.extend(simd.map(|encoder| Box::new(encoder) as Box<dyn TileEncoder>));
    let opencl = opencl_devices();
    all.extend(opencl.iter().map(|device| {
        let encoder = OpenCl::open(device, policy(None), Tuning::Untuned).unwrap();
        Box::new(encoder) as Box<dyn TileEncoder>
    }));
    (all, opencl)
}

struct Case {
    name: String,
    spec: TrellisSpec,
}

/// The cases of `golden/encode.safetensors.xz`: `{codebook}[.l160].k{bits}`.
fn golden_cases(golden: &Golden) -> Vec<Case> {
    let names = golden.names();
    let cases: Vec<Case> = names
        .iter()
        .filter_map(|name| name.strip_suffix(".tiles"))
        .map(|name| {
            let (codebook, rest) = name.split_once('.').unwrap();
            let (len, rest) = rest.strip_prefix("l160.").map_or((256, rest), |rest| (160, rest));
            let bits: Bits = rest.strip_prefix('k').unwrap().parse().unwrap();
            let codebook: Codebook = codebook.parse().unwrap();
            Case { name: name.to_owned(), spec: TrellisSpec::new(codebook, bits, len).unwrap() }
        })
        .collect();
    assert_eq!(cases.len(), 8 * 3 + 3 + 8, "bit rates x codebooks, half rates, rings of 160");
    cases
}

#[test]
fn codebooks_match_the_reference() {
    let golden = Golden::open("golden/codebook.safetensors");
    for codebook in Codebook::ALL {
        let ours: Vec<u16> = codebook.values().iter().map(|v| v.to_bits()).collect();
        assert!(ours == golden.u16(codebook.name()), "codebook {codebook}");
    }
}

#[test]
fn every_encoder_reproduces_every_golden_vector() {
    let golden = Golden::open("golden/encode.safetensors.xz");
    let (encoders, _devices) = encoders();
    for case in golden_cases(&golden) {
        let tiles = golden.f32(&format!("{}.tiles", case.name));
        let expected = golden.u16(&format!("{}.states", case.name));
        for encoder in &encoders {
            let mut states = vec![0u16; tiles.len()];
            encoder.encode(&case.spec, &tiles, &mut states).unwrap();
            let wrong = (0..tiles.len() / case.spec.len())
                .filter(|t| {
                    let tile = t * case.spec.len()..(t + 1) * case.spec.len();
                    states[tile.clone()] != expected[tile]
                })
                .collect::<Vec<_>>();
            assert!(wrong.is_empty(), "{} on {}: tiles {wrong:?} differ", encoder.name(), case.name);
        }
    }
}

#[test]
fn packed_form_matches_the_reference() {
    let golden = Golden::open("golden/encode.safetensors.xz");
    for case in golden_cases(&golden).into_iter().filter(|case| case.spec.len() == 256) {
        let states = golden.u16(&format!("{}.states", case.name));
        let packed: Vec<u16> = states.chunks(256).flat_map(|tile| pack(tile, case.spec.bits())).collect();
        assert_eq!(packed, golden.u16(&format!("{}.packed", case.name)), "{}", case.name);
        let words = packed.len() / (states.len() / 256);
        let unpacked: Vec<u16> =
            packed.chunks(words).flat_map(|tile| unpack(tile, case.spec.bits(), 256)).collect();
        assert_eq!(unpacked, states, "{}", case.name);
    }
}

#[test]
fn a_value_that_is_not_a_number_is_refused() {
    let spec = TrellisSpec::new(Codebook::Mul1, Bits::whole(2).unwrap(), 256).unwrap();
    let mut tiles = vec![0.5f32; 512];
    tiles[256 + 7] = f32::NAN;
    let (encoders, _devices) = encoders();
    for encoder in encoders {
        let error = encoder.encode(&spec, &tiles, &mut [0; 512]).unwrap_err();
        assert_eq!(error.to_string(), "tile 1 holds a value that is not a number at position 7");
    }
}

#[test]
fn the_operation_of_the_graph_gives_the_encoder_s_states_and_its_error() {
    let spec = TrellisSpec::new(Codebook::Mul1, Bits::whole(3).unwrap(), 256).unwrap();
    let golden = Golden::open("golden/encode.safetensors.xz");
    let tiles = golden.f32("mul1.k3.tiles");
    let encoder = Cpu::detect();
    assert_eq!(op::encode(&encoder, &spec, tiles.clone()).unwrap(), golden.u16("mul1.k3.states"));
    let error = op::encode(&encoder, &spec, vec![f32::NAN; 256]).unwrap_err();
    assert_eq!(error.to_string(), "tile 0 holds a value that is not a number at position 0");
    // Tiles that do not lie one behind the other are refused, not misread.
    let tensor = candle_core::Tensor::from_vec(tiles, (20, 256), &candle_core::Device::Cpu).unwrap();
    let operation = op::EncodeTiles::new(&encoder, spec);
    assert!(tensor.t().unwrap().apply_op1_no_bwd(&operation).is_err());
}

#[test]
fn rates_and_rings_that_do_not_exist_are_refused() {
    let half = "1.5".parse().unwrap();
    assert!(TrellisSpec::new(Codebook::Mcg, half, 256).is_err());
    assert!(TrellisSpec::new(Codebook::Mul1, half, 128).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    /// Tiles of any magnitude, where overflow, subnormal costs and ties are frequent.
    #[test]
    fn all_encoders_agree_with_the_scalar_one(
        seed in any::<u64>(),
        exponent in -20i32..17,
        grain in prop_oneof![Just(0.0f32), Just(0.25), Just(1.0)],
        rate in 0usize..11,
    ) {
        let bits = Bits::ALL[rate];
        let spec = TrellisSpec::new(Codebook::Mul1, bits, 160).unwrap();
        let mut state = seed;
        let tile: Vec<f32> = (0..160)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let x = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 3.0;
                let x = if grain > 0.0 { (x / grain).round() * grain } else { x };
                x * 2f32.powi(exponent)
            })
            .collect();
        let mut expected = vec![0u16; 160];
        Scalar.encode(&spec, &tile, &mut expected).unwrap();
        let (encoders, _devices) = encoders();
        for encoder in encoders {
            let mut states = vec![0u16; 160];
            encoder.encode(&spec, &tile, &mut states).unwrap();
            prop_assert_eq!(&states, &expected, "{} at {} bits", encoder.name(), bits);
        }
    }
}
