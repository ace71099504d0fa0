//! Encodes the tiles of a file on one device, and says how fast: for comparing encoders on the same input.
//!
//! usage: encode_tiles BACKEND TILES.safetensors STATES.safetensors BITS SECONDS
//!
//! BACKEND is `cpu`, or the number of an OpenCL device. The input holds `tiles`, F32 `[count, 256]`; the
//! output `states`, I16 `[count, 256]` (the bits of u16). The codebook is mul1. Prints JSON.

use std::time::{Duration, Instant};

use candle_core::{Device, Tensor, safetensors};
use exl3_candle::encode::opencl::{Choices, MemoryPolicy, OpenCl, Tuning, devices};
use exl3_candle::encode::{Cpu, TileEncoder, TrellisSpec, op};
use exl3_candle::format::Codebook;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [backend, tiles, states, bits, seconds] = arguments.as_slice() else {
        return Err("usage: encode_tiles BACKEND TILES.safetensors STATES.safetensors BITS SECONDS".into());
    };
    let spec = TrellisSpec::new(Codebook::Mul1, bits.parse()?, 256)?;
    let encoder = encoder(backend)?;
    let mut loaded = safetensors::load(tiles, &Device::Cpu)?;
    let tiles = loaded.remove("tiles").ok_or("the file holds no tensor \"tiles\"")?;

    let in_graph = tiles.apply_op1_no_bwd(&op::EncodeTiles::new(encoder.as_ref(), spec))?;
    let rate = tiles_per_second(encoder.as_ref(), &spec, &tiles, Duration::from_secs_f64(seconds.parse()?))?;
    safetensors::save(&[("states", in_graph)].into(), states)?;
    println!("{}", serde_json::json!({"bits": spec.bits(), "tiles_per_second": rate}));
    Ok(())
}

fn encoder(backend: &str) -> Result<Box<dyn TileEncoder>, Failure> {
    if backend == "cpu" {
        return Ok(Box::new(Cpu::detect()));
    }
    let device = devices()?.into_iter().nth(backend.parse()?).ok_or("no such device")?;
    let policy = MemoryPolicy { reserve_bytes: 1 << 30, limit_bytes: None, host_available_bytes: u64::MAX };
    Ok(Box::new(OpenCl::open(&device, policy, Tuning::Measured(Choices::load(None)))?))
}

/// From the host's memory and back to it.
fn tiles_per_second(
    encoder: &dyn TileEncoder,
    spec: &TrellisSpec,
    tiles: &Tensor,
    least: Duration,
) -> Result<f64, Failure> {
    let count = tiles.dim(0)?;
    let tiles: Vec<f32> = tiles.flatten_all()?.to_vec1()?;
    let mut states = vec![0; tiles.len()];
    let (started, mut runs) = (Instant::now(), 0);
    while runs == 0 || started.elapsed() < least {
        encoder.encode(spec, &tiles, &mut states)?;
        runs += 1;
    }
    Ok((runs * count) as f64 / started.elapsed().as_secs_f64())
}
