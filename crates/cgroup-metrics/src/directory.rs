//! One cgroup's directory and the forms of its files.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::PathBuf;

use crate::Error;

/// A cgroup in one hierarchy.
#[derive(Debug)]
pub struct Directory(PathBuf);

/// Numbers by name, as in `memory.stat`; 0 for a name that the kernel does not have.
#[derive(Debug, Default)]
pub struct Numbers(HashMap<String, u64>);

impl Numbers {
    /// The number of a name.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }
}

impl Directory {
    /// `None`: there is no such cgroup, or no such hierarchy.
    ///
    /// # Errors
    /// The file, or its form.
    pub fn open(path: PathBuf) -> Result<Option<Self>, Error> {
        match fs::metadata(&path) {
            Ok(found) => Ok(found.is_dir().then_some(Self(path))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::at(path, e)),
        }
    }

    /// The content of a file; `None` where the kernel does not have it or has it switched off, or
    /// where the cgroup was removed after the file was opened (ENODEV).
    ///
    /// # Errors
    /// The file, or its form.
    pub fn text(&self, name: &str) -> Result<Option<String>, Error> {
        let path = self.0.join(name);
        match fs::read_to_string(&path) {
            Err(e) if is_absent(&e) => Ok(None),
            other => other.map(Some).map_err(|e| Error::at(path, e)),
        }
    }

    /// The one number of a file; `max` counts as `unlimited`.
    ///
    /// # Errors
    /// The file, or its form.
    pub fn number(&self, name: &str, unlimited: u64) -> Result<Option<u64>, Error> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        match text.trim() {
            "max" => Ok(Some(unlimited)),
            number => self.parse(name, number).map(Some),
        }
    }

    /// A file of lines `name number`.
    ///
    /// # Errors
    /// The file, or its form.
    pub fn numbers(&self, name: &str) -> Result<Option<Numbers>, Error> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let mut numbers = HashMap::with_capacity(64);
        for line in text.lines() {
            let (key, number) = line.split_once(' ').ok_or_else(|| self.malformed(name, line))?;
            numbers.insert(key.to_owned(), self.parse(name, number.trim())?);
        }
        Ok(Some(Numbers(numbers)))
    }

    /// A file of numbers in one line.
    ///
    /// # Errors
    /// The file, or its form.
    pub fn row(&self, name: &str) -> Result<Vec<u64>, Error> {
        let text = self.text(name)?.unwrap_or_default();
        text.split_whitespace().map(|number| self.parse(name, number)).collect()
    }

    /// A counter that the kernel shows as negative has no reading: 0, as containerd takes it.
    ///
    /// # Errors
    /// The file, or its form.
    pub fn parse(&self, name: &str, number: &str) -> Result<u64, Error> {
        match number.parse::<u64>() {
            Ok(value) => Ok(value),
            Err(_) if number.strip_prefix('-').is_some_and(|rest| rest.parse::<u64>().is_ok()) => {
                Ok(0)
            }
            Err(_) => Err(self.malformed(name, number)),
        }
    }

    /// The error of a file that is not as the kernel writes it.
    #[must_use]
    pub fn malformed(&self, name: &str, text: &str) -> Error {
        let reason = format!(
            "{:?} is not what the kernel writes there",
            text.chars().take(80).collect::<String>()
        );
        Error::at(self.0.join(name), io::Error::new(io::ErrorKind::InvalidData, reason))
    }
}

fn is_absent(e: &io::Error) -> bool {
    use rustix::io::Errno;
    let absent = [Errno::NOENT, Errno::NODEV, Errno::OPNOTSUPP];
    Errno::from_io_error(e).is_some_and(|errno| absent.contains(&errno))
}

/// Lines `device hca_handle=NUMBER hca_object=NUMBER`, where `max` is the largest number: device,
/// handles and objects. A line of another form is left out.
pub fn rdma_devices(text: &str) -> impl Iterator<Item = (String, u32, u32)> {
    text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (device, mut handles, mut objects) = (words.next()?.to_owned(), 0, 0);
        for (key, number) in keyed(words) {
            let number = if number == "max" { u32::MAX } else { number.parse().ok()? };
            match key {
                "hca_handle" => handles = number,
                "hca_object" => objects = number,
                _ => {}
            }
        }
        Some((device, handles, objects))
    })
}

/// Key and value of words such as `rbytes=90112`.
pub fn keyed<'a>(words: impl Iterator<Item = &'a str>) -> impl Iterator<Item = (&'a str, &'a str)> {
    words.filter_map(|word| word.split_once('='))
}
