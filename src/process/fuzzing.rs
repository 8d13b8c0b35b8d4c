//! Entry points of the fuzzer in `fuzz/`: what is read from `/proc`.

use process_identity::Stat;

/// State, start time and exit status, by the content of `/proc/PID/stat`; `None`: it is of another
/// format.
pub fn stat(content: &[u8]) -> Option<(u8, u64, i32)> {
    Stat::parse(content).map(|stat| (stat.state, stat.start_time, stat.exit_status))
}
