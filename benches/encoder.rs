//! Time per tile of every CPU encoder. Compare within one run only.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use exl3_candle::encode::{Cpu, Scalar, SimdLevel, TileEncoder, TrellisSpec};
use exl3_candle::format::{Bits, Codebook, TILE_LEN};
use exl3_candle::linalg::Rng;

fn encoder(c: &mut Criterion) {
    let mut encoders: Vec<Box<dyn TileEncoder>> = vec![Box::new(Scalar)];
    for level in SimdLevel::ALL {
        if let Ok(cpu) = Cpu::with_level(level) {
            encoders.push(Box::new(cpu));
        }
    }
    let mut rng = Rng::new(0, "bench");
    let tiles: Vec<f32> = (0..4 * TILE_LEN).map(|_| rng.normal()).collect();
    let mut states = vec![0u16; tiles.len()];
    for bits in [2, 3, 4] {
        let bits = Bits::whole(bits).expect("an existing rate");
        let spec = TrellisSpec::new(Codebook::Mul1, bits, TILE_LEN).expect("a valid trellis");
        let mut group = c.benchmark_group(format!("{bits} bits"));
        group.sample_size(10).throughput(Throughput::Elements((tiles.len() / TILE_LEN) as u64));
        for encoder in &encoders {
            group.bench_function(BenchmarkId::from_parameter(encoder.name()), |b| {
                b.iter(|| encoder.encode(&spec, &tiles, &mut states).expect("tiles of numbers"));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, encoder);
criterion_main!(benches);
