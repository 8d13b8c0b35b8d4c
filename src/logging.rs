//! Log lines on standard error, text or JSON, with the sandbox id and other facts as fields. A line
//! that names a sandbox has its pod as well, and one that a call has set off the call's trace
//! (`crate::log_context`).
//!
//! Modules log by the `log` crate: `log::info!(sandbox = id; "ready")`. Messages of other crates
//! are shown from `warn` on, since theirs at `info` are about connections, not pods.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::OnceLock;
use std::time::SystemTime;

use log::kv::{Key, VisitSource};
use log::{Level, LevelFilter, Log, Metadata, Record};
use serde_json::{Map, Value};

use crate::config::{Config, LogFormat};
use crate::log_context;
use crate::time::rfc3339;

/// The target of this crate's own messages, library and program.
const OWN_TARGET: &str = "pause_sandboxer";

/// Other crates' messages are shown from this level on.
const FOREIGN_LEVEL: LevelFilter = LevelFilter::Warn;

/// Logs its errors without a subject, and returns them as well: they are logged with sandbox and
/// step.
const SILENT_TARGET: &str = "ttrpc";

static LOGGER: OnceLock<Logger> = OnceLock::new();

/// Begins logging as `config` says.
///
/// # Errors
/// Logging has begun already.
pub fn init(config: &Config) -> Result<(), String> {
    log::set_max_level(config.log_level);
    let logger = LOGGER.get_or_init(|| Logger { format: config.log_format });
    log::set_logger(logger).map_err(|e| e.to_string())
}

/// The level from which messages of a target are shown, unless the configured one is lower.
fn level_of(target: &str) -> LevelFilter {
    if target.starts_with(OWN_TARGET) {
        LevelFilter::Trace
    } else if target.starts_with(SILENT_TARGET) {
        LevelFilter::Off
    } else {
        FOREIGN_LEVEL
    }
}

struct Logger {
    format: LogFormat,
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= level_of(metadata.target()).min(log::max_level())
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = line(self.format, SystemTime::now(), record);
            // No destination is left when standard error is closed.
            let _ = std::io::stderr().lock().write_all(line.as_bytes());
        }
    }

    fn flush(&self) {}
}

/// The fields of a record, as JSON values in their order.
#[derive(Default)]
struct LineFields(Vec<(String, Value)>);

impl LineFields {
    /// Adds the pod of the sandbox that the line is about, and the trace of what is at work.
    fn complete(&mut self) {
        let sandbox =
            self.0.iter().find(|(key, _)| key == "sandbox").and_then(|(_, id)| id.as_str());
        let (pod, followed) = sandbox.and_then(log_context::of_sandbox).unzip();
        if let Some(pod) = pod.filter(|pod| !pod.name.is_empty()) {
            self.0.push(("pod".to_owned(), pod.name.into_string().into()));
            self.0.push(("namespace".to_owned(), pod.namespace.into_string().into()));
        }
        if let Some(trace) = log_context::current().or(followed.flatten()) {
            self.0.push(("trace".to_owned(), trace.to_string().into()));
        }
    }
}

impl<'kvs> VisitSource<'kvs> for LineFields {
    fn visit_pair(
        &mut self,
        key: Key<'kvs>,
        value: log::kv::Value<'kvs>,
    ) -> Result<(), log::kv::Error> {
        let json = value.to_bool().map(Value::from);
        let json = json
            .or_else(|| value.to_u64().map(Value::from))
            .or_else(|| value.to_i64().map(Value::from));
        let json = json.or_else(|| value.to_f64().map(Value::from));
        self.0.push((key.as_str().to_owned(), json.unwrap_or_else(|| value.to_string().into())));
        Ok(())
    }
}

/// One line for `record`, with its line feed. Whatever the message holds, it stays one line.
fn line(format: LogFormat, now: SystemTime, record: &Record<'_>) -> String {
    let mut fields = LineFields::default();
    // Our visitor does not fail; a source that does has given what it could.
    let _ = record.key_values().visit(&mut fields);
    fields.complete();
    let (time, message) = (rfc3339(now), record.args().to_string());
    match format {
        LogFormat::Json => {
            let mut object = Map::new();
            for (key, value) in fields.0 {
                object.insert(key, value);
            }
            // Inserted last: a field of the same name must not hide them.
            object.insert("time".to_owned(), time.into());
            object.insert("level".to_owned(), level_name(record.level()).into());
            object.insert("target".to_owned(), record.target().into());
            object.insert("message".to_owned(), message.into());
            format!("{}\n", visible(&Value::Object(object)))
        }
        LogFormat::Text => {
            let mut line =
                format!("{time} {:5} {}", level_name(record.level()), one_line(&message));
            for (key, value) in fields.0 {
                let text = match &value {
                    Value::String(text) if plain(text) => text.clone(),
                    other => visible(other),
                };
                // Writing to a String cannot fail.
                let _ = write!(line, " {key}={text}");
            }
            line.push('\n');
            line
        }
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    }
}

/// Whether a field's text is clear without quotes.
fn plain(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic() && !matches!(c, '"' | '=' | '\\'))
}

/// Whether a terminal or log viewer may interpret a character instead of showing it: control
/// characters, Unicode line ends, characters that change the text direction, and zero-width
/// characters.
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}')
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// A value as JSON, in which everything is shown and nothing obeyed. Such characters are in strings
/// alone.
fn visible(value: &Value) -> String {
    let json = value.to_string();
    if !json.contains(is_obeyed) {
        return json;
    }
    json.chars().fold(String::with_capacity(json.len()), |mut shown, c| {
        if is_obeyed(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a String cannot fail.
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(c);
        }
        shown
    })
}

/// The text with what would be obeyed escaped, so that no caller's bytes forge a second line.
fn one_line(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut line, c| {
        if is_obeyed(c) {
            line.extend(c.escape_default())
        } else {
            line.push(c)
        }
        line
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn shown(format: LogFormat, message: &str, fields: &[(&str, log::kv::Value<'_>)]) -> String {
        let time = SystemTime::UNIX_EPOCH + Duration::from_micros(1_795_226_716_000_042);
        let args = format_args!("{message}");
        let record =
            Record::builder().args(args).level(Level::Warn).target("t").key_values(&fields).build();
        line(format, time, &record)
    }

    #[test]
    fn text_line_shows_time_level_message_and_fields() {
        let fields = [
            ("sandbox", "abc".into()),
            ("n", 3.into()),
            ("reason", "a \"b\"".into()),
            ("empty", "".into()),
        ];
        assert_eq!(
            shown(LogFormat::Text, "gone", &fields),
            "2026-11-21T02:05:16.000042Z warn  gone sandbox=abc n=3 reason=\"a \\\"b\\\"\" \
             empty=\"\"\n"
        );
    }

    #[tokio::test]
    async fn a_line_of_a_sandbox_names_pod_and_trace() {
        let pod = log_context::PodNames {
            name: "web 0".into(),
            namespace: "prod".into(),
            ..Default::default()
        };
        let subject = log_context::LogContext::new("logging-test".try_into().unwrap(), pod);
        let trace = |digit: &str| {
            log_context::TraceId::of_traceparent(&format!(
                "00-{}-00f067aa0ba902b7-01",
                digit.repeat(32)
            ))
        };
        subject.follow(trace("1"));
        let fields = [("sandbox", "logging-test".into())];
        let end = |line: String| line.split_once(" sandbox=logging-test ").unwrap().1.to_owned();
        let expected = format!("pod=\"web 0\" namespace=prod trace={}\n", "1".repeat(32));
        assert_eq!(end(shown(LogFormat::Text, "x", &fields)), expected);
        let line =
            log_context::within(trace("2"), async { shown(LogFormat::Text, "x", &fields) }).await;
        assert_eq!(end(line), expected.replace('1', "2"), "the call's own goes first");
        subject.follow(None);
        let json: Value = serde_json::from_str(&shown(LogFormat::Json, "x", &fields)).unwrap();
        assert_eq!(
            (&json["pod"], &json["namespace"], &json["trace"]),
            (&"web 0".into(), &"prod".into(), &Value::Null)
        );
        drop(subject);
        assert!(shown(LogFormat::Text, "x", &fields).ends_with(" sandbox=logging-test\n"));
    }

    /// Promise: log_lines_cannot_be_forged.
    #[test]
    fn a_line_stays_one_line() {
        let fields = [("sandbox", "a\nb".into())];
        let text = shown(LogFormat::Text, "x\n2026 forged\u{1b}[2J", &fields);
        assert_eq!(text.matches('\n').count(), 1, "{text}");
        assert!(!text.contains('\u{1b}'));
        assert_eq!(shown(LogFormat::Json, "x\ny", &fields).matches('\n').count(), 1);
    }

    /// Promise: log_lines_cannot_be_forged.
    #[test]
    fn what_a_viewer_would_obey_is_escaped() {
        let hostile =
            "a\u{7f}\u{85}\u{9b}31m\u{2028}x\u{2029}y\u{202e}z\u{2066}\u{200b}\u{feff}\u{e0041}é";
        for format in [LogFormat::Text, LogFormat::Json] {
            let line = shown(format, hostile, &[("reason", hostile.into())]);
            let obeyed: Vec<char> =
                line.trim_end_matches('\n').chars().filter(|c| is_obeyed(*c)).collect();
            assert!(obeyed.is_empty(), "{obeyed:?} in {line}");
            assert_eq!(line.matches('é').count(), 2, "what is harmless stays readable: {line}");
        }
        let json: Value =
            serde_json::from_str(&shown(LogFormat::Json, hostile, &[("reason", hostile.into())]))
                .unwrap();
        assert_eq!(
            (&json["message"], &json["reason"]),
            (&hostile.into(), &hostile.into()),
            "and can be read back"
        );
        let text = shown(LogFormat::Text, "a\u{2028}b", &[("reason", "c\u{9b}d".into())]);
        assert!(text.contains(r"a\u{2028}b reason=") && text.contains(r#""c\u009bd""#), "{text}");
    }

    #[test]
    fn json_line_keeps_types_and_its_own_keys() {
        let fields = [
            ("sandbox", "abc".into()),
            ("n", 3.into()),
            ("yes", true.into()),
            ("level", "forged".into()),
        ];
        let json: Value =
            serde_json::from_str(&shown(LogFormat::Json, "gone \"x\"", &fields)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "time": "2026-11-21T02:05:16.000042Z", "level": "warn", "target": "t",
                "message": "gone \"x\"",
                "sandbox": "abc", "n": 3, "yes": true
            })
        );
    }

    #[test]
    fn levels_of_own_and_other_crates() {
        for (target, level) in [
            ("pause_sandboxer::wire", LevelFilter::Trace),
            ("h2::codec", FOREIGN_LEVEL),
            ("ttrpc::asynchronous", LevelFilter::Off),
        ] {
            assert_eq!(level_of(target), level, "{target}");
        }
    }
}
