//! Formatting of times and durations.

use std::time::{Duration, SystemTime};

/// The last second that RFC 3339 has a year for.
const LAST: Duration = Duration::from_secs(253_402_300_799);

/// RFC 3339 in UTC with microseconds. Times before 1970 or after 9999 are shown as those limits.
pub fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    humantime::format_rfc3339_micros(SystemTime::UNIX_EPOCH + since.min(LAST)).to_string()
}

/// A duration in its two largest units: `7s`, `3m12s`, `5h4m`, `12d3h`.
pub fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rfc3339_within_its_years() {
        let time = SystemTime::UNIX_EPOCH + Duration::from_micros(1_795_226_716_000_042);
        assert_eq!(rfc3339(time), "2026-11-21T02:05:16.000042Z");
        assert_eq!(
            rfc3339(SystemTime::UNIX_EPOCH - Duration::from_secs(1)),
            "1970-01-01T00:00:00.000000Z"
        );
        assert_eq!(rfc3339(SystemTime::UNIX_EPOCH + 2 * LAST), "9999-12-31T23:59:59.000000Z");
    }

    #[test]
    fn durations_have_their_two_largest_units() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (61, "1m1s"),
            (3599, "59m59s"),
            (7260, "2h1m"),
            (90_000, "1d1h"),
        ] {
            assert_eq!(span(Duration::from_secs(seconds)), text);
        }
    }
}
