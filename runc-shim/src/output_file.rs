//! The standard output of a program that runs until its end, for an error message.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::error::{Context as _, Error};

/// Maximum size of the output, bytes.
const MAX_OUTPUT: usize = 64 << 10;

/// How much of it an error message has, bytes.
const MAX_TEXT: usize = 4 << 10;

/// A file in memory whose size cannot change: a program that writes more than 64 KiB gets EPERM.
/// Other than a pipe, it never blocks a writer, and it may be written to after the end of its
/// reader.
#[derive(Debug)]
pub struct OutputFile(File);

impl OutputFile {
    /// A file without output.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn new() -> Result<Self, Error> {
        let make = || {
            let file = memfd_create(c"output", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            rustix::fs::ftruncate(&file, MAX_OUTPUT as u64)?;
            fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
            Ok::<_, rustix::io::Errno>(File::from(file))
        };
        make().map(Self).context("make file for output")
    }

    /// What was written so far. The bytes that no program has written are zeros at its end.
    pub fn content(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; MAX_OUTPUT];
        // Memory that cannot be read is an error without output.
        let count = self.0.read_at(&mut bytes, 0).unwrap_or(0);
        bytes.truncate(count);
        bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
        bytes
    }
}

/// The end of an output, for an error message.
pub fn text(output: &[u8]) -> String {
    let end = output.get(output.len().saturating_sub(MAX_TEXT)..).unwrap_or_default();
    String::from_utf8_lossy(end).trim().to_owned()
}

impl AsFd for OutputFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Write as _};
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_program_that_writes_without_end_takes_no_more_memory() {
        let mut output = OutputFile::new().unwrap();
        assert_eq!(output.content(), b"");
        let mut writer = File::from(output.as_fd().try_clone_to_owned().unwrap());
        writer.write_all(b"first\n").unwrap();
        writer.write_all(b"second").unwrap();
        assert_eq!(output.content(), b"first\nsecond");
        let refused = loop {
            if let Err(e) = writer.write_all(&[b'x'; 1000]) {
                break e;
            }
        };
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
        assert_eq!(output.content().len(), MAX_OUTPUT);
        assert_eq!((text(b"").len(), text(&output.content()).len()), (0, MAX_TEXT));
        // In units of 512 bytes.
        assert_eq!(output.0.metadata().unwrap().blocks() * 512, MAX_OUTPUT as u64);
    }
}
