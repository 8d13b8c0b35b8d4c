//! Mount options of overlay file systems.

use std::path::PathBuf;

/// Makes the lower directories of an overlay relative to their common parent directory, and returns
/// that; `None`: there is none.
pub fn shorten(data: &mut [String]) -> Option<PathBuf> {
    let option = data.iter_mut().find(|option| option.starts_with("lowerdir="))?;
    let dirs: Vec<&str> = option.strip_prefix("lowerdir=")?.split(':').collect();
    let (first, rest) = dirs.split_first()?;
    let same = rest.iter().fold(first.len(), |same, dir| {
        let equal = first.bytes().zip(dir.bytes()).take_while(|(a, b)| a == b).count();
        same.min(equal)
    });
    let end = first.get(..same)?.rfind('/')?;
    let common = first.get(..end).filter(|common| !common.is_empty())?.to_owned();
    let relative: Vec<&str> = dirs.iter().filter_map(|dir| dir.get(end + 1..)).collect();
    if relative.iter().any(|dir| dir.is_empty()) {
        return None;
    }
    let shortened = format!("lowerdir={}", relative.join(":"));
    *option = shortened;
    Some(common.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(all: &[&str]) -> Vec<String> {
        all.iter().map(|one| (*one).to_owned()).collect()
    }

    #[test]
    fn many_lower_directories_become_relative() {
        let mut data = strings(&["upperdir=/u", "lowerdir=/var/s/12/fs:/var/s/1/fs:/var/s/13/fs"]);
        assert_eq!(shorten(&mut data), Some("/var/s".into()));
        assert_eq!(data, ["upperdir=/u", "lowerdir=12/fs:1/fs:13/fs"]);
        let mut apart = strings(&["lowerdir=/a/b:/c/d"]);
        assert_eq!(shorten(&mut apart), None);
        assert_eq!(apart, ["lowerdir=/a/b:/c/d"]);
    }
}
