//! Which encoder a command uses: `--backend` and what belongs to it.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context;
use clap::Args;
use exl3_candle::encode::opencl::{
    Choices, DeviceInfo, DeviceKind, MemoryPolicy, OpenClError, Tuning, devices,
};
use exl3_candle::encode::{Cpu, OpenCl, Shared, SimdLevel, TileEncoder, TrellisSpec};

use super::{Ui, values};

const GIB: f64 = (1u64 << 30) as f64;
const DEFAULT_RESERVE_GIB: f64 = 1.0;
const RESERVE_VARIABLE: &str = "EXL3_MEMORY_RESERVE_GIB";

#[derive(Args)]
pub struct BackendArgs {
    /// Where tiles are encoded: auto (an OpenCL GPU that works, else the CPU), cpu, opencl (the first
    /// GPU), or devices by number, such as opencl:0,1
    #[arg(long, default_value = "auto")]
    pub backend: Backend,
    #[command(flatten)]
    pub memory: MemoryArgs,
}

#[derive(Args)]
pub struct MemoryArgs {
    /// Largest share of a device's memory to use, such as 2GiB [default: all but the reserve]
    #[arg(long, value_name = "SIZE", value_parser = values::bytes)]
    device_memory: Option<u64>,
    /// GiB of a device's memory that are left to others [default: EXL3_MEMORY_RESERVE_GIB, or 1]
    #[arg(long, value_name = "GIB", allow_negative_numbers = true, value_parser = values::amount)]
    reserve_gib: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backend {
    Auto,
    Cpu(SimdLevel),
    /// These devices; none stands for the first GPU.
    OpenCl(Vec<usize>),
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let simd = SimdLevel::ALL.into_iter().find(|level| level.name() == text);
        match (text, text.strip_prefix("opencl:")) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu(Cpu::detect().level())),
            ("opencl", _) => Ok(Self::OpenCl(Vec::new())),
            (_, Some(numbers)) => {
                let devices: Result<Vec<usize>, _> = numbers.split(',').map(str::parse).collect();
                devices.map(Self::OpenCl).map_err(|_| format!("expected opencl:N, found \"{text}\""))
            }
            _ => simd
                .map(Self::Cpu)
                .ok_or_else(|| format!("expected auto, cpu, opencl or opencl:N, found \"{text}\"")),
        }
    }
}

impl BackendArgs {
    /// The encoder, ready for `trellises`.
    pub fn encoder(&self, trellises: &[TrellisSpec], ui: &Ui) -> anyhow::Result<Box<dyn TileEncoder>> {
        match &self.backend {
            Backend::Cpu(level) => Ok(Box::new(Cpu::with_level(*level)?)),
            Backend::OpenCl(numbers) => self.on_devices(numbers, trellises, ui),
            Backend::Auto => Ok(self.on_a_gpu(trellises, ui).unwrap_or_else(|| Box::new(Cpu::detect()))),
        }
    }

    fn on_devices(
        &self,
        numbers: &[usize],
        trellises: &[TrellisSpec],
        ui: &Ui,
    ) -> anyhow::Result<Box<dyn TileEncoder>> {
        let mut opened: Vec<Box<dyn TileEncoder>> = Vec::new();
        for device in chosen(&devices()?, numbers)? {
            let encoder = self.memory.open(&device, measured())?;
            opened.push(Box::new(prepared(encoder, trellises, ui)?));
        }
        Ok(match opened.len() {
            1 => opened.remove(0),
            _ => Box::new(Shared::new(opened)),
        })
    }

    /// The first GPU that passes its check; what is wrong with the others is said.
    fn on_a_gpu(&self, trellises: &[TrellisSpec], ui: &Ui) -> Option<Box<dyn TileEncoder>> {
        let gpus = devices().ok()?.into_iter().filter(|device| device.kind == DeviceKind::Gpu);
        for device in gpus {
            let opened = self.memory.open(&device, measured());
            match opened.and_then(|encoder| prepared(encoder, trellises, ui)) {
                Ok(encoder) => return Some(Box::new(encoder)),
                Err(error) => ui.note(&format!("not used: {error:#}")),
            }
        }
        None
    }
}

impl MemoryArgs {
    /// Opens a device under these limits.
    pub fn open(&self, device: &DeviceInfo, tuning: Tuning) -> anyhow::Result<OpenCl> {
        Ok(OpenCl::open(device, self.policy()?, tuning)?)
    }

    pub fn policy(&self) -> anyhow::Result<MemoryPolicy> {
        let reserve_gib = match (self.reserve_gib, std::env::var(RESERVE_VARIABLE)) {
            (Some(reserve), _) => reserve,
            (None, Ok(text)) => {
                values::amount(&text).map_err(anyhow::Error::msg).context(RESERVE_VARIABLE)?
            }
            (None, Err(_)) => DEFAULT_RESERVE_GIB,
        };
        Ok(MemoryPolicy {
            reserve_bytes: (reserve_gib * GIB) as u64,
            limit_bytes: self.device_memory,
            host_available_bytes: host_available_bytes(),
        })
    }
}

/// The devices with these numbers; the first GPU if there are none.
pub fn chosen(devices: &[DeviceInfo], numbers: &[usize]) -> anyhow::Result<Vec<DeviceInfo>> {
    if numbers.is_empty() {
        let gpu = devices.iter().find(|device| device.kind == DeviceKind::Gpu);
        let gpu = gpu.context("no OpenCL device is a GPU; choose one of `exl3-candle devices` by number")?;
        return Ok(vec![gpu.clone()]);
    }
    let numbered = |&found: &usize| {
        let missing = OpenClError::NoSuchDevice { found, count: devices.len() };
        devices.get(found).cloned().ok_or(missing)
    };
    Ok(numbers.iter().map(numbered).collect::<Result<_, _>>()?)
}

/// The fastest variants, remembered in the user's cache folder.
pub fn measured() -> Tuning {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|dir| dir.is_absolute());
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    Tuning::Measured(Choices::load(cache.or(home).map(|dir| dir.join("exl3-candle/opencl.json"))))
}

fn prepared(encoder: OpenCl, trellises: &[TrellisSpec], ui: &Ui) -> anyhow::Result<OpenCl> {
    let device = &encoder.device().name;
    for trellis in trellises {
        ui.note(&format!("{device}: compiling and checking the encoder for {} bits", trellis.bits()));
        let variant = encoder.variant(trellis)?;
        ui.note(&format!("{device}: {variant}"));
    }
    Ok(encoder)
}

/// Memory of the host that can be had without swapping; unlimited where the system does not say.
fn host_available_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.map_or(u64::MAX, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_parse() {
        assert_eq!("auto".parse(), Ok(Backend::Auto));
        assert_eq!("opencl".parse(), Ok(Backend::OpenCl(vec![])));
        assert_eq!("opencl:0,2".parse(), Ok(Backend::OpenCl(vec![0, 2])));
        assert_eq!("portable".parse(), Ok(Backend::Cpu(SimdLevel::Portable)));
        for wrong in ["", "opencl:", "opencl:x", "cuda", "opencl:-1"] {
            assert!(wrong.parse::<Backend>().is_err(), "{wrong}");
        }
    }
}
