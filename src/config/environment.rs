//! Variables of the environment that an operator sets for shims.

use std::collections::BTreeMap;

use toml::de::DeValue;

use super::value::{Input, Value, quoted};

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
            return Err(format!("{text:?} is no NAME=value"));
        };
        if value.contains(char::is_control) {
            return Err(format!("{text:?} has a control character"));
        }
        if PROTOCOL.contains(&name) {
            return Err(format!("{name} is set by the sandboxer"));
        }
        if self.0.insert(name.to_owned(), value.to_owned()).is_some() {
            return Err(format!("{name} is there twice"));
        }
        Ok(())
    }

    fn listed(value: &DeValue<'_>) -> Result<Self, String> {
        let DeValue::Array(array) = value else {
            return Err(Input::Toml(value).refused(Self::KIND));
        };
        let mut variables = Self::default();
        for one in array {
            match one.get_ref() {
                DeValue::String(text) => variables.add(text)?,
                other => return Err(Input::Toml(other).refused("a string")),
            }
        }
        Ok(variables)
    }
}

impl Value for Variables {
    const KIND: &'static str = "a list of NAME=value";

    fn read(input: Input<'_>) -> Result<Self, String> {
        match input {
            Input::Toml(value) => Self::listed(value),
            Input::Text(text) if text.starts_with('[') => {
                let parsed = DeValue::parse(text)
                    .map_err(|e| format!("must be {}: {}", Self::KIND, e.message()))?;
                Self::listed(parsed.get_ref())
            }
            Input::Text("") => Ok(Self::default()),
            // One, as it is: its value may have commas.
            Input::Text(text) => {
                let mut one = Self::default();
                one.add(text)?;
                Ok(one)
            }
        }
    }

    fn to_toml(&self) -> String {
        let texts: Vec<String> = self.lines().map(|line| quoted(&line)).collect();
        format!("[{}]", texts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flag(text: &str) -> Result<Vec<String>, String> {
        Variables::read(Input::Text(text)).map(|variables| variables.lines().collect())
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
            assert_eq!(
                flag(&Variables::read(Input::Text(text)).unwrap().to_toml()),
                Ok(variables),
                "{text}"
            );
        }
        for (text, fault) in [
            ("A", "\"A\" is no NAME=value"),
            ("=b", "\"=b\" is no NAME=value"),
            ("9A=b", "\"9A=b\" is no NAME=value"),
            ("A B=c", "\"A B=c\" is no NAME=value"),
            ("A=b\0c", "\"A=b\\0c\" has a control character"),
            ("[\"A=b\", \"A=c\"]", "A is there twice"),
            ("[\"A=b\", 1]", "must be a string, is 1"),
            ("NAMESPACE=x", "NAMESPACE is set by the sandboxer"),
        ] {
            assert_eq!(flag(text).unwrap_err(), fault, "{text}");
        }
        let number = DeValue::parse("1").unwrap();
        let refused = Variables::read(Input::Toml(number.get_ref()));
        assert_eq!(refused.unwrap_err(), "must be a list of NAME=value, is 1");
    }
}
