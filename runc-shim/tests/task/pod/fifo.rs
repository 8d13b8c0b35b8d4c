//! The ends of FIFOs as containerd holds them.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::{Duration, Instant};

use super::WITHIN;

/// Reads a FIFO as containerd does, until its end; it is opened before this returns.
pub fn reader(path: &str) -> std::thread::JoinHandle<Vec<u8>> {
    let mut fifo = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap();
    std::thread::spawn(move || {
        let (mut all, mut seen) = (Vec::new(), false);
        let end = Instant::now() + WITHIN;
        while Instant::now() < end {
            match fifo.read_to_end(&mut all) {
                // No writer yet, or none any more.
                Ok(0) if !seen && all.is_empty() => std::thread::sleep(Duration::from_millis(2)),
                Ok(_) => return all,
                Err(e) => {
                    assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
                    seen = true;
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        }
        panic!("no end of {} bytes", all.len());
    })
}

/// The present content of a FIFO.
pub fn reader_that_may_find_nothing(path: &str) -> Vec<u8> {
    let mut all = Vec::new();
    // Without a writer it ends, with one it would wait.
    let _ = open(path).read_to_end(&mut all);
    all
}

/// Writes to a FIFO that has a reader.
pub fn write(path: &str, content: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all(content).unwrap();
}

/// A FIFO's reader that is dropped before the end.
pub fn open(path: &str) -> File {
    File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap()
}

/// Readers of these FIFOs, during a Create; what cannot be opened, such as a URI, has none.
pub fn readers(paths: [&str; 2]) -> [Option<File>; 2] {
    paths.map(|path| File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok())
}
