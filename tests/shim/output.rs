//! Output of a container while containerd is restarted.
//!
//! A containerd that ends loses what it has read and not written to the log yet. This is the same
//! with SIGTERM and SIGKILL, and with both shims: of 44 such ends 17 lost output, between 45 and
//! 36,300 bytes. So an end of containerd while it reads may lose as much as its buffers hold. Other
//! ends lose no byte: before them containerd has written all that it has read.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use kit::machine::processes::stop;
use kit::{Container, ContainerSpec, until};

use crate::harness::{
    Case, Harness, LIMIT, SOON, cases_of_both, inside, no_shim, one_shim, removed, shims,
};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = cases_of_both![restarts_of_containerd_lose_no_output_of_the_shim];
    for case in &mut cases {
        // 1 GB takes 80 s on two idle cores.
        case.limit = LIMIT + Duration::from_secs(megabytes());
    }
    cases
}

/// Returns the amount of output; `OUTPUT_MB=1024` runs the case with a gigabyte.
fn megabytes() -> u64 {
    std::env::var("OUTPUT_MB").map_or(64, |number| number.parse().expect("OUTPUT_MB is a number"))
}

/// How long the log may take for the output of one restart.
const WRITES: Duration = Duration::from_secs(60);

/// How containerd ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// By SIGKILL while it reads.
    Killed,
    /// By SIGTERM while it reads.
    Terminated,
    /// By SIGKILL while it is stopped: the FIFO is full, and containerd has read nothing of it.
    KilledBeforeItReads,
    /// By SIGKILL before the container writes: the FIFO becomes full without a reader.
    KilledBeforeTheOutput,
}

impl End {
    const ALL: [Self; 4] =
        [Self::Killed, Self::KilledBeforeItReads, Self::Terminated, Self::KilledBeforeTheOutput];

    /// The most bytes that containerd loses: the buffer of `io.Copy`, that of the reader of lines
    /// (`defaultBufSize` in containerd's `internal/cri/io/logger.go`), and the line that it is in.
    fn may_lose(self) -> u64 {
        match self {
            Self::Killed | Self::Terminated => (32 << 10) + (4 << 10) + LINE,
            Self::KilledBeforeItReads | Self::KilledBeforeTheOutput => 0,
        }
    }
}

/// Restarts of a case.
const RESTARTS: usize = 8;

fn ends() -> impl Iterator<Item = End> {
    End::ALL.into_iter().cycle().take(RESTARTS)
}

/// Bytes of a line with its end.
const LINE: u64 = 64 * 10 + 1;

/// A line without its end: the number, 64 times, so that a part of a line shows the number.
fn line(number: u64) -> String {
    format!("{number:09}.").repeat(64)
}

/// Writes lines once the file of that name is there.
const LINES: &str = r#"
lines() {
    until [ -e "/dev/shm/$1" ]; do sleep 0.01; done
    awk -v from="$2" -v to="$3" 'BEGIN {
        for (number = from; number < to; number++) {
            line = sprintf("%09d.", number)
            for (doubled = 0; doubled < 6; doubled++) line = line line
            print line
        }
    }'
}
set -e
"#;

/// The output in steps, each of which waits for a file with its name. Each restart has two: much
/// output, and one more line once containerd runs again, which is in the log after all that came
/// before.
struct Output {
    /// Lines of a step with much output.
    many: u64,
}

impl Output {
    fn new() -> Self {
        Self { many: (megabytes() << 20) / LINE / RESTARTS as u64 }
    }

    /// The lines of a restart, without the last one.
    fn lines_of(&self, restart: usize) -> Range<u64> {
        let first = restart as u64 * (self.many + 1);
        first..first + self.many
    }

    fn script(&self) -> String {
        let mut script = LINES.to_owned();
        for restart in 0..RESTARTS {
            let Range { start, end } = self.lines_of(restart);
            script += &format!("lines many-{restart} {start} {end}\n");
            script += &format!("lines one-{restart} {end} {}\n", end + 1);
        }
        script + "exit 9\n"
    }

    /// Checks that the log has the whole output, but for what containerd may have lost.
    fn check(&self, log: &Path) -> Result<()> {
        let missing = missing(log, self.lines_of(RESTARTS).start * LINE)?;
        eprintln!("bytes that the log lacks: {missing:?}");
        for (restart, end) in ends().enumerate() {
            let Range { start, end: last } = self.lines_of(restart);
            // Without the last line: it was written when containerd ran again.
            let bytes = start * LINE..last * LINE;
            let inside =
                missing.iter().filter(|part| bytes.contains(&part.start)).collect::<Vec<_>>();
            let lost = inside.iter().map(|part| part.end - part.start).sum::<u64>();
            let at_one_place = inside.iter().all(|part| part.end <= bytes.end) && inside.len() <= 1;
            ensure!(at_one_place && lost <= end.may_lose(), "{end:?} ({bytes:?}): lost {inside:?}");
        }
        let of_ends = |part: &Range<u64>| part.start / LINE % (self.many + 1) != self.many;
        ensure!(missing.iter().all(of_ends), "lost without a restart: {missing:?}");
        Ok(())
    }
}

/// The parts of the output that the log does not have, in bytes from its start.
///
/// # Errors
/// The log has a part twice, or another text.
fn missing(log: &Path, bytes: u64) -> Result<Vec<Range<u64>>> {
    let (mut missing, mut next) = (Vec::new(), 0);
    // The end of a line whose start was lost: what the next containerd has read first.
    let mut tail: Option<String> = None;
    for entry in BufReader::new(File::open(log)?).lines() {
        let entry = entry?;
        // A killed containerd may have written a part of an entry, before the last space.
        let (head, text) = entry.rsplit_once(' ').with_context(|| format!("{entry:?}"))?;
        ensure!(head.ends_with(" stdout F"), "{entry:?}");
        let number = text.get(..9).and_then(|number| number.parse().ok());
        let Some(number) = number.filter(|number| text == line(*number)) else {
            ensure!(tail.is_none(), "two parts of lines: {tail:?}, {text:?}");
            tail = Some(text.to_owned());
            continue;
        };
        let mut start = number * LINE;
        if let Some(tail) = tail.take() {
            let whole = number.checked_sub(1).map(line).unwrap_or_default();
            ensure!(whole.ends_with(&tail), "before line {number}: {tail:?}");
            start -= tail.len() as u64 + 1;
        }
        ensure!(start >= next, "line {number} after byte {next}");
        if start > next {
            missing.push(next..start);
        }
        next = (number + 1) * LINE;
    }
    ensure!(tail.is_none() && next == bytes, "it ends at byte {next} of {bytes}: {tail:?}");
    Ok(missing)
}

/// The container that writes.
struct Writer {
    container: Container,
    /// Of its standard output.
    fifo: PathBuf,
    /// Where it looks for the files of its steps.
    steps: PathBuf,
    output: Output,
}

impl Writer {
    fn new(container: Container, shim: u32, output: Output) -> Result<Self> {
        // Its first process is the shell.
        let shell = inside(container.id())?.into_iter().min_by_key(|process| process.start_time);
        let shell = shell.context("no process of the container")?.pid;
        let steps = PathBuf::from(format!("/proc/{shell}/root/dev/shm"));
        Ok(Self { container, fifo: fifo(shim)?, steps, output })
    }

    fn begin(&self, step: &str, restart: usize) -> Result<()> {
        let file = self.steps.join(format!("{step}-{restart}"));
        fs::write(&file, "").with_context(|| format!("write {} of the container", file.display()))
    }

    /// Begins the output of this restart and waits until a quarter of it is in the log.
    async fn write_a_quarter(&self, restart: usize) -> Result<()> {
        let size = || Ok::<_, std::io::Error>(fs::metadata(self.container.log_path())?.len());
        let enough = size()? + self.output.many / 4 * LINE;
        self.begin("many", restart)?;
        until("output is in the log", WRITES, async || {
            let has = size()?;
            ensure!(has >= enough, "{has} of {enough} bytes");
            Ok(())
        })
        .await
    }

    /// Waits until the container waits because the FIFO takes no more.
    async fn wait_until_fifo_is_full(&self) -> Result<()> {
        until("the FIFO is full", SOON, async || {
            let mut options = OpenOptions::new();
            let fifo = options.read(true).custom_flags(libc::O_NONBLOCK).open(&self.fifo)?;
            let unread = rustix::io::ioctl_fionread(fifo)?;
            // Pages of a pipe are not always full.
            ensure!(unread >= 32 << 10, "{unread} bytes");
            Ok(())
        })
        .await
    }

    /// Waits until the log ends with the last line of this restart.
    async fn wait_for_last_line(&self, restart: usize) -> Result<()> {
        let last = line(self.output.lines_of(restart).end) + "\n";
        until("all output is in the log", WRITES, async || {
            let mut log = File::open(self.container.log_path())?;
            let size = log.metadata()?.len();
            log.seek(SeekFrom::Start(size.saturating_sub(LINE)))?;
            let mut end = String::new();
            log.read_to_string(&mut end)?;
            ensure!(end == last, "it ends with {end:?}");
            Ok(())
        })
        .await
    }

    async fn restart(&self, harness: &Harness, restart: usize, end: End) -> Result<()> {
        let node = &harness.node;
        match end {
            End::Killed => {
                self.write_a_quarter(restart).await?;
                node.kill_containerd()?;
            }
            End::Terminated => {
                self.write_a_quarter(restart).await?;
                node.stop_containerd().await?;
            }
            End::KilledBeforeItReads => {
                stop(node.containerd_pid()?).await?;
                self.begin("many", restart)?;
                self.wait_until_fifo_is_full().await?;
                node.kill_containerd()?;
            }
            End::KilledBeforeTheOutput => {
                node.kill_containerd()?;
                self.begin("many", restart)?;
                self.wait_until_fifo_is_full().await?;
            }
        }
        node.start_containerd().await?;
        self.begin("one", restart)?;
        self.wait_for_last_line(restart).await
    }
}

/// The FIFO to which the shim writes the standard output of its only container.
fn fifo(shim: u32) -> Result<PathBuf> {
    for entry in fs::read_dir(format!("/proc/{shim}/fd")).context("descriptors")? {
        // It may have closed one meanwhile.
        let Ok(path) = fs::read_link(entry?.path()) else { continue };
        if path.to_string_lossy().ends_with("-stdout") {
            return Ok(path);
        }
    }
    bail!("the shim has no FIFO open")
}

/// Promise: output_is_not_lost.
async fn restarts_of_containerd_lose_no_output_of_the_shim(harness: Arc<Harness>) -> Result<()> {
    let output = Output::new();
    let pod = harness.pod("writes").await?;
    let container = pod.run(ContainerSpec::sh("writer", &output.script())).await?;
    let shim = one_shim(&pod).await?;
    let writer = Writer::new(container, shim.pid, output)?;
    for (restart, end) in ends().enumerate() {
        writer.restart(&harness, restart, end).await.with_context(|| format!("{end:?}"))?;
    }
    let code = writer.container.exited(SOON).await?;
    ensure!(code == 9, "the container ended with {code}");
    // From 2.4 on containerd has ended it by now.
    ensure!(shims(&pod)?.iter().all(|it| it.pid == shim.pid), "another shim");
    writer.output.check(writer.container.log_path())?;
    removed(&pod).await?;
    no_shim(&pod).await
}
