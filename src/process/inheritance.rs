//! Attributes that a process inherits from the one that starts it, and passes on to containers.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::PathBuf;
use std::process::Command;

use rustix::process::{Resource, Rlimit};
use serde::{Deserialize, Serialize};

use crate::config::ContainerLimit;
use crate::error::{IoContext as _, StepError};
use crate::sys;

/// The resources in the order of `/proc/PID/limits`, with systemd's options for them.
const RESOURCES: [(Resource, &str); sys::RESOURCES] = [
    (Resource::Cpu, "LimitCPU="),
    (Resource::Fsize, "LimitFSIZE="),
    (Resource::Data, "LimitDATA="),
    (Resource::Stack, "LimitSTACK="),
    (Resource::Core, "LimitCORE="),
    (Resource::Rss, "LimitRSS="),
    (Resource::Nproc, "LimitNPROC="),
    (Resource::Nofile, "LimitNOFILE="),
    (Resource::Memlock, "LimitMEMLOCK="),
    (Resource::As, "LimitAS="),
    (Resource::Locks, "LimitLOCKS="),
    (Resource::Sigpending, "LimitSIGPENDING="),
    (Resource::Msgqueue, "LimitMSGQUEUE="),
    (Resource::Nice, "LimitNICE="),
    (Resource::Rtprio, "LimitRTPRIO="),
    (Resource::Rttime, "LimitRTTIME="),
];

/// CAP_SYS_RESOURCE, which raises hard limits (setrlimit(2)).
const SYS_RESOURCE: u64 = 1 << 24;

/// Fields of `/proc/PID/status` that reach containers and that no launch sets.
const STATUS: [&str; 4] = ["CapBnd", "NoNewPrivs", "Seccomp", "Cpus_allowed_list"];

/// Fields of `/proc/PID/stat` of this kind, by number (proc_pid_stat(5)).
const STAT: [(usize, &str); 2] = [(19, "nice"), (41, "scheduling policy")];

/// Resource limits, soft and hard, in the order of their numbers; `None`: unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits([(Option<u64>, Option<u64>); sys::RESOURCES]);

impl Limits {
    /// Parses `/proc/PID/limits`. `None`: it does not have the format.
    pub(super) fn parse(text: &str) -> Option<Self> {
        const NAME_WIDTH: usize = 26;
        let mut limits = [(None, None); sys::RESOURCES];
        let mut lines = text.lines().skip(1);
        for limit in &mut limits {
            let mut values = lines.next()?.get(NAME_WIDTH..)?.split_ascii_whitespace();
            let mut value = || match values.next()? {
                "unlimited" => Some(None),
                number => number.parse().ok().map(Some),
            };
            *limit = (value()?, value()?);
        }
        Some(Self(limits))
    }

    /// Replaces the limits that an operator has set.
    fn replace(&mut self, limits: &[ContainerLimit]) {
        for ContainerLimit { name, soft, hard } in limits {
            let option = format!("Limit{}=", name.to_uppercase());
            let all = RESOURCES.iter().zip(&mut self.0);
            for (_, limit) in all.filter(|((_, own), _)| **own == option) {
                *limit = (*soft, *hard);
            }
        }
    }

    /// Each resource with its limit.
    pub(super) fn by_resource(&self) -> sys::Limits {
        let mut values = self.0.into_iter();
        RESOURCES.map(|(resource, _)| {
            let (current, maximum) = values.next().unwrap_or_default();
            (resource, Rlimit { current, maximum })
        })
    }
}

/// The inherited attributes of one process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inheritance {
    /// The resource limits.
    pub limits: Limits,
    /// The environment, `NAME=value`.
    pub environment: Vec<OsString>,
    /// The umask.
    pub umask: u32,
    /// `oom_score_adj`.
    pub oom_score_adj: i32,
    /// The directory of the parent's program.
    pub parent_directory: Option<PathBuf>,
    /// Attributes that a launch does not set, by name.
    unset: BTreeMap<String, String>,
    /// The process can raise hard limits.
    raises_limits: bool,
}

impl Inheritance {
    /// Reads the attributes of a process: a process id, or `self`.
    ///
    /// # Errors
    /// `/proc` does not show it.
    pub fn read(process: &str) -> Result<Self, StepError> {
        let file = |name: &str| {
            let path = format!("/proc/{process}/{name}");
            fs::read(&path).step_at("read", path)
        };
        let text = |name| file(name).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let (status, stat) = (text("status")?, text("stat")?);
        Self::parse(&text("limits")?, &status, &stat, &text("oom_score_adj")?)
            .ok_or_else(|| StepError::at("parse", format!("/proc/{process}"), invalid()))
            .and_then(|parsed| Ok(Self { environment: entries(&file("environ")?), ..parsed }))
    }

    fn parse(limits: &str, status: &str, stat: &str, oom_score_adj: &str) -> Option<Self> {
        let status = |name: &str| {
            let value = |line: &str| Some(line.strip_prefix(name)?.strip_prefix(':')?.to_owned());
            status.lines().find_map(value).map(|value| value.trim().to_owned())
        };
        // Field 2, the name, may hold anything, also brackets and blanks.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        let parent: u32 = field(4)?.parse().ok()?;
        let program = fs::read_link(format!("/proc/{parent}/exe")).ok();
        let numbered = STAT
            .iter()
            .filter_map(|(number, name)| Some(((*name).to_owned(), field(*number)?.to_owned())));
        let named = STATUS.iter().filter_map(|name| Some(((*name).to_owned(), status(name)?)));
        Some(Self {
            limits: Limits::parse(limits)?,
            environment: Vec::new(),
            umask: u32::from_str_radix(&status("Umask")?, 8).ok()?,
            oom_score_adj: oom_score_adj.trim().parse().ok()?,
            parent_directory: program.and_then(|program| Some(program.parent()?.to_owned())),
            unset: named.chain(numbered).collect(),
            raises_limits: u64::from_str_radix(&status("CapEff")?, 16).ok()? & SYS_RESOURCE != 0,
        })
    }

    /// The variables of the environment, with their values.
    pub fn variables(&self) -> impl Iterator<Item = (OsString, OsString)> {
        let text = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
        self.environment.iter().filter_map(move |entry| {
            let mut halves = entry.as_bytes().splitn(2, |byte| *byte == b'=');
            Some((text(halves.next()?), text(halves.next()?)))
        })
    }

    /// The value of `PATH`.
    pub fn path(&self) -> OsString {
        let path = self.variables().find(|(name, _)| name == "PATH");
        path.map(|(_, path)| path).unwrap_or_default()
    }

    /// The limits, as systemd's options, that a process with the attributes `own` cannot give to
    /// its children.
    pub fn limits_beyond(&self, own: &Self) -> Vec<&'static str> {
        let is_above = |wanted: Option<u64>, own: Option<u64>| match (wanted, own) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(wanted), Some(own)) => wanted > own,
        };
        let pairs = RESOURCES.iter().zip(self.limits.0.iter().zip(own.limits.0));
        pairs
            .filter(|(_, (wanted, own_limit))| {
                !own.raises_limits && is_above(wanted.1, own_limit.1)
            })
            .map(|((_, option), _)| *option)
            .collect()
    }

    /// The attributes that no launch sets and that differ from `own`: name, this value, own value.
    pub fn differences<'a>(&'a self, own: &'a Self) -> Vec<(&'a str, &'a str, &'a str)> {
        let pairs = self.unset.iter().filter_map(|(name, value)| {
            Some((name.as_str(), value.as_str(), own.unset.get(name)?.as_str()))
        });
        pairs.filter(|(_, theirs, own)| theirs != own).collect()
    }

    /// The attributes with the limits that an operator has set in place of their own.
    #[must_use]
    pub fn with(mut self, limits: &[ContainerLimit]) -> Self {
        self.limits.replace(limits);
        self
    }

    /// Gives the program of a command the limits and the umask. A hard limit that the system does
    /// not permit to raise stays.
    pub fn give_to(&self, command: &mut Command) {
        sys::inherit_to(command, self.limits.by_resource(), self.umask);
    }
}

fn entries(environ: &[u8]) -> Vec<OsString> {
    let entries = environ.split(|byte| *byte == 0).filter(|entry| !entry.is_empty());
    entries.map(|entry| OsString::from_vec(entry.to_vec())).collect()
}

fn invalid() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not the format of proc_pid_status(5)")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tx\nUmask:\t0022\nCapEff:\t0000000000000000\nCapBnd:\tf\n\
                          NoNewPrivs:\t0\nSeccomp:\t0\nCpus_allowed_list:\t0-1\n";

    fn limits(open_files: &str) -> String {
        let line = |(index, (_, option)): (usize, &(Resource, &str))| match index {
            7 => format!("{:<26}{open_files} files\n", "Max open files"),
            _ => format!("{option:<26}unlimited unlimited units\n"),
        };
        RESOURCES.iter().enumerate().map(line).fold("Limit\n".to_owned(), |all, line| all + &line)
    }

    fn parse(open_files: &str, status: &str, nice: &str) -> Inheritance {
        let stat = (3..=52).map(|number| if number == 19 { nice } else { "1" });
        let stat = format!("1 (a) b) {}", stat.collect::<Vec<_>>().join(" "));
        Inheritance::parse(&limits(open_files), status, &stat, "-998\n").unwrap()
    }

    #[test]
    fn the_attributes_of_a_process_are_read() {
        let read = parse("1024 4096", STATUS, "-5");
        assert_eq!(read.limits.0[7], (Some(1024), Some(4096)));
        assert_eq!(read.limits.0[15], (None, None));
        assert_eq!((read.umask, read.oom_score_adj), (0o022, -998));
        assert!(Limits::parse("Limit\n").is_none());
        let own = Inheritance::read("self").unwrap();
        assert_eq!(own.path(), std::env::var_os("PATH").unwrap());
        let encoded = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<Inheritance>(&encoded).unwrap(), own);
    }

    #[test]
    fn only_cap_sys_resource_gives_higher_hard_limits() {
        let own = parse("512 4096", STATUS, "0");
        let beyond = |open_files| parse(open_files, STATUS, "0").limits_beyond(&own);
        assert!(beyond("4096 4096").is_empty());
        assert_eq!(beyond("1024 4097"), ["LimitNOFILE="]);
        assert_eq!(beyond("1024 unlimited"), ["LimitNOFILE="]);
        let may = parse("512 4096", &STATUS.replace("0000000000000000", "1000000"), "0");
        assert!(parse("1024 4097", STATUS, "0").limits_beyond(&may).is_empty());
    }

    #[test]
    fn limits_of_an_operator_replace_those_of_the_same_name() {
        let set = ["core=0", "nofile=2048:4096", "memlock=unlimited", "rtprio=5"];
        let set = set.map(|limit| limit.parse().unwrap());
        let (before, after) =
            (parse("1024 8192", STATUS, "0"), parse("1024 8192", STATUS, "0").with(&set));
        let changed = |(index, (before, after))| (before != after).then_some((index, after));
        let pairs = before.limits.0.into_iter().zip(after.limits.0).enumerate();
        let core = (4, (Some(0), Some(0)));
        let expected = [core, (7, (Some(2048), Some(4096))), (14, (Some(5), Some(5)))];
        assert_eq!(pairs.filter_map(changed).collect::<Vec<_>>(), expected);
        // Every name that a setting takes is that of a resource.
        for name in ["core", "memlock", "msgqueue", "nofile", "nproc", "rtprio", "sigpending"] {
            let limit = format!("{name}=1024:2048").parse().unwrap();
            assert_ne!(before.clone().with(&[limit]).limits, before.limits, "{name}");
        }
    }

    #[test]
    fn attributes_that_no_launch_sets_are_compared() {
        let own = parse("512 4096", STATUS, "0");
        assert!(parse("1 1", STATUS, "0").differences(&own).is_empty());
        let other = parse("1 1", &STATUS.replace("CapBnd:\tf", "CapBnd:\t7"), "-5");
        assert_eq!(other.differences(&own), [("CapBnd", "7", "f"), ("nice", "-5", "0")]);
    }
}
