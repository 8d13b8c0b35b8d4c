//! A file system of directories only, which answers until it is to be silent.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use rustix::event::{PollFd, PollFlags, Timespec};

/// Requests that are answered with content, and those that have no answer (`linux/fuse.h`).
const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const INIT: u32 = 26;
const UNANSWERED: [u32; 3] = [2, 36, 42];

/// The head of a request: length, request, number, node, and what is of no interest here.
const HEAD: usize = 40;

/// The file system, until it is dropped.
pub struct Fuse {
    at: PathBuf,
    silent: Arc<AtomicBool>,
    waiting: Arc<AtomicU32>,
    ends: Arc<AtomicBool>,
    server: Option<JoinHandle<()>>,
}

impl Fuse {
    /// Mounts it.
    pub fn mount(at: &Path) -> Self {
        let fuse = File::options().read(true).write(true).open("/dev/fuse").unwrap();
        let options =
            format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", fuse.as_raw_fd());
        let options = std::ffi::CString::new(options).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount(c"test", at, c"fuse", flags, Some(options.as_c_str())).unwrap();
        let (silent, ends) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
        let waiting: Arc<AtomicU32> = Arc::default();
        let (is_silent, waits, has_ended) = (silent.clone(), waiting.clone(), ends.clone());
        let server = std::thread::spawn(move || {
            while !has_ended.load(Ordering::SeqCst) {
                let Some(request) = next(&fuse) else { continue };
                if is_silent.load(Ordering::SeqCst) {
                    waits.fetch_add(1, Ordering::SeqCst);
                } else {
                    answer(&fuse, &request);
                }
            }
        });
        // It has answered the kernel's first request when it answers another.
        assert!(std::fs::metadata(at.join("any")).unwrap().is_dir());
        Self { at: at.to_owned(), silent, waiting, ends, server: Some(server) }
    }

    /// Answers nothing any more.
    pub fn fall_silent(&self) {
        self.silent.store(true, Ordering::SeqCst);
    }

    /// Waits until a process waits for an answer.
    pub fn keeps_waiting(&self) {
        crate::pod::eventually("a request", || {
            (self.waiting.load(Ordering::SeqCst) > 0).then_some(())
        });
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::SeqCst);
        // The file is closed with it: requests fail.
        self.server.take().unwrap().join().unwrap();
        // A test may have unmounted it.
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
    }
}

/// The next request, if there is one soon.
fn next(mut fuse: &File) -> Option<Vec<u8>> {
    let mut fds = [PollFd::new(fuse, PollFlags::IN)];
    let soon = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
    if rustix::event::poll(&mut fds, Some(&soon)).unwrap() == 0 {
        return None;
    }
    let mut request = vec![0; 1 << 17];
    // A request whose process was killed cannot be read any more.
    let count = fuse.read(&mut request).ok()?;
    request.truncate(count);
    (count >= HEAD).then_some(request)
}

fn answer(mut fuse: &File, request: &[u8]) {
    let kind = u32::from_ne_bytes(request[4..8].try_into().unwrap());
    let node = u64::from_ne_bytes(request[16..24].try_into().unwrap());
    let (errno, content) = match kind {
        kind if UNANSWERED.contains(&kind) => return,
        // Version 7.31, and nothing that is optional.
        INIT => (0, [&7u32.to_ne_bytes()[..], &31u32.to_ne_bytes(), &[0; 56]].concat()),
        // Valid for no time, so that it is asked each time.
        LOOKUP => (0, [&(node + 1).to_ne_bytes()[..], &[0; 32], &attributes(node + 1)].concat()),
        GETATTR => (0, [&[0; 16][..], &attributes(node)].concat()),
        _ => (libc::ENOSYS, Vec::new()),
    };
    let length = u32::try_from(16 + content.len()).unwrap().to_ne_bytes();
    let answer = [&length[..], &(-errno).to_ne_bytes(), &request[8..16], &content].concat();
    // The process may have been killed meanwhile.
    let _ = fuse.write(&answer);
}

/// A directory of everyone.
fn attributes(node: u64) -> Vec<u8> {
    let mode = libc::S_IFDIR | 0o755;
    [&node.to_ne_bytes()[..], &[0; 52], &mode.to_ne_bytes(), &2u32.to_ne_bytes(), &[0; 20]].concat()
}
