//! The OpenCL encoder beyond its states: variants, memory, several devices, devices that hang.

mod support;

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use exl3_candle::encode::opencl::{
    Choices, DeviceInfo, Estimate, OpenCl, OpenClError, Traceback, Tuning, Variant,
};
use exl3_candle::encode::{Cpu, Shared, TileEncoder, TrellisSpec};
use exl3_candle::format::{Bits, Codebook};
use exl3_candle::linalg::Rng;
use serde_json::Value;
use support::checkpoint::TestLlama;
use support::fixture;
use support::opencl::{opencl_devices, policy};
use support::program::{Run, hashes, names, program};

fn spec(bits: &str) -> TrellisSpec {
    TrellisSpec::new(Codebook::Mul1, bits.parse().unwrap(), 256).unwrap()
}

fn noise(tiles: usize) -> Vec<f32> {
    let mut rng = Rng::new(7, "test");
    (0..tiles * 256).map(|_| rng.normal()).collect()
}

fn states(encoder: &dyn TileEncoder, spec: &TrellisSpec, tiles: &[f32]) -> Vec<u16> {
    let mut states = vec![0; tiles.len()];
    encoder.encode(spec, tiles, &mut states).unwrap();
    states
}

/// One variant of every kind: each is compiled, and compared with the CPU encoder when it is opened.
fn kinds(spec: &TrellisSpec, device: &DeviceInfo) -> Vec<Variant> {
    let mut seen = HashSet::new();
    let kind = |v: &Variant| (v.values, v.costs, v.traceback, v.split > 1, v.sub_group);
    Variant::all(spec, device).into_iter().filter(|variant| seen.insert(kind(variant))).collect()
}

/// Batches of one tile: everything that a batch begins and ends with happens many times.
#[test]
fn every_variant_gives_the_same_states() {
    let tiles = noise(3);
    for device in opencl_devices().iter() {
        for bits in ["2", "2.5", "7"] {
            let spec = spec(bits);
            let expected = states(&Cpu::detect(), &spec, &tiles);
            let variants = kinds(&spec, device);
            for traceback in [Traceback::Device, Traceback::Copied, Traceback::Mapped] {
                assert!(variants.iter().any(|variant| variant.traceback == traceback));
            }
            for variant in variants {
                let one_tile = Estimate::of(&spec, device).bytes(1);
                let encoder = OpenCl::open(device, policy(Some(one_tile)), Tuning::Fixed(variant)).unwrap();
                assert_eq!(encoder.variant(&spec).unwrap(), variant);
                assert!(states(&encoder, &spec, &tiles) == expected, "{variant} at {bits} bits");
            }
        }
    }
}

#[test]
fn a_variant_that_does_not_fit_is_refused_with_a_reason() {
    for device in opencl_devices().iter() {
        let spec = spec("8");
        let fitting = Variant::untuned(&spec, device).unwrap();
        let too_wide = Variant { work_group: 256, run: 16, ..fitting };
        let encoder = OpenCl::open(device, policy(None), Tuning::Fixed(too_wide)).unwrap();
        let error = encoder.variant(&spec).unwrap_err();
        assert!(
            matches!(&error, OpenClError::Unsuitable { reason, .. } if reason.contains("nodes")),
            "{error}"
        );
    }
}

/// A device whose local memory does not hold the costs keeps them in global memory.
#[test]
fn small_local_memory_leaves_the_costs_in_global_memory() {
    for device in opencl_devices().iter() {
        let mut device = device.clone();
        let spec = spec("1");
        device.local_bytes = 1 << 10;
        let encoder = OpenCl::open(&device, policy(None), Tuning::Untuned).unwrap();
        let tiles = noise(1);
        assert_eq!(states(&encoder, &spec, &tiles), states(&Cpu::detect(), &spec, &tiles));
        device.local_bytes = 16;
        let encoder = OpenCl::open(&device, policy(None), Tuning::Untuned).unwrap();
        let error = encoder.variant(&spec).unwrap_err().to_string();
        assert!(error.contains("bytes of local memory; there are 16"), "{error}");
    }
}

#[test]
fn too_little_memory_is_refused_with_the_numbers() {
    for device in opencl_devices().iter() {
        let spec = spec("2");
        let needed = Estimate::of(&spec, device).bytes(1);
        assert!(needed > 8 << 20, "the history of a tile at 2 bits has 8 MiB");
        let encoder = OpenCl::open(device, policy(Some(1 << 20)), Tuning::Untuned).unwrap();
        let error = encoder.variant(&spec).unwrap_err();
        assert!(error.to_string().contains(&format!("needs {needed} bytes")), "{error}");
        assert!(error.to_string().contains("1048576 are available"), "{error}");
        assert!(error.hint().is_some());
    }
}

#[test]
fn a_device_that_does_not_answer_in_time_is_given_up() {
    for device in opencl_devices().iter() {
        let spec = spec("3");
        let encoder =
            OpenCl::open_with_deadline(device, policy(None), Tuning::Untuned, Duration::ZERO).unwrap();
        let error = encoder.variant(&spec).unwrap_err();
        assert!(matches!(error, OpenClError::Deadline { .. }), "{error}");
        assert!(error.hint().unwrap().contains("on disk"));
        let error = encoder.variant(&spec).unwrap_err();
        assert!(error.to_string().contains("stopped answering"), "{error}");
    }
}

#[test]
fn a_measured_choice_is_remembered() {
    for device in opencl_devices().iter() {
        let spec = TrellisSpec::new(Codebook::Mul1, Bits::whole(8).unwrap(), 160).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cache/opencl.json");
        let choices = || Tuning::Measured(Choices::load(Some(file.clone())));
        let chosen = OpenCl::open(device, policy(None), choices()).unwrap().variant(&spec).unwrap();
        assert_eq!(names(file.parent().unwrap()), ["opencl.json"]);

        let mut kept: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        let (key, choice) = kept.as_object_mut().unwrap().iter_mut().next().unwrap();
        assert!(key.contains(&device.driver) && key.contains("mul1 8 160"), "{key}");
        assert_eq!(serde_json::from_value::<Variant>(choice["variant"].clone()).unwrap(), chosen);
        // What is remembered is taken, whatever is faster.
        let other = Variant::candidates(&spec, device).into_iter().find(|other| *other != chosen).unwrap();
        choice["variant"] = serde_json::to_value(other).unwrap();
        fs::write(&file, kept.to_string()).unwrap();
        let again = OpenCl::open(device, policy(None), choices()).unwrap().variant(&spec).unwrap();
        assert_eq!(again, other);
        // A damaged file costs a measurement.
        fs::write(&file, "{").unwrap();
        OpenCl::open(device, policy(None), choices()).unwrap().variant(&spec).unwrap();
        assert!(serde_json::from_slice::<Value>(&fs::read(&file).unwrap()).is_ok());
    }
}

#[test]
fn devices_share_the_tiles_of_a_batch() {
    let devices = opencl_devices();
    let Some(device) = devices.first() else { return };
    let spec = spec("4");
    let tiles = noise(9);
    let opened =
        || -> Box<dyn TileEncoder> { Box::new(OpenCl::open(device, policy(None), Tuning::Untuned).unwrap()) };
    let shared = Shared::new(vec![opened(), opened()]);
    assert_eq!(shared.name(), "opencl:0+opencl:0");
    assert_eq!(states(&shared, &spec, &tiles), states(&Cpu::detect(), &spec, &tiles));
}

fn convert(source: &Path, dir: &Path, options: &[&str]) -> Run {
    let mut command = program(["convert", "--bits", "2", "--rows", "4", "--cols", "32", "--no-verify"]);
    command.arg(source).arg("--output").arg(dir.join("out")).args(options);
    command.arg("--calibration").arg(fixture("corpus/northanger.txt"));
    // Choices that are remembered from one run to the next would hide a broken measurement.
    command.env("XDG_CACHE_HOME", dir.join("cache"));
    Run::of(&mut command)
}

#[test]
fn a_conversion_within_64_mib_gives_the_same_bytes_and_within_1_mib_is_refused() {
    let devices = opencl_devices();
    if devices.is_empty() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    TestLlama::nano().write(&source);
    let folder = |name: &str| {
        fs::create_dir(dir.path().join(name)).unwrap();
        dir.path().join(name)
    };
    let on_cpu = folder("cpu");
    convert(&source, &on_cpu, &["--backend", "cpu"]).expect(0);

    let within = folder("within");
    let run = convert(&source, &within, &["--backend", "opencl:0", "--device-memory", "64MiB"]).expect(0);
    run.says(&["encoder opencl:0"]);
    assert_eq!(hashes(&within.join("out")), hashes(&on_cpu.join("out")));

    let refused = folder("refused");
    let run = convert(&source, &refused, &["--backend", "opencl:0", "--device-memory", "1MiB"]).expect(2);
    run.says(&["needs", "1048576 are available", "hint: raise --device-memory"]);
    assert!(!refused.join("out").exists() && !refused.join("out.work").exists(), "{:?}", names(&refused));
}

#[test]
fn devices_are_listed() {
    let run = Run::of(&mut program(["devices", "--json", "--bits", "8"])).expect(0);
    let report = run.json();
    assert!(report["simd"].as_array().unwrap().iter().any(|simd| simd["name"] == "portable"));
    for (device, listed) in opencl_devices().iter().zip(report["opencl"].as_array().unwrap()) {
        assert_eq!(listed["name"], *device.name);
        assert_eq!(listed["passes"], true, "{listed}");
    }
}

/// A loader that knows no driver.
#[test]
fn a_machine_without_opencl_is_told_so() {
    let none = tempfile::tempdir().unwrap();
    let without = |args: &[&str]| Run::of(program(args).env("OCL_ICD_VENDORS", none.path()));
    let listed = without(&["devices", "--json"]).expect(0).json();
    let reason = listed["no_opencl"].as_str().unwrap();
    assert!(reason.starts_with("no OpenCL device: "), "{reason}");
    assert_eq!(listed["opencl"], serde_json::json!([]));
    without(&["bench", "encoder", "--backend", "opencl:0"])
        .expect(2)
        .says(&["no OpenCL device", "hint: install"]);
}

#[test]
fn a_device_that_does_not_exist_is_refused() {
    if opencl_devices().is_empty() {
        return;
    }
    let run = Run::of(&mut program(["bench", "encoder", "--backend", "opencl:99"])).expect(2);
    run.says(&["no OpenCL device 99", "`exl3-candle devices`"]);
}
