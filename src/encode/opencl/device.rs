//! Which OpenCL devices there are, and what the encoder needs to know of them.

use opencl3::device::{CL_DEVICE_TYPE_ALL, CL_DEVICE_TYPE_CPU, CL_DEVICE_TYPE_GPU, Device};
use opencl3::error_codes::ClError;
use opencl3::platform::get_platforms;
use serde::Serialize;

use super::OpenClError;

const CL_DEVICE_SUB_GROUP_SIZES_INTEL: u32 = 0x4108;
/// `sub.f16x2`, `fma.f16x2` and `min.f16x2` are all there from this compute capability on.
const PTX_HALF_CAPABILITY: u32 = 8;

/// What kind of processor a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    Gpu,
    Cpu,
    Other,
}

/// How the kernels round halves, see `kernels/half.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arithmetic {
    Emulated,
    /// `cl_khr_fp16`
    Native,
    /// PTX in the kernels' source, on NVIDIA's devices
    Ptx,
}

/// One OpenCL device.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceInfo {
    /// Counted over all platforms, from 0.
    pub index: usize,
    pub name: String,
    pub platform: String,
    pub driver: String,
    pub version: String,
    pub kind: DeviceKind,
    pub compute_units: u32,
    pub memory_bytes: u64,
    /// Largest single buffer.
    pub max_buffer_bytes: u64,
    /// Local memory of a work-group.
    pub local_bytes: u64,
    /// Whether it computes in the host's memory.
    pub unified_memory: bool,
    /// Whether it has `cl_khr_fp16`.
    pub fp16: bool,
    pub arithmetic: Arithmetic,
    /// Sub-group sizes that a kernel may ask for; empty where it may not ask.
    pub sub_group_sizes: Vec<u64>,
    pub max_work_group: usize,
}

/// All devices, in the order of the loader's platforms.
///
/// # Errors
/// No ICD loader, no platform, or no device.
pub fn devices() -> Result<Vec<DeviceInfo>, OpenClError> {
    Ok(found()?.into_iter().map(|(info, _)| info).collect())
}

/// The driver's own handle of a device.
pub(super) fn handle(device: &DeviceInfo) -> Result<Device, OpenClError> {
    let found = found()?;
    let count = found.len();
    let same = |(info, handle): (DeviceInfo, Device)| (info.name == device.name).then_some(handle);
    let missing = OpenClError::NoSuchDevice { found: device.index, count };
    found.into_iter().nth(device.index).and_then(same).ok_or(missing)
}

fn found() -> Result<Vec<(DeviceInfo, Device)>, OpenClError> {
    let none = |reason: String| OpenClError::NoDevice { reason };
    let platforms = get_platforms().map_err(|error| none(reason(error)))?;
    let mut found = Vec::new();
    for platform in platforms {
        let platform_name = platform.name().unwrap_or_default();
        for id in platform.get_devices(CL_DEVICE_TYPE_ALL).unwrap_or_default() {
            // A device that does not even answer questions is passed over.
            let device = Device::new(id);
            if let Ok(info) = describe(found.len(), &platform_name, device) {
                found.push((info, device));
            }
        }
    }
    if found.is_empty() {
        return Err(none("the platforms have none".to_owned()));
    }
    Ok(found)
}

fn reason(error: ClError) -> String {
    const NO_LOADER: i32 = -2000;
    const NO_PLATFORM: i32 = -1001;
    match error.0 {
        NO_LOADER => "there is no OpenCL ICD loader (libOpenCL.so.1)".to_owned(),
        NO_PLATFORM => "the ICD loader knows no platform: no driver is installed".to_owned(),
        _ => format!("the platforms cannot be listed ({error})"),
    }
}

fn describe(index: usize, platform: &str, device: Device) -> Result<DeviceInfo, ClError> {
    let kind = match device.dev_type()? {
        kind if kind & CL_DEVICE_TYPE_GPU != 0 => DeviceKind::Gpu,
        kind if kind & CL_DEVICE_TYPE_CPU != 0 => DeviceKind::Cpu,
        _ => DeviceKind::Other,
    };
    let extensions = device.extensions()?;
    let has = |name: &str| extensions.split_whitespace().any(|extension| extension == name);
    let fp16 = has("cl_khr_fp16");
    let ptx = has("cl_nv_device_attribute_query")
        && device.compute_capability_major_nv().is_ok_and(|major| major >= PTX_HALF_CAPABILITY);
    let arithmetic = match (fp16, ptx) {
        (true, _) => Arithmetic::Native,
        (false, true) => Arithmetic::Ptx,
        (false, false) => Arithmetic::Emulated,
    };
    let sub_group_sizes = match has("cl_intel_required_subgroup_size") {
        true => sizes(&device.get_data(CL_DEVICE_SUB_GROUP_SIZES_INTEL)?),
        false => Vec::new(),
    };
    Ok(DeviceInfo {
        index,
        name: device.name()?.trim().to_owned(),
        platform: platform.trim().to_owned(),
        driver: device.driver_version()?,
        version: device.version()?.trim().to_owned(),
        kind,
        compute_units: device.max_compute_units()?,
        memory_bytes: device.global_mem_size()?,
        max_buffer_bytes: device.max_mem_alloc_size()?,
        local_bytes: device.local_mem_size()?,
        unified_memory: kind == DeviceKind::Cpu || device.host_unified_memory().unwrap_or(false),
        fp16,
        arithmetic,
        sub_group_sizes,
        max_work_group: device.max_work_group_size()?,
    })
}

/// An array of `size_t` as the driver answers it.
fn sizes(bytes: &[u8]) -> Vec<u64> {
    let (sizes, _) = bytes.as_chunks::<8>();
    sizes.iter().map(|&size| u64::from_ne_bytes(size)).collect()
}
