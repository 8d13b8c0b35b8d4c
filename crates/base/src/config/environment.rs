//! Variables of the environment that an operator sets for shims.

use std::collections::BTreeMap;

use super::value::SettingValue;

/// Variables of the runtime-v2 protocol, which describe the node to a shim: the sandboxer alone
/// sets them.
const PROTOCOL: [&str; 4] = ["TTRPC_ADDRESS", "GRPC_ADDRESS", "NAMESPACE", "MAX_SHIM_VERSION"];

/// Variables by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Variables(pub BTreeMap<String, String>);

impl Variables {
    /// As `NAME=value`, in the order of their names.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(name, value)| format!("{name}={value}"))
    }

    fn add(&mut self, text: &str) -> Result<(), String> {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_name =
            |name: &str| name.chars().all(word) && name.starts_with(|c: char| !c.is_ascii_digit());
        let Some((name, value)) = text.split_once('=').filter(|(name, _)| is_name(name)) else {
            return Err(format!("{text:?} is not NAME=value"));
        };
        if value.contains(char::is_control) {
            return Err(format!("{text:?} has a control character"));
        }
        if PROTOCOL.contains(&name) {
            return Err(format!("{name} is set by the sandboxer"));
        }
        if self.0.insert(name.to_owned(), value.to_owned()).is_some() {
            return Err(format!("{name} is set twice"));
        }
        Ok(())
    }
}

impl SettingValue for Variables {
    const KIND: &'static str = "a list of NAME=value";
    type Form = Vec<String>;

    fn check(texts: Vec<String>) -> Result<Self, String> {
        let mut variables = Self::default();
        texts.iter().try_for_each(|text| variables.add(text))?;
        Ok(variables)
    }

    fn form(&self) -> Vec<String> {
        self.lines().collect()
    }

    /// One variable, as it is: a value may have commas.
    fn from_flag(text: &str) -> Result<Self, String> {
        Self::check(Vec::from_iter((!text.is_empty()).then(|| text.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    fn flag(text: &str) -> Result<Vec<String>, String> {
        let flags = [("shim_env".to_owned(), text.to_owned())];
        let config = super::super::Config::parse(std::path::Path::new("c"), "", &flags);
        let reason = |e: super::super::ConfigError| e.to_string().replace("--shim-env: ", "");
        config.map(|config| config.shim_env.lines().collect()).map_err(reason)
    }

    #[test]
    fn variables_are_names_with_values() {
        for (text, lines) in [
            ("", &[][..]),
            ("[]", &[]),
            ("SCHED_CORE=1", &["SCHED_CORE=1"]),
            ("A=b, c=[d]", &["A=b, c=[d]"]),
            ("A=", &["A="]),
            ("[\"_B9=x=y\", 'A=\"é']", &["A=\"é", "_B9=x=y"]),
        ] {
            let variables = flag(text).unwrap();
            assert_eq!(variables, lines, "{text}");
            let list = serde_json::to_string(&variables).unwrap();
            assert_eq!(flag(&list), Ok(variables), "{text}");
        }
        for (text, fault) in [
            ("A", "\"A\" is not NAME=value"),
            ("=b", "\"=b\" is not NAME=value"),
            ("9A=b", "\"9A=b\" is not NAME=value"),
            ("A B=c", "\"A B=c\" is not NAME=value"),
            ("A=b\0c", "\"A=b\\0c\" has a control character"),
            ("[\"A=b\", \"A=c\"]", "A is set twice"),
            ("[\"A=b\", 1]", "invalid value \"[\\\"A=b\\\", 1]\": must be a list of NAME=value"),
            ("NAMESPACE=x", "NAMESPACE is set by the sandboxer"),
        ] {
            assert_eq!(flag(text).unwrap_err(), fault, "{text}");
        }
    }
}
