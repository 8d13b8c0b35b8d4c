//! The entry point: runs the command of the command line and sets the exit status.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal as _, Write as _};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use node::check::{self, DaemonFindings, Level};
use pause_sandboxer::cli::{
    self, Command, ConfigCommand, DOWN, Format, SettingsSource, WARNED, table, watch::ListWatch,
};
use pause_sandboxer::client::{self, Client};
use pause_sandboxer::config::{self, Config};
use pause_sandboxer::enable::{self, Disablement, Enablement, RestartBy};
use pause_sandboxer::error::StepError;
use pause_sandboxer::oci_image;
use pause_sandboxer::pause::binary::{PROGRAM, SELFTEST};
use pause_sandboxer::selftest::{self, Selftest};

mod daemon;

/// Polling interval of `list --watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Why a command failed: the reason, and the exit status.
struct CommandFailure {
    reason: String,
    status: u8,
}

impl From<String> for CommandFailure {
    fn from(reason: String) -> Self {
        Self { reason, status: 1 }
    }
}

impl From<config::ConfigError> for CommandFailure {
    fn from(error: config::ConfigError) -> Self {
        error.to_string().into()
    }
}

impl From<StepError> for CommandFailure {
    fn from(error: StepError) -> Self {
        error.to_string().into()
    }
}

impl From<client::ClientError> for CommandFailure {
    fn from(error: client::ClientError) -> Self {
        let status = if matches!(error, client::ClientError::Down { .. }) { DOWN } else { 1 };
        Self { reason: error.to_string(), status }
    }
}

fn main() -> ExitCode {
    let done = match cli::parse(std::env::args_os()) {
        Ok(cli) => run(cli.command),
        Err(error) => error.exit(),
    };
    done.unwrap_or_else(|CommandFailure { reason, status }| {
        // There is no other place for the reason if standard error is closed.
        let _ = writeln!(io::stderr().lock(), "pause-sandboxer: {reason}");
        status.into()
    })
}

fn run(command: Command) -> Result<ExitCode, CommandFailure> {
    match command {
        Command::Serve(settings) => daemon::serve(&settings.load()?, &settings)
            .inspect_err(|step| log::error!("daemon exits: {step}"))?,
        Command::List { watch: true, settings, .. } => watch(&settings)?,
        Command::List { output, settings, .. } => {
            let all = Client::connect(&settings.load()?)?.list(true)?;
            print(&match output {
                Format::Json => pretty(&table::list_json(&all)),
                Format::Text => table::list(&all, SystemTime::now()),
            })?;
        }
        Command::Inspect { id, output, settings } => {
            let report = Client::connect(&settings.load()?)?.inspect(&id)?;
            print(&match output {
                Format::Json => pretty(&report),
                Format::Text => table::report(&report),
            })?;
        }
        Command::Stats { once, interval, settings } => stats(once, interval, &settings)?,
        Command::Check(options) => return check(&options),
        Command::Enable(options) => enable(&options)?,
        Command::Disable(options) => disable(&options)?,
        Command::Selftest(options) => selftest(&options)?,
        Command::Config(ConfigCommand::Default) => print(&Config::default().to_toml())?,
        Command::Config(ConfigCommand::Show(settings)) => print(&settings.load()?.to_toml())?,
        Command::Image { output } => write_image(output.as_deref())?,
        Command::Version => print(&format!("pause-sandboxer {}\n", env!("CARGO_PKG_VERSION")))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn check(options: &cli::Check) -> Result<ExitCode, CommandFailure> {
    let subject = check::Subject {
        config: options.settings.load()?,
        containerd_config: options.containerd_config.clone(),
        containerd_program: options.containerd.clone(),
    };
    let own = DaemonFindings {
        first: pause_sandboxer::check::run(&subject.config),
        shims: &|runtimes| pause_sandboxer::check::shims(runtimes, &subject.config),
    };
    let findings = check::run(&subject, own);
    print(&match options.output {
        Format::Json => pretty(&findings.iter().map(check::Finding::to_json).collect()),
        Format::Text => findings.iter().map(|finding| format!("{finding}\n")).collect(),
    })?;
    Ok(match check::worst(&findings) {
        Level::Warn if options.strict => WARNED.into(),
        Level::Ok | Level::Warn => ExitCode::SUCCESS,
        Level::Fail => ExitCode::FAILURE,
    })
}

/// Prints the lines of a command at once: it may take long.
fn say(line: String) {
    // The command's work does not depend on a reader.
    let _ = print(&format!("{line}\n"));
}

/// The node that a command changes, and how containerd is restarted.
fn node(change: &cli::Change) -> Result<(check::Subject, Option<RestartBy>), CommandFailure> {
    let subject = check::Subject {
        config: change.settings.load()?,
        containerd_config: change.containerd_config.clone(),
        containerd_program: change.containerd.clone(),
    };
    let by = change.restart_command.clone().map_or(RestartBy::Systemd, RestartBy::Command);
    Ok((subject, change.restart.then_some(by)))
}

fn enable(options: &cli::Enable) -> Result<(), CommandFailure> {
    let change = &options.change;
    let (subject, restart) = node(change)?;
    let wanted = Enablement {
        subject,
        settings: enable::settings_file(change.settings.file.as_deref()),
        pause_program: PROGRAM,
        handler: options.handler.clone(),
        options_of: options.options_of.clone(),
        default: options.default,
        offline: options.offline,
        dry_run: change.dry_run,
        restart,
        within: Duration::from_secs(change.timeout.into()),
    };
    enable::enable(&wanted, &mut say).map_err(|e| e.to_string().into())
}

fn disable(options: &cli::Disable) -> Result<(), CommandFailure> {
    let change = &options.change;
    let (subject, restart) = node(change)?;
    let wanted = Disablement {
        subject,
        settings: enable::settings_file(change.settings.file.as_deref()),
        dry_run: change.dry_run,
        json: options.output == Format::Json,
        wait: options.wait,
        restart,
        within: Duration::from_secs(change.timeout.into()),
    };
    enable::disable(&wanted, &mut say).map_err(|e| e.to_string().into())
}

fn selftest(options: &cli::SelftestOptions) -> Result<(), CommandFailure> {
    let wanted = Selftest {
        subject: check::Subject {
            config: options.settings.load()?,
            containerd_config: options.containerd_config.clone(),
            containerd_program: options.containerd.clone(),
        },
        program: SELFTEST,
        handler: options.handler.clone(),
        host_network: options.host_network,
        restart: options.restart_sandboxer.then(|| options.restart_command.clone()),
        within: Duration::from_secs(options.timeout.into()),
    };
    let report = selftest::run(&wanted, &mut say).map_err(|e| e.to_string())?;
    print(&report.table)?;
    report.failed.map_or(Ok(()), |failed| Err(failed.to_string().into()))
}

/// Prints each change of the list, until interrupted.
fn watch(settings: &SettingsSource) -> Result<(), CommandFailure> {
    let client = Client::connect(&settings.load()?)?;
    let mut watch = ListWatch::default();
    loop {
        print(&watch.next(&client.list(true)?, SystemTime::now()))?;
        std::thread::sleep(WATCH_INTERVAL);
    }
}

/// Shows the resource usage of the pods, until interrupted or once.
fn stats(once: bool, interval: u32, settings: &SettingsSource) -> Result<(), CommandFailure> {
    let once = once || !io::stdout().is_terminal();
    let client = Client::connect(&settings.load()?)?;
    let mut stats = table::Stats::default();
    loop {
        let shown = stats.next(&client.list(true)?, SystemTime::now());
        if once {
            return Ok(print(&shown)?);
        }
        // Moves to the upper left corner and erases each old line just before it is rewritten,
        // which avoids flicker (ECMA-48 CUP, EL, ED).
        print(&format!("\x1b[H{}\x1b[J", shown.replace('\n', "\x1b[K\n")))?;
        std::thread::sleep(Duration::from_secs(interval.into()));
    }
}

fn write_image(file: Option<&Path>) -> Result<(), String> {
    match file {
        Some(path) => File::create(path)
            .and_then(|file| oci_image::write(PROGRAM, BufWriter::new(file)))
            .map_err(|e| format!("write {}: {e}", path.display())),
        None if io::stdout().is_terminal() => {
            Err("image: refusing to write an archive to a terminal; use -o FILE".to_owned())
        }
        None => oci_image::write(PROGRAM, io::stdout().lock())
            .map_err(|e| format!("write to standard output: {e}")),
    }
}

fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

/// Writes to standard output; does not panic if the reader, such as `head`, has exited.
fn print(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| format!("write to standard output: {e}"))
}
