//! `devices`: what tiles can be encoded on.

use clap::Args;
use exl3_candle::encode::opencl::{DeviceInfo, Tuning, devices};
use exl3_candle::encode::{Cpu, SimdLevel, TrellisSpec};
use exl3_candle::format::{Bits, Codebook, TILE_LEN};
use serde::Serialize;

use super::backend::MemoryArgs;
use super::ui::bytes_text;
use super::{Status, Ui};

/// List the processor's instruction sets and the OpenCL devices, and check the encoder on each
#[derive(Args)]
pub struct DevicesArgs {
    /// Bit rates that are checked on every device
    #[arg(long, value_delimiter = ',', default_value = "2,3,4,6")]
    bits: Vec<Bits>,
    /// Do not run the encoder
    #[arg(long)]
    no_check: bool,
    #[command(flatten)]
    memory: MemoryArgs,
}

#[derive(Serialize)]
struct Report {
    simd: Vec<Simd>,
    opencl: Vec<Device>,
    /// Why there is no OpenCL device.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_opencl: Option<String>,
}

#[derive(Serialize)]
struct Simd {
    name: &'static str,
    available: bool,
}

#[derive(Serialize)]
struct Device {
    #[serde(flatten)]
    info: DeviceInfo,
    /// Bytes that the encoder may use.
    budget_bytes: u64,
    /// Whether the encoder gives the CPU encoder's states here; absent if not asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    passes: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

pub fn run(args: &DevicesArgs, ui: &Ui) -> anyhow::Result<Status> {
    let simd = SimdLevel::ALL
        .map(|level| Simd { name: level.name(), available: Cpu::with_level(level).is_ok() })
        .into();
    let mut report = Report { simd, opencl: Vec::new(), no_opencl: None };
    match devices() {
        Err(error) => report.no_opencl = Some(error.to_string()),
        Ok(found) => {
            for info in found {
                report.opencl.push(described(info, args, ui)?);
            }
        }
    }
    ui.result(&text(&report), &report)?;
    Ok(Status::Done)
}

fn described(info: DeviceInfo, args: &DevicesArgs, ui: &Ui) -> anyhow::Result<Device> {
    let budget_bytes = args.memory.policy()?.budget(&info);
    if args.no_check {
        return Ok(Device { info, budget_bytes, passes: None, failure: None });
    }
    ui.note(&format!("checking the encoder on {}", info.name));
    let failure = checked(&info, args).err().map(|error| format!("{error:#}"));
    Ok(Device { info, budget_bytes, passes: Some(failure.is_none()), failure })
}

fn checked(info: &DeviceInfo, args: &DevicesArgs) -> anyhow::Result<()> {
    let encoder = args.memory.open(info, Tuning::Untuned)?;
    for &bits in &args.bits {
        encoder.variant(&TrellisSpec::new(Codebook::Mul1, bits, TILE_LEN)?)?;
    }
    Ok(())
}

fn text(report: &Report) -> String {
    let mut text = String::from("processor:");
    for simd in report.simd.iter().filter(|simd| simd.available) {
        text.push_str(&format!(" {}", simd.name));
    }
    text.push('\n');
    if let Some(reason) = &report.no_opencl {
        text.push_str(&format!("{reason}\n"));
    }
    for device in &report.opencl {
        let info = &device.info;
        let check = match (&device.passes, &device.failure) {
            (None, _) => "not checked".to_owned(),
            (Some(_), None) => "passes its check".to_owned(),
            (Some(_), Some(failure)) => format!("not usable: {failure}"),
        };
        let sub_groups = match info.sub_group_sizes.as_slice() {
            [] => "not selectable".to_owned(),
            sizes => sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(" "),
        };
        text.push_str(&format!(
            "opencl:{} {} ({}, {:?})\n  driver      {} ({})\n  units       {}\n  memory      {}, {} for the encoder\n  \
             local       {}\n  fp16        {}, arithmetic {:?}\n  sub-groups  {sub_groups}\n  encoder     {check}\n",
            info.index,
            info.name,
            info.platform,
            info.kind,
            info.driver,
            info.version,
            info.compute_units,
            bytes_text(info.memory_bytes),
            bytes_text(device.budget_bytes),
            bytes_text(info.local_bytes),
            if info.fp16 { "yes" } else { "no" },
            info.arithmetic,
        ));
    }
    text
}
