//! A shim through which the calls of a real one pass, and are refused, late or lost on order.
//!
//! `wrap-server SHIM ORDER ARGUMENT...` serves at the socket that it has as descriptor 3, as a shim
//! does, and hands a socket of its own to the real one.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use protobuf::Message as _;
use ttrpc::proto::{Code, Request, Response, Status};

/// Length of a ttrpc message's head: length of the rest, stream, type, flags.
const HEAD: usize = 10;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// Where the orders for calls are, beside the order for the shim itself.
pub(crate) fn calls(order: &Path) -> PathBuf {
    order.with_extension("calls")
}

/// The variable that names the script that this program becomes when it is executed as the
/// sandboxer's own shim.
pub(crate) const SCRIPT: &str = "KIT_SHIM_SCRIPT";

/// Runs as the shim if the arguments say so, or the environment.
pub(crate) fn main() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(script) = std::env::var_os(SCRIPT)
        && arguments.first().is_some_and(|first| first == "-namespace")
    {
        eprintln!("become {script:?}: {}", Command::new(&script).args(&arguments).exec());
        return Some(ExitCode::FAILURE);
    }
    let [role, shim, order, rest @ ..] = arguments.as_slice() else { return None };
    if role != "wrap-server" {
        return None;
    }
    Some(server(shim, Path::new(order), rest).unwrap_or_else(|e| {
        eprintln!("{role}: {e:#}");
        ExitCode::FAILURE
    }))
}

/// The server's role: ends as the real one does, which ends with this.
fn server(shim: &str, order: &Path, arguments: &[String]) -> Result<ExitCode> {
    let listener = UnixListener::from(pause_sandboxer::process::inherited(3)?);
    listener.set_nonblocking(false)?;
    let inner = order.with_extension(format!("i{}", std::process::id()));
    let inner_listener: OwnedFd = UnixListener::bind(&inner)?.into();
    let script = "exec setpriv --pdeathsig KILL \"$@\" 3<&0 0</dev/null";
    let mut real = Command::new("sh")
        .args(["-c", script, "sh", shim])
        .args(arguments)
        .stdin(Stdio::from(inner_listener))
        .spawn()
        .context("run the real shim")?;
    let (to, calls) = (inner.clone(), calls(order));
    thread::spawn(move || pass(&listener, &to, &calls));
    let status = real.wait()?;
    fs::remove_file(inner)?;
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1))?))
}

fn pass(listener: &UnixListener, to: &Path, calls: &Path) {
    while let Ok((client, _)) = listener.accept() {
        let (to, calls) = (to.to_owned(), calls.to_owned());
        thread::spawn(move || {
            if let Ok(shim) = UnixStream::connect(to) {
                let _ = connection(client, shim, &calls);
            }
        });
    }
}

type Writer = Arc<Mutex<UnixStream>>;

/// The calls of a connection as the shim gets them: numbered anew in the order in which they are
/// passed on. A shim takes no number that is lower than an earlier one, as that of a late call
/// would be.
struct Streams {
    shim: UnixStream,
    last: u32,
    /// The caller's number of each stream of the shim's.
    callers: HashMap<[u8; 4], [u8; 4]>,
}

impl Streams {
    fn new(shim: UnixStream) -> Self {
        Self { shim, last: 0, callers: HashMap::new() }
    }

    /// Passes a frame of the caller's on.
    fn pass(&mut self, frame: &[u8]) -> io::Result<()> {
        let caller = [frame[4], frame[5], frame[6], frame[7]];
        let stream = if frame[8] == REQUEST {
            // A client's are odd.
            self.last = if self.last == 0 { 1 } else { self.last + 2 };
            self.callers.insert(self.last.to_be_bytes(), caller);
            self.last.to_be_bytes()
        } else {
            let known =
                self.callers.iter().find(|(_, known)| **known == caller).map(|(stream, _)| *stream);
            known.ok_or_else(|| io::Error::other("data of no call"))?
        };
        let mut frame = frame.to_vec();
        frame[4..8].copy_from_slice(&stream);
        self.shim.write_all(&frame)
    }

    /// Gives a frame of the shim's the caller's number.
    fn name(&self, frame: &mut [u8]) {
        if let Some(caller) = self.callers.get(&frame[4..8]) {
            frame[4..8].copy_from_slice(caller);
        }
    }
}

/// One connection, until either end is gone.
fn connection(client: UnixStream, shim: UnixStream, calls: &Path) -> Result<()> {
    let to_client: Writer = Arc::new(Mutex::new(client.try_clone()?));
    let to_shim = Arc::new(Mutex::new(Streams::new(shim.try_clone()?)));
    let (mut answers, back, answered) = (shim.try_clone()?, to_client.clone(), to_shim.clone());
    let ends = (client.try_clone()?, shim.try_clone()?);
    // The stream of the call whose answer is to be lost.
    let lost: Arc<Mutex<Option<Vec<u8>>>> = Arc::default();
    let losing = lost.clone();
    thread::spawn(move || {
        while let Ok(mut frame) = frame(&mut answers) {
            locked(&answered).name(&mut frame);
            if locked(&losing).as_deref() == Some(&frame[4..8]) {
                break;
            }
            if write(&back, &frame).is_err() {
                break;
            }
        }
        hang_up(&ends.0, &ends.1);
    });
    let mut requests = client.try_clone()?;
    while let Ok(frame) = frame(&mut requests) {
        match ordered(&frame, calls)? {
            Order::Pass => locked(&to_shim).pass(&frame)?,
            Order::Hang => {}
            Order::Fail => write(&to_client, &refusal(&frame)?)?,
            Order::Late(by) => {
                let to_shim = to_shim.clone();
                thread::spawn(move || {
                    thread::sleep(by);
                    let _ = locked(&to_shim).pass(&frame);
                });
            }
            Order::Lose => {
                *locked(&lost) = Some(frame[4..8].to_vec());
                locked(&to_shim).pass(&frame)?;
            }
            Order::Cut => {
                locked(&to_shim).pass(&frame)?;
                break;
            }
            Order::Die => {
                locked(&to_shim).pass(&frame)?;
                // The real one, and what it runs, end with it.
                nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL)?;
            }
        }
    }
    hang_up(&client, &shim);
    Ok(())
}

fn hang_up(client: &UnixStream, shim: &UnixStream) {
    let _ = client.shutdown(Shutdown::Both);
    let _ = shim.shutdown(Shutdown::Both);
}

fn frame(from: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; HEAD];
    from.read_exact(&mut frame)?;
    let length = u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]);
    frame.resize(HEAD + length as usize, 0);
    from.read_exact(&mut frame[HEAD..])?;
    Ok(frame)
}

fn write(to: &Writer, frame: &[u8]) -> io::Result<()> {
    locked(to).write_all(frame)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An answer of the shim's that it has failed.
fn refusal(request: &[u8]) -> Result<Vec<u8>> {
    let status = Status {
        code: Code::INTERNAL.into(),
        message: "ordered to fail".to_owned(),
        ..Default::default()
    };
    answer(request, &Response { status: Some(status).into(), ..Default::default() })
}

fn answer(request: &[u8], response: &Response) -> Result<Vec<u8>> {
    let payload = response.write_to_bytes()?;
    let mut frame = u32::try_from(payload.len())?.to_be_bytes().to_vec();
    frame.extend(&request[4..8]);
    frame.extend([RESPONSE, 0]);
    frame.extend(payload);
    Ok(frame)
}

enum Order {
    Pass,
    Fail,
    Hang,
    /// The connection ends when the answer comes.
    Lose,
    /// The connection ends with the call.
    Cut,
    /// The shim ends with the call.
    Die,
    Late(Duration),
}

/// The order for a call; an order for a number of calls is used up by them.
fn ordered(frame: &[u8], calls: &Path) -> Result<Order> {
    static TURN: Mutex<()> = Mutex::new(());
    if frame[8] != REQUEST {
        return Ok(Order::Pass);
    }
    let method = Request::parse_from_bytes(&frame[HEAD..])?.method;
    let _turn = locked(&TURN);
    let text = fs::read_to_string(calls).unwrap_or_default();
    let words: Vec<&str> = text.split_whitespace().collect();
    let [ordered, how, number] = words.as_slice() else { return Ok(Order::Pass) };
    let number: u64 = number.parse()?;
    if *ordered != method || number == 0 {
        return Ok(Order::Pass);
    }
    let left = if *how == "late" { 0 } else { number - 1 };
    fs::write(calls, format!("{ordered} {how} {left}"))?;
    Ok(match *how {
        "fail" => Order::Fail,
        "hang" => Order::Hang,
        "lose" => Order::Lose,
        "cut" => Order::Cut,
        "die" => Order::Die,
        "late" => Order::Late(Duration::from_secs(number)),
        other => anyhow::bail!("no such order: {other}"),
    })
}
