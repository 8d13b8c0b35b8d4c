//! Waiting for a condition, never for a time.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Polling interval on a machine of usual speed. On a slow machine it is longer, in proportion, so
/// that polling does not take most of its time.
const PACE: Duration = Duration::from_millis(10);

/// How many times longer than usual everything may take, which a slow machine such as an emulated
/// one says of itself.
const VARIABLE: &str = "KIT_PATIENCE";

fn slower() -> u32 {
    std::env::var(VARIABLE)
        .ok()
        .and_then(|times| times.parse().ok())
        .filter(|times| *times > 0)
        .unwrap_or(1)
}

/// A limit of time for a machine of usual speed, as this one needs it: [`until`] knows.
pub fn patient(limit: Duration) -> Duration {
    limit * slower()
}

/// How many pods, or tries, this machine manages in the time in which one of usual speed manages
/// `many`. Says so where they are fewer.
pub fn fewer(what: &str, many: u32) -> u32 {
    let fewer = many.div_ceil(slower());
    if fewer < many {
        eprintln!("{fewer} {what} instead of {many}: this machine is slow");
    }
    fewer
}

/// Asks `probe` until it answers `Ok`, and gives up after `limit`, made [`patient`], with the last
/// reason that it gave.
///
/// # Errors
/// Names `what` and the last reason.
pub async fn until<T, F>(what: &str, limit: Duration, mut probe: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let (begun, limit) = (Instant::now(), patient(limit));
    loop {
        match probe().await {
            Ok(found) => return Ok(found),
            Err(reason) if begun.elapsed() >= limit => {
                bail!("{what}: not so after {:.1} s: {reason:#}", begun.elapsed().as_secs_f32())
            }
            Err(_) => tokio::time::sleep(patient(PACE)).await,
        }
    }
}
