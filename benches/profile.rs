//! Where a microsecond of Start goes: every system call of a Start inside the daemon, in its order
//! and with its time, as the kernel's own tracing sees it (tracefs, `raw_syscalls`). The daemon is
//! not changed for it; a call costs some tenths of a microsecond more.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};

use crate::inside::Inside;
use crate::kernel;
use crate::samples::median;
use crate::setup::Setup;

const TRACEFS: &str = "/sys/kernel/tracing";
/// Kilobytes of the kernel's buffer per processor.
const BUFFER: &str = "32768";
const ROUNDS: usize = 200;
const BEGIN: &str = "start begins";
const END: &str = "start ends";

/// A part of the kernel's tracing that is ours alone; ends when dropped.
struct Trace(PathBuf);

impl Trace {
    fn open() -> Result<Self> {
        let root = Path::new(TRACEFS);
        if !root.join("events").exists() {
            let none = None::<&str>;
            mount(Some("tracefs"), root, Some("tracefs"), MsFlags::empty(), none)
                .context("mount tracefs")?;
        }
        let trace =
            Self(root.join("instances").join(format!("pause-sandboxer-{}", std::process::id())));
        fs::create_dir(&trace.0).context("make an instance of the kernel's tracing")?;
        trace.set("buffer_size_kb", BUFFER)?;
        trace.set("trace_clock", "mono")?;
        // This process, its threads, and the children of all.
        trace.set("options/event-fork", "1")?;
        for task in tasks()? {
            let mut file = File::options().append(true).open(trace.0.join("set_event_pid"))?;
            file.write_all(task.to_string().as_bytes())?;
        }
        for event in ["sys_enter", "sys_exit"] {
            trace.set(&format!("events/raw_syscalls/{event}/enable"), "1")?;
        }
        Ok(trace)
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.0.join(file);
        fs::write(&path, value).with_context(|| format!("write {}", path.display()))
    }

    fn marker(&self) -> Result<File> {
        Ok(File::options().write(true).open(self.0.join("trace_marker"))?)
    }

    fn text(&self) -> Result<String> {
        self.set("tracing_on", "0")?;
        Ok(String::from_utf8_lossy(&fs::read(self.0.join("trace"))?).into_owned())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir(&self.0) {
            eprintln!("remove {}: {e}", self.0.display());
        }
    }
}

fn tasks() -> Result<BTreeSet<u32>> {
    let entries = fs::read_dir("/proc/self/task")?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// One system call; microseconds.
#[derive(Clone, Debug)]
struct Call {
    task: u32,
    number: i64,
    enter: f64,
    exit: f64,
}

pub(crate) async fn run() -> Result<()> {
    let setup = Setup::new().await?;
    let home = setup.home("profile")?;
    let inside = Inside::open(&setup, &home).await?;
    // The runtime's threads are there before they are counted.
    for _ in 0..20 {
        let id = setup.id();
        let network = setup.network(&id);
        inside.cycle(id, network).await?;
    }
    let threads = tasks()?;
    let trace = Trace::open()?;
    for _ in 0..ROUNDS {
        let id = setup.id();
        let network = setup.network(&id);
        inside.marked(id, network, [(trace.marker()?, BEGIN), (trace.marker()?, END)]).await?;
    }
    let text = trace.text()?;
    drop(trace);
    inside.close().await;
    home.clear()?;
    let steps = kernel::Steps::prepare(&setup, "profile")?;
    let mut straight = Vec::new();
    for _ in 0..ROUNDS {
        straight.push(steps.cycle(&setup.network("x"))?);
    }
    drop(setup);
    print(&starts(&text), &threads)?;
    println!("\nthe kernel's own, straight-line, without tracing:");
    for (index, part) in kernel::PARTS.iter().enumerate() {
        let times = straight.iter().map(|one| one.parts[index].as_secs_f64() * 1e6).collect();
        println!("{:>9.1}  {part}", median(times));
    }
    Ok(())
}

/// The calls between each pair of marks, with the times of the marks.
fn starts(text: &str) -> Vec<(f64, f64, Vec<Call>)> {
    let (mut found, mut calls, mut begun) = (Vec::new(), Vec::new(), None);
    let mut open: BTreeMap<u32, (f64, i64)> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((task, time, event, rest)) = parse(line) else { continue };
        match event {
            "tracing_mark_write" if rest.trim() == BEGIN => {
                (begun, calls) = (Some(time), Vec::new())
            }
            "tracing_mark_write" if rest.trim() == END => {
                if let Some(begun) = begun.take() {
                    found.push((begun, time, std::mem::take(&mut calls)));
                }
            }
            "sys_enter" => {
                if let Some(number) = entered(rest) {
                    open.insert(task, (time, number));
                    // They do not come back from these.
                    if number == libc::SYS_execveat {
                        calls.push(Call { task, number, enter: time, exit: time });
                    }
                }
            }
            "sys_exit" => {
                if let Some((enter, number)) = open.remove(&task) {
                    // The thread returned after all: it was the pause's.
                    if number == libc::SYS_execveat {
                        calls.retain(|call: &Call| call.task != task || call.number != number);
                    }
                    calls.push(Call { task, number, enter, exit: time });
                }
            }
            _ => {}
        }
    }
    found
}

/// `   name-TASK   [CPU] flags SECONDS.MICROS: event: rest`
fn parse(line: &str) -> Option<(u32, f64, &str, &str)> {
    let (head, rest) = line.split_once(": ")?;
    let (event, rest) = rest.split_once(": ")?;
    let task = head.split('[').next()?.trim_end().rsplit('-').next()?.parse().ok()?;
    let time: f64 = head.split_whitespace().last()?.parse().ok()?;
    Some((task, time * 1e6, event, rest))
}

/// `NR 257 (first, …)`
fn entered(rest: &str) -> Option<i64> {
    rest.strip_prefix("NR ")?.split_once(" (")?.0.parse().ok()
}

fn print(starts: &[(f64, f64, Vec<Call>)], threads: &BTreeSet<u32>) -> Result<()> {
    ensure!(!starts.is_empty(), "the trace has no Start");
    // The job's thread makes most of the calls, the child is no thread of this process.
    let mut shapes: BTreeMap<Vec<(bool, i64)>, Vec<Vec<f64>>> = BTreeMap::new();
    for (begun, ended, calls) in starts {
        let mut count = BTreeMap::new();
        for call in calls.iter().filter(|call| threads.contains(&call.task)) {
            *count.entry(call.task).or_insert(0) += 1;
        }
        let Some(job) = count.iter().max_by_key(|(_, count)| **count).map(|(task, _)| *task) else {
            continue;
        };
        let mut mine: Vec<&Call> = calls
            .iter()
            .filter(|call| call.task == job || !threads.contains(&call.task))
            .filter(|call| call.number != libc::SYS_futex && call.number != libc::SYS_epoll_wait)
            .collect();
        mine.sort_by(|a, b| a.enter.total_cmp(&b.enter));
        let shape = mine.iter().map(|call| (call.task == job, call.number)).collect();
        // Begin and end of each, after the Start's begin, and the Start's end.
        let mut times: Vec<f64> =
            mine.iter().flat_map(|call| [call.enter - begun, call.exit - begun]).collect();
        times.push(ended - begun);
        shapes.entry(shape).or_default().push(times);
    }
    let (shape, runs) =
        shapes.into_iter().max_by_key(|(_, runs)| runs.len()).context("no Start has a shape")?;
    let at = |index: usize| median(runs.iter().map(|times| times[index]).collect());
    let took = |index: usize| {
        let mut times: Vec<f64> =
            runs.iter().map(|times| times[2 * index + 1] - times[2 * index]).collect();
        times.sort_by(f64::total_cmp);
        // Without the slowest tenth: the trace tells whole microseconds, of which a mean tells more
        // than a median.
        let kept = &times[..times.len() - times.len() / 10];
        kept.iter().sum::<f64>() / kept.len() as f64
    };
    println!("one Start of {} that made the same calls; microseconds", runs.len());
    println!("{:>9} {:>9}  call", "at", "takes");
    println!("{:9.0} {:9.1}  (to the job's thread)", 0.0, at(0));
    let (mut before, mut index) = (at(0), 0);
    let mut folded = String::new();
    while let Some((job, number)) = shape.get(index) {
        // Dropping the capabilities is one call for each.
        let same = shape[index..]
            .iter()
            .take_while(|next| *next == &(*job, libc::SYS_prctl))
            .count()
            .max(1);
        let enter = at(2 * index);
        let takes: f64 = (index..index + same).map(took).sum();
        if enter - before > 3.0 {
            println!("{before:9.0} {:9.1}    (in user space)", enter - before);
        }
        let who = if *job { "" } else { "  child: " };
        let times = if same > 1 { format!(" x {same}") } else { String::new() };
        println!("{enter:9.0} {takes:9.1}  {who}{}{times}", name(*number));
        let below = if *job { "" } else { "clone3;" };
        folded.push_str(&format!("start;{below}{} {:.0}\n", name(*number), takes * 1e3));
        index += same;
        // The clone lasts until the child executes.
        before = if *number == libc::SYS_clone3 { enter + 50.0 } else { at(2 * index - 1) };
    }
    let all = at(2 * shape.len());
    println!("{:9.0} {:9.1}  (back to the caller)", before, all - before);
    println!("{all:9.0}            all");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench/start.folded");
    fs::create_dir_all(path.parent().context("a directory")?)?;
    fs::write(&path, folded)?;
    println!(
        "\nfolded stacks in nanoseconds, as flame graph programs read them: {}",
        path.display()
    );
    Ok(())
}

fn name(number: i64) -> String {
    macro_rules! names {
        ($($name:ident)+) => {
            match number {
                $(n if n == libc::$name => stringify!($name)[4..].to_owned(),)+
                // Old forms of some, which not every architecture has.
                #[cfg(target_arch = "x86_64")]
                n if n == libc::SYS_mkdir => "mkdir".to_owned(),
                #[cfg(target_arch = "x86_64")]
                n if n == libc::SYS_rename => "rename".to_owned(),
                #[cfg(target_arch = "x86_64")]
                n if n == libc::SYS_chmod => "chmod".to_owned(),
                #[cfg(target_arch = "x86_64")]
                n if n == libc::SYS_unlink => "unlink".to_owned(),
                n => format!("call {n}"),
            }
        };
    }
    names!(
        SYS_openat SYS_read SYS_write SYS_close SYS_mkdirat SYS_unlinkat SYS_renameat
        SYS_renameat2 SYS_mount SYS_umount2 SYS_statx SYS_newfstatat SYS_fstat SYS_socket
        SYS_bind SYS_listen SYS_fchmodat SYS_fchmod SYS_clone3 SYS_setns SYS_close_range
        SYS_setgroups SYS_sethostname SYS_setsid SYS_prctl SYS_capget SYS_capset SYS_setresuid
        SYS_setresgid SYS_seccomp SYS_execveat SYS_rt_sigprocmask SYS_exit_group SYS_unshare
        SYS_fcntl SYS_waitid SYS_ioctl SYS_epoll_ctl SYS_futex SYS_sched_yield SYS_getrandom
        SYS_madvise SYS_mmap SYS_munmap SYS_brk SYS_rt_sigtimedwait SYS_ppoll SYS_connect
        SYS_uname SYS_lseek SYS_ftruncate SYS_pwrite64 SYS_mprotect SYS_fstatfs SYS_move_mount
        SYS_fsopen SYS_fsconfig SYS_fsmount SYS_open_tree SYS_mount_setattr
    )
}
