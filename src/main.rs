//! The command line: what each command does, and the exit status.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use pause_sandboxer::check::{self, Level};
use pause_sandboxer::cli::{self, table};
use pause_sandboxer::client::{self, Client};
use pause_sandboxer::config::Config;
use pause_sandboxer::oci_image;

mod daemon;

use pause_sandboxer::cli::{Asked, DOWN, USAGE_ERROR, WARNED, What};

/// Why a command ended without having done its work: what is told, and the exit status.
struct Failure {
    reason: String,
    status: u8,
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self { reason, status: 1 }
    }
}

impl From<client::Error> for Failure {
    fn from(error: client::Error) -> Self {
        let status = if matches!(error, client::Error::Down { .. }) { DOWN } else { 1 };
        Self { reason: error.to_string(), status }
    }
}

fn main() -> ExitCode {
    let asked = match cli::parse(std::env::args_os().skip(1)) {
        Ok(asked) => asked,
        Err(reason) => {
            complain(&format!("{reason} (`pause-sandboxer help` shows the usage)"));
            return USAGE_ERROR.into();
        }
    };
    run(&asked).unwrap_or_else(|Failure { reason, status }| {
        complain(&reason);
        status.into()
    })
}

fn run(asked: &Asked) -> Result<ExitCode, Failure> {
    let json = asked.option("output") == Some("json");
    match asked.what {
        What::Serve => {
            let config = asked.settings.load()?;
            let Asked { settings, .. } = asked;
            daemon::serve(config, settings.file.clone(), settings.flags.clone())
                .map_err(|e| e.to_string())?;
        }
        What::List => {
            let all = Client::connect(&asked.settings.load()?)?.list(true)?;
            print(&if json {
                pretty(&table::list_json(&all))
            } else {
                table::list(&all, SystemTime::now())
            })?;
        }
        What::Inspect => {
            let report = Client::connect(&asked.settings.load()?)?.inspect(&asked.operand)?;
            print(&if json { pretty(&report) } else { table::report(&report) })?;
        }
        What::Stats => stats(asked)?,
        What::Check => return check(asked, json),
        What::ConfigDefault => print(&Config::default().to_toml())?,
        What::ConfigShow => print(&asked.settings.load()?.to_toml())?,
        What::Image => write_image(asked.option("output"))?,
        What::Completions => print(&match asked.operand.as_str() {
            "zsh" => cli::completion::zsh(),
            "fish" => cli::completion::fish(),
            _ => cli::completion::bash(),
        })?,
        What::Man => print(&cli::man::page())?,
        What::Version => print(&format!("pause-sandboxer {}\n", env!("CARGO_PKG_VERSION")))?,
        What::Help => print(&cli::help())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn check(asked: &Asked, json: bool) -> Result<ExitCode, Failure> {
    let path = |option, default: &str| asked.option(option).unwrap_or(default).into();
    let subject = check::Subject {
        config: asked.settings.load()?,
        containerd_config: path("containerd-config", "/etc/containerd/config.toml"),
        containerd_program: path("containerd", "containerd"),
    };
    let findings = check::run(&subject);
    print(&if json {
        pretty(&findings.iter().map(check::Finding::to_json).collect())
    } else {
        findings.iter().map(|finding| format!("{finding}\n")).collect::<String>()
    })?;
    Ok(match check::worst(&findings) {
        Level::Ok => ExitCode::SUCCESS,
        Level::Warn if asked.option("strict").is_some() => WARNED.into(),
        Level::Warn => ExitCode::SUCCESS,
        Level::Fail => ExitCode::FAILURE,
    })
}

/// Shows what pods use until it is interrupted, or once.
fn stats(asked: &Asked) -> Result<(), Failure> {
    let seconds = asked.option("interval").map_or(Ok(2), str::parse::<u32>);
    let interval = seconds
        .ok()
        .filter(|seconds| *seconds > 0)
        .map(|seconds| Duration::from_secs(seconds.into()));
    let interval = interval.ok_or_else(|| {
        "stats --interval: must be a whole number of seconds, at least 1".to_owned()
    })?;
    let once = asked.option("once").is_some() || !io::stdout().is_terminal();
    let client = Client::connect(&asked.settings.load()?)?;
    let mut stats = table::Stats::default();
    loop {
        let shown = stats.next(&client.list(true)?, SystemTime::now());
        if once {
            print(&shown)?;
            return Ok(());
        }
        // To the upper left corner; what stood there is erased line by line, so that nothing
        // flickers (ECMA-48 CUP, EL, ED).
        print(&format!("\x1b[H{}\x1b[J", shown.replace('\n', "\x1b[K\n")))?;
        std::thread::sleep(interval);
    }
}

fn write_image(file: Option<&str>) -> Result<(), Failure> {
    match file {
        Some(path) => {
            let written =
                File::create(path).and_then(|file| oci_image::write(BufWriter::new(file)));
            written.map_err(|e| format!("write {path}: {e}"))?;
        }
        None if io::stdout().is_terminal() => {
            let reason = "image: an archive is nothing for a terminal; name a file by -o, or | ctr -n k8s.io images import -";
            return Err(reason.to_owned().into());
        }
        None => oci_image::write(io::stdout().lock())
            .map_err(|e| format!("write to standard output: {e}"))?,
    }
    Ok(())
}

fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

/// Writes to standard output; a reader that has gone away, such as `head`, is no error worth a
/// panic.
fn print(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| format!("write to standard output: {e}"))
}

fn complain(reason: &str) {
    // Nobody is left to tell when standard error is gone.
    let _ = writeln!(io::stderr().lock(), "pause-sandboxer: {reason}");
}
