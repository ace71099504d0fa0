//! Prints what the OpenCL kernels are compiled with on Intel Arc, for every bit rate: the variants that a
//! conversion measures there. For compiling them where there is no such device.

use exl3_candle::encode::TrellisSpec;
use exl3_candle::encode::opencl::{Arithmetic, DeviceInfo, DeviceKind, Variant};
use exl3_candle::format::{Bits, Codebook};
use serde_json::json;

/// What the drivers of Arc devices report: the first generation has 64 KiB of local memory.
fn arc() -> DeviceInfo {
    DeviceInfo {
        index: 0,
        name: "Intel Arc".to_owned(),
        platform: "Intel OpenCL Graphics".to_owned(),
        driver: String::new(),
        version: "OpenCL 3.0".to_owned(),
        kind: DeviceKind::Gpu,
        compute_units: 160,
        memory_bytes: 12 << 30,
        max_buffer_bytes: 4 << 30,
        local_bytes: 64 << 10,
        unified_memory: false,
        fp16: true,
        arithmetic: Arithmetic::Native,
        sub_group_sizes: vec![16, 32],
        max_work_group: 1024,
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = arc();
    let mut kernels = Vec::new();
    for (len, rates) in [(256, &Bits::ALL[..]), (160, &Bits::ALL[..])] {
        for &bits in rates {
            let spec = TrellisSpec::new(Codebook::Mul1, bits, len)?;
            for variant in Variant::measured(&spec, &device) {
                let options = variant.options(&spec, &device);
                kernels.push(json!({
                    "bits": bits,
                    "len": len,
                    "variant": variant.to_string(),
                    "work_group": variant.work_group,
                    "options": options,
                }));
            }
        }
    }
    println!("{}", serde_json::to_string_pretty(&kernels)?);
    Ok(())
}
