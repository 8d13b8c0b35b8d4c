//! The entry point: runs the command of the command line and sets the exit status.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Parser as _;
use node::check::{self, DaemonFindings, Level};
use pause_sandboxer::cli::{
    self, Cli, Command, ConfigCommand, DOWN, Format, NEEDED, ServeOptions, WARNED, colour, table,
};
use pause_sandboxer::client;
use pause_sandboxer::config::{self, Config};
use pause_sandboxer::enable::{self, Disablement, Enablement, Mode, NodeChange, RestartBy};
use pause_sandboxer::error::{IoContext as _, StepError};
use pause_sandboxer::pause::binary::{PROGRAM, SELFTEST};
use pause_sandboxer::selftest::{self, Selftest};
use pause_sandboxer::shim;

mod daemon;

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
        // clap exits with 2 as well.
        let of_line =
            matches!(error, config::ConfigError::Flag { .. } | config::ConfigError::Options(_));
        Self { reason: error.to_string(), status: if of_line { 2 } else { 1 } }
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
    let done = match shim::containerd::report(std::env::args_os().skip(1)) {
        Some(report) => report.map_err(Into::into).and_then(|bytes| {
            print(&bytes)?;
            Ok(ExitCode::SUCCESS)
        }),
        None => match Cli::parse().command {
            Command::Serve(options) => serve(&options),
            command => block_on(run(command)),
        },
    };
    done.unwrap_or_else(|CommandFailure { reason, status }| {
        // There is no other place for the reason if standard error is closed.
        let _ = writeln!(io::stderr().lock(), "pause-sandboxer: {reason}");
        status.into()
    })
}

fn serve(options: &ServeOptions) -> Result<ExitCode, CommandFailure> {
    daemon::serve(&options.load()?, options)
        .inspect_err(|step| log::error!("daemon exits: {step}"))?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a command other than `serve`, which has a runtime of its own.
fn block_on(
    command: impl Future<Output = Result<ExitCode, CommandFailure>>,
) -> Result<ExitCode, CommandFailure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.step("make the runtime")?.block_on(command)
}

async fn run(command: Command) -> Result<ExitCode, CommandFailure> {
    match command {
        Command::Serve(options) => return serve(&options),
        Command::List { output, settings } => {
            let all = client::list(&settings.load()?).await?;
            print(&match output {
                Format::Json => pretty(&table::list_json(&all)),
                Format::Text => coloured(table::list(&all, SystemTime::now()), colour::states),
            })?;
        }
        Command::Check(options) => return check(&options).await,
        Command::Enable(options) => enable(&options).await?,
        Command::Disable(options) => return disable(&options).await,
        Command::Selftest(options) => selftest(&options).await?,
        Command::Config(ConfigCommand::Default) => print(&Config::default().to_toml())?,
        Command::Config(ConfigCommand::Show(settings)) => print(&settings.load()?.to_toml())?,
        Command::Version => print(&format!("pause-sandboxer {}\n", env!("CARGO_PKG_VERSION")))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn subject(node: &cli::NodeOptions) -> Result<check::Subject, CommandFailure> {
    Ok(check::Subject {
        config: node.settings.load()?,
        containerd_config: node.containerd_config.clone(),
        containerd_program: node.containerd.clone(),
    })
}

async fn check(options: &cli::Check) -> Result<ExitCode, CommandFailure> {
    let subject = subject(&options.node)?;
    let own = DaemonFindings {
        first: Box::pin(pause_sandboxer::check::run(&subject.config)),
        shims: &|runtimes, config| {
            Box::pin(async move { pause_sandboxer::check::shims(runtimes, &config).await })
        },
    };
    let findings = check::run(&subject, own).await;
    print(&match options.output {
        Format::Json => pretty(&findings.iter().map(check::Finding::to_json).collect()),
        Format::Text => {
            let text = findings.iter().map(|finding| format!("{finding}\n")).collect();
            coloured(text, colour::findings)
        }
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

/// The node that a command changes, and how.
fn node(change: &cli::Change) -> Result<NodeChange, CommandFailure> {
    let by = change.restart_command.clone().map_or(RestartBy::Systemd, RestartBy::Command);
    Ok(NodeChange {
        subject: subject(&change.node)?,
        settings: enable::settings_file(change.node.settings.file.as_deref()),
        containerd_address: change.containerd_address.clone(),
        dry_run: change.dry_run,
        restart: change.restart.then_some(by),
        within: Duration::from_secs(change.timeout.into()),
    })
}

async fn enable(options: &cli::Enable) -> Result<(), CommandFailure> {
    let mode = if options.shim_only { Mode::ShimOnly } else { Mode::Sandboxer };
    let wanted = Enablement {
        change: node(&options.change)?,
        pause_program: PROGRAM,
        mode,
        handler: options.handler.clone().unwrap_or_else(|| mode.handler().to_owned()),
        options_of: options.options_of.clone(),
        default: options.default,
        offline: options.offline,
    };
    enable::enable(&wanted, &mut say).await.map_err(|e| e.to_string())?;
    if options.shim_only {
        return Ok(());
    }
    // `enable` may have adopted the address of another containerd.
    let config = options.change.node.settings.load()?;
    let inherited = pause_sandboxer::check::inheritance(&config).await;
    inherited.iter().filter(|finding| finding.level != Level::Ok).for_each(|f| say(f.to_string()));
    Ok(())
}

async fn disable(options: &cli::Disable) -> Result<ExitCode, CommandFailure> {
    let change = node(&options.change)?;
    if options.check {
        let need = enable::need(&change).await.map_err(|e| e.to_string())?;
        print(&need.to_string())?;
        return Ok(if need.is_needed() { NEEDED.into() } else { ExitCode::SUCCESS });
    }
    let wanted = Disablement { change, handler: options.handler.clone() };
    enable::disable(&wanted, &mut say).await.map_err(|e| e.to_string())?;
    Ok(ExitCode::SUCCESS)
}

async fn selftest(options: &cli::SelftestOptions) -> Result<(), CommandFailure> {
    let wanted = Selftest {
        subject: subject(&options.node)?,
        program: SELFTEST,
        pause_program: PROGRAM,
        handler: options.handler.clone(),
        host_network: options.host_network,
        restart: options.restart_sandboxer.then(|| options.restart_command.clone()),
        within: Duration::from_secs(options.timeout.into()),
    };
    let report = selftest::run(&wanted, &mut say).await.map_err(|e| e.to_string())?;
    print(&report.table)?;
    report.failed.map_or(Ok(()), |failed| Err(failed.to_string().into()))
}

/// A text for standard output, with colours on a terminal.
fn coloured(text: String, paint: fn(&str) -> String) -> String {
    if colour::shown() { paint(&text) } else { text }
}

fn pretty(value: &serde_json::Value) -> String {
    format!("{value:#}\n")
}

/// Writes to standard output; does not panic if the reader, such as `head`, has exited.
fn print(text: &(impl AsRef<[u8]> + ?Sized)) -> Result<(), String> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_ref())
        .and_then(|()| out.flush())
        .map_err(|e| format!("write to standard output: {e}"))
}
