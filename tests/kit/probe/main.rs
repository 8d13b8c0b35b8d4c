//! The program inside the images of the tests, for tasks that busybox lacks.
//!
//! - `pause`: waits forever and reaps; the pause image of the built-in controller.
//! - `shm-make KEY TEXT`, `shm-read KEY`, `shm-remove KEY`: a System V shared memory segment.
//! - `core-domain PID`: the core scheduling domain of a process, 0 for that of all.
//! - `serve PORT NAME`: answers every line of every connection with `NAME: LINE`.
//! - `web PORT WORD...`: a web server that answers whatever it is asked for; its id is in
//!   `/run/NAME.pid`, NAME being its program's, and the words are there to be seen in its
//!   arguments.
//! - `euid`: prints its effective user id.
//! - `hold-input`: keeps the kernel's lock of the pipe that is its standard input, from the first
//!   byte on.
//!
//! With `PROBE_AS=stranger` in its environment it waits forever, whatever its arguments are, and
//! with `PROBE_AS=hidden` it takes the memory of its arguments away before.

use std::ffi::{c_int, c_uint, c_ulong, c_void};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::{env, ptr, thread};

unsafe extern "C" {
    fn pause() -> c_int;
    fn signal(signal: c_int, handler: usize) -> usize;
    fn shmget(key: c_int, size: usize, flags: c_int) -> c_int;
    fn shmat(id: c_int, address: *const c_void, flags: c_int) -> *mut c_void;
    fn shmctl(id: c_int, command: c_int, buffer: *mut c_void) -> c_int;
    fn alarm(seconds: u32) -> u32;
    fn geteuid() -> u32;
    fn prctl(option: c_int, ...) -> c_int;
    fn munmap(address: *mut c_void, length: usize) -> c_int;
    fn splice(
        from: c_int,
        from_offset: *mut i64,
        to: c_int,
        to_offset: *mut i64,
        length: usize,
        flags: c_uint,
    ) -> isize;
}

const SIGCHLD: c_int = 17;
const SIG_IGN: usize = 1;
const PR_SCHED_CORE: c_int = 62;
const PR_SCHED_CORE_GET: c_ulong = 0;
const IPC_CREAT: c_int = 0o1000;
const IPC_EXCL: c_int = 0o2000;
const IPC_RMID: c_int = 0;
const USAGE: &str = "usage: probe pause | shm-make KEY TEXT | shm-read KEY | shm-remove KEY | \
                     core-domain PID | serve PORT NAME | web PORT WORD... | euid | hold-input";
/// Size of every segment, bytes.
const SEGMENT: usize = 4096;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        _ if env::var("PROBE_AS").is_ok_and(|kind| kind == "stranger") => wait_for_ever(),
        _ if env::var("PROBE_AS").is_ok_and(|kind| kind == "hidden") => hide(),
        [] | ["pause"] => wait_for_ever(),
        ["shm-make", key, text] => parse(key).and_then(|key| shm_make(key, text)),
        ["shm-read", key] => parse(key).and_then(shm_read),
        ["shm-remove", key] => parse(key).and_then(shm_remove),
        ["core-domain", pid] => parse(pid).and_then(core_domain),
        ["serve", port, name] => parse(port).and_then(|port: u16| serve(port, name)),
        ["web", port, ..] => parse(port).and_then(web),
        ["euid"] => euid(),
        ["hold-input"] => hold_input(),
        _ => Err(io::Error::other(USAGE)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("probe {}: {e}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn parse<T: std::str::FromStr>(word: &str) -> io::Result<T> {
    word.parse().map_err(|_| io::Error::other(format!("{word} is not a number in range")))
}

fn core_domain(pid: c_ulong) -> io::Result<()> {
    let mut cookie = 0_u64;
    let scope_thread: c_ulong = 0;
    // SAFETY: the last argument is the address of the word that the kernel writes.
    let done =
        unsafe { prctl(PR_SCHED_CORE, PR_SCHED_CORE_GET, pid, scope_thread, &raw mut cookie) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    println!("{cookie}");
    Ok(())
}

fn wait_for_ever() -> io::Result<()> {
    // SAFETY: ignoring SIGCHLD makes the kernel reap the children; no handler runs.
    unsafe { signal(SIGCHLD, SIG_IGN) };
    loop {
        // SAFETY: takes nothing and only waits.
        unsafe { pause() };
    }
}

/// Takes away the memory of arguments and environment.
fn hide() -> io::Result<()> {
    /// Fields after the name in `/proc/PID/stat`: where the arguments begin and the environment
    /// ends (proc(5)).
    const ARG_START: usize = 48 - 3;
    const ENV_END: usize = 51 - 3;
    const PAGE: usize = 4096;
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let rest = stat.rsplit_once(") ").map(|(_, rest)| rest);
    let fields: Vec<&str> = rest.map_or(Vec::new(), |rest| rest.split(' ').collect());
    let field = |at: usize| parse::<usize>(fields.get(at).copied().unwrap_or_default());
    // To the stack's end: the kernel would let a part that is left above grow down again.
    let (begin, end) = (field(ARG_START)? & !(PAGE - 1), (field(ENV_END)? | (PAGE - 1)) + 1);
    // By a thread with a stack of its own: the page may be in use as this one's.
    let thread = thread::spawn(move || {
        // SAFETY: the pages are the kernel's for arguments and environment, and the stack of a
        // thread that never runs again.
        if unsafe { munmap(begin as *mut c_void, end - begin) } < 0 {
            eprintln!("hide: {}", io::Error::last_os_error());
        }
        wait_for_ever()
    });
    thread.join().unwrap_or(Ok(()))
}

/// Moves its input to a socket that has no room: meanwhile the kernel holds the pipe's lock.
fn hold_input() -> io::Result<()> {
    let (mut full, _kept) = UnixStream::pair()?;
    full.set_nonblocking(true)?;
    while full.write(&[0; 4096]).is_ok() {}
    full.set_nonblocking(false)?;
    println!("full");
    let none = ptr::null_mut();
    // SAFETY: both descriptors are open, and no offset is given.
    if unsafe { splice(0, none, full.as_raw_fd(), none, SEGMENT, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The id of the segment of `key`.
fn segment(key: c_int, flags: c_int) -> io::Result<c_int> {
    // SAFETY: plain numbers; the result is checked.
    let id = unsafe { shmget(key, SEGMENT, flags | 0o666) };
    if id < 0 { Err(io::Error::last_os_error()) } else { Ok(id) }
}

/// Attaches the segment of `key`, which stays attached until the process ends.
fn attach(key: c_int, flags: c_int) -> io::Result<*mut u8> {
    let id = segment(key, flags)?;
    // SAFETY: the kernel chooses a free address.
    let address = unsafe { shmat(id, ptr::null(), 0) };
    if address as c_ulong == c_ulong::MAX {
        return Err(io::Error::last_os_error());
    }
    Ok(address.cast())
}

fn shm_make(key: c_int, text: &str) -> io::Result<()> {
    if text.len() > SEGMENT {
        return Err(io::Error::other("the text is longer than the segment"));
    }
    let segment = attach(key, IPC_CREAT | IPC_EXCL)?;
    // SAFETY: the segment has SEGMENT bytes, at least as many as the text, and cannot overlap it.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), segment, text.len()) };
    Ok(())
}

fn shm_read(key: c_int) -> io::Result<()> {
    let segment = attach(key, 0)?;
    // SAFETY: the segment has SEGMENT bytes and stays attached; a writer at the same time is no
    // part of the tests.
    let bytes = unsafe { std::slice::from_raw_parts(segment, SEGMENT) };
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(SEGMENT);
    println!("{}", String::from_utf8_lossy(&bytes[..end]));
    Ok(())
}

fn shm_remove(key: c_int) -> io::Result<()> {
    // SAFETY: IPC_RMID takes no buffer.
    if unsafe { shmctl(segment(key, 0)?, IPC_RMID, ptr::null_mut()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn serve(port: u16, name: &str) -> io::Result<()> {
    // SAFETY: plain number; ends the process in case no test ends it.
    unsafe { alarm(600) };
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    println!("listening");
    for connection in listener.incoming() {
        let (connection, name) = (connection?, name.to_owned());
        thread::spawn(move || answer(connection, &name));
    }
    Ok(())
}

fn answer(connection: TcpStream, name: &str) -> io::Result<()> {
    let mut answers = connection.try_clone()?;
    for line in BufReader::new(connection).lines() {
        writeln!(answers, "{name}: {}", line?)?;
    }
    Ok(())
}

fn web(port: u16) -> io::Result<()> {
    let program = env::args().next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default().to_owned();
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    std::fs::write(format!("/run/{name}.pid"), format!("{}\n", std::process::id()))?;
    println!("{name} listens");
    for connection in listener.incoming() {
        let connection = connection?;
        thread::spawn(move || page(connection));
    }
    Ok(())
}

fn page(mut connection: TcpStream) -> io::Result<()> {
    let mut asked = BufReader::new(connection.try_clone()?);
    let mut line = String::new();
    while asked.read_line(&mut line)? > 0 && !line.trim().is_empty() {
        line.clear();
    }
    connection.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n")
}

fn euid() -> io::Result<()> {
    // SAFETY: takes nothing and cannot fail.
    println!("Effective uid: {}", unsafe { geteuid() });
    Ok(())
}
