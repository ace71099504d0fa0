//! The OpenCL calls: the only file here with unsafe code. Above it there are typed buffers, kernels
//! with checked arguments, and waiting with a deadline.
#![allow(unsafe_code)]

use std::ptr;
use std::time::{Duration, Instant};

use opencl3::command_queue::CommandQueue;
use opencl3::context::Context;
use opencl3::device::Device;
use opencl3::error_codes::{
    CL_INVALID_BUFFER_SIZE, CL_MEM_OBJECT_ALLOCATION_FAILURE, CL_OUT_OF_HOST_MEMORY, CL_OUT_OF_RESOURCES,
    ClError,
};
use opencl3::event::Event;
use opencl3::kernel::{ExecuteKernel, Kernel};
use opencl3::memory::{Buffer, CL_MAP_READ, CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE, ClMem};
use opencl3::program::Program;
use opencl3::types::{CL_BLOCKING, cl_mem};

use super::OpenClError;

/// Waiting starts by yielding; a launch that takes longer is asked for at intervals of a share of the
/// time it took so far.
const SPIN: Duration = Duration::from_millis(1);
const NAP_SHARE: u32 = 32;
const LONGEST_NAP: Duration = Duration::from_millis(2);

/// A type whose every bit pattern is a value, the same on device and host.
pub trait Scalar: Copy + Default + Send + 'static {}
impl Scalar for f32 {}
impl Scalar for u16 {}

/// One device with a queue of its own, in order.
pub struct Session {
    name: String,
    context: Context,
    queue: CommandQueue,
    deadline: Duration,
}

/// Memory of a device, `len` elements.
pub struct Memory<T: Scalar> {
    buffer: Buffer<T>,
    len: usize,
}

/// Where the host reads a buffer from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    Device,
    /// Memory that the host can map.
    HostVisible,
}

/// One argument of a kernel.
pub enum Argument<'a> {
    F32(&'a Memory<f32>),
    U16(&'a Memory<u16>),
    Int(i32),
}

impl<T: Scalar> Memory<T> {
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Session {
    /// Opens a device. A launch that is not done after `deadline` is taken for one that never will be.
    pub fn open(device: Device, name: &str, deadline: Duration) -> Result<Self, OpenClError> {
        let failed = failure(name, "opening the device");
        let context = Context::from_device(&device).map_err(&failed)?;
        let queue = CommandQueue::create_default(&context, 0).map_err(&failed)?;
        Ok(Self { name: name.to_owned(), context, queue, deadline })
    }

    /// Compiles `source` and gives its kernel `kernel`.
    pub fn build(&self, source: &str, options: &str, kernel: &str) -> Result<Kernel, OpenClError> {
        let program =
            Program::create_and_build_from_source(&self.context, source, options).map_err(|log| {
                OpenClError::Build {
                    device: self.name.clone(),
                    options: options.to_owned(),
                    log: shortened(&log),
                }
            })?;
        Kernel::create(&program, kernel).map_err(failure(&self.name, "clCreateKernel"))
    }

    pub fn allocate<T: Scalar>(&self, len: usize, residence: Residence) -> Result<Memory<T>, OpenClError> {
        let flags = match residence {
            Residence::Device => CL_MEM_READ_WRITE,
            Residence::HostVisible => CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR,
        };
        // SAFETY: no host pointer is passed, so the driver owns the memory.
        let buffer = unsafe { Buffer::create(&self.context, flags, len, ptr::null_mut()) };
        Ok(Memory { buffer: buffer.map_err(failure(&self.name, "clCreateBuffer"))?, len })
    }

    /// Memory that holds `data`.
    pub fn filled<T: Scalar>(&self, data: &[T]) -> Result<Memory<T>, OpenClError> {
        let mut memory = self.allocate(data.len(), Residence::Device)?;
        self.write(&mut memory, data)?;
        Ok(memory)
    }

    /// Copies `data` to the start of `memory`.
    pub fn write<T: Scalar>(&self, memory: &mut Memory<T>, data: &[T]) -> Result<(), OpenClError> {
        assert!(data.len() <= memory.len, "the data fits");
        // SAFETY: a blocking call: `data` outlives the copy; the length was checked.
        let done = unsafe { self.queue.enqueue_write_buffer(&mut memory.buffer, CL_BLOCKING, 0, data, &[]) };
        done.map(drop).map_err(failure(&self.name, "clEnqueueWriteBuffer"))
    }

    /// Copies elements `from ..` of `memory` to `data`.
    pub fn read<T: Scalar>(
        &self,
        memory: &Memory<T>,
        from: usize,
        data: &mut [T],
    ) -> Result<(), OpenClError> {
        assert!(from + data.len() <= memory.len, "the data is there");
        let offset = from * size_of::<T>();
        // SAFETY: a blocking call: `data` outlives the copy; the range was checked, and every bit
        // pattern is a `T`.
        let done = unsafe { self.queue.enqueue_read_buffer(&memory.buffer, CL_BLOCKING, offset, data, &[]) };
        done.map(drop).map_err(failure(&self.name, "clEnqueueReadBuffer"))
    }

    /// Lets `look` see the first `len` elements of `memory` where they lie.
    pub fn mapped<T: Scalar, R>(
        &self,
        memory: &Memory<T>,
        len: usize,
        look: impl FnOnce(&[T]) -> R,
    ) -> Result<R, OpenClError> {
        assert!(len <= memory.len, "the range is there");
        let mut at: cl_mem = ptr::null_mut();
        let bytes = len * size_of::<T>();
        // SAFETY: a blocking call; `at` is where the driver puts the range's address.
        let mapped = unsafe {
            self.queue.enqueue_map_buffer(&memory.buffer, CL_BLOCKING, CL_MAP_READ, 0, bytes, &mut at, &[])
        };
        mapped.map_err(failure(&self.name, "clEnqueueMapBuffer"))?;
        // SAFETY: the driver mapped `len` elements at `at`, aligned for any scalar; the queue is in
        // order and idle, so nobody writes to them before they are unmapped.
        let result = look(unsafe { std::slice::from_raw_parts(at.cast::<T>(), len) });
        // SAFETY: `at` is what this buffer was mapped to, and no reference to it is left.
        let done = unsafe { self.queue.enqueue_unmap_mem_object(memory.buffer.get(), at, &[]) };
        done.map_err(failure(&self.name, "clEnqueueUnmapMemObject"))?;
        self.queue.finish().map_err(failure(&self.name, "clFinish"))?;
        Ok(result)
    }

    /// Starts `groups` work-groups of `size` items. The kernel must take exactly these arguments and
    /// stay within them: the callers are beside the kernels' sources.
    pub fn launch(
        &self,
        kernel: &Kernel,
        arguments: &[Argument<'_>],
        groups: usize,
        size: usize,
    ) -> Result<Running, OpenClError> {
        let expected = kernel.num_args().map_err(failure(&self.name, "clGetKernelInfo"))?;
        assert_eq!(expected as usize, arguments.len(), "arguments of the kernel");
        let mut launch = ExecuteKernel::new(kernel);
        for argument in arguments {
            // SAFETY: a buffer or an int, as the kernel declares it at this place; the driver refuses
            // an argument of another size.
            unsafe {
                match argument {
                    Argument::F32(memory) => launch.set_arg(&memory.buffer),
                    Argument::U16(memory) => launch.set_arg(&memory.buffer),
                    Argument::Int(value) => launch.set_arg(value),
                }
            };
        }
        launch.set_global_work_size(groups * size).set_local_work_size(size);
        // SAFETY: all arguments are set; the buffers live until `Running` has been waited for, or are
        // leaked with the session; the kernels stay inside of them (shown by the tests under oclgrind).
        let event = unsafe { launch.enqueue_nd_range(&self.queue) };
        let event = event.map_err(failure(&self.name, "clEnqueueNDRangeKernel"))?;
        self.queue.flush().map_err(failure(&self.name, "clFlush"))?;
        Ok(Running { event })
    }

    /// Waits until a launch is done, by asking: a driver's own waiting may never return.
    pub fn wait(&self, running: Running) -> Result<(), OpenClError> {
        let started = Instant::now();
        loop {
            let status = running.event.command_execution_status();
            match status.map_err(failure(&self.name, "clGetEventInfo"))?.0 {
                0 => return Ok(()),
                code if code < 0 => return Err(failure(&self.name, "the kernel")(ClError(code))),
                _ => {}
            }
            let waited = started.elapsed();
            if waited > self.deadline {
                std::mem::forget(running);
                return Err(OpenClError::Deadline { device: self.name.clone(), limit: self.deadline });
            }
            if waited < SPIN {
                std::thread::yield_now();
            } else {
                std::thread::sleep((waited / NAP_SHARE).min(LONGEST_NAP));
            }
        }
    }
}

/// A launch that was started.
#[must_use = "buffers must live until the launch is done"]
pub struct Running {
    event: Event,
}

fn failure(device: &str, call: &'static str) -> impl Fn(ClError) -> OpenClError {
    let device = device.to_owned();
    move |error| OpenClError::Call {
        device: device.clone(),
        call,
        code: format!("{error}"),
        memory: [
            CL_MEM_OBJECT_ALLOCATION_FAILURE,
            CL_OUT_OF_RESOURCES,
            CL_OUT_OF_HOST_MEMORY,
            CL_INVALID_BUFFER_SIZE,
        ]
        .contains(&error.0),
    }
}

/// The start of a build log: drivers repeat an error for every inclusion.
fn shortened(log: &str) -> String {
    const LINES: usize = 12;
    log.lines().take(LINES).collect::<Vec<_>>().join("\n")
}
