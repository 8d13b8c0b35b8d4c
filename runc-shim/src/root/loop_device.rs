//! Loop devices, for root file systems in image files (mount option `loop`), as containerd's shim
//! makes them (`SetupLoop` in containerd's `core/mount`).

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd as _;
use std::time::Duration;

use crate::error::{Context as _, Error};
use crate::sys;

const CONTROL: &str = "/dev/loop-control";

/// Number of attempts to get a device, and the delay before each but the first: another process can
/// take the free device first.
const TRIES: u32 = 100;
const BUSY_WAIT: Duration = Duration::from_millis(5);

/// A loop device with a file. The kernel detaches the file when the device is neither
/// open nor mounted, also if this process is killed.
#[derive(Debug)]
pub struct LoopDevice {
    /// The path of the device.
    pub path: String,
    _opened: File,
}

impl LoopDevice {
    /// Attaches the file to a free loop device.
    pub fn attach(image: &str, read_only: bool, direct_io: bool) -> Result<Self, Error> {
        let open = |path: &str| {
            let opened = OpenOptions::new().read(true).write(!read_only).open(path);
            opened.context(format_args!("open {path}"))
        };
        let file = open(image)?;
        let control = OpenOptions::new().read(true).write(true).open(CONTROL);
        let control = control.context(format_args!("open {CONTROL}"))?;
        let mut flags = sys::LOOP_AUTOCLEAR;
        flags |= if read_only { sys::LOOP_READ_ONLY } else { 0 };
        flags |= if direct_io { sys::LOOP_DIRECT_IO } else { 0 };
        let mut tries = 1;
        loop {
            let number =
                sys::free_loop_device(control.as_fd()).context("find a free loop device")?;
            let path = format!("/dev/loop{number}");
            let opened = open(&path)?;
            match sys::configure_loop_device(opened.as_fd(), file.as_fd(), image, flags) {
                Ok(()) => return Ok(Self { path, _opened: opened }),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && tries < TRIES => {
                    tries += 1;
                    std::thread::sleep(BUSY_WAIT);
                }
                Err(e) => return Err(e).context(format_args!("attach {image} to {path}")),
            }
        }
    }
}
