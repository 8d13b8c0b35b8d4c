//! Mount options of overlay file systems.

use std::path::PathBuf;

use containerd_shim_protos::api::Mount;

/// The option of an overlay that is not synced, also when it is unmounted.
pub const VOLATILE: &str = "volatile";

/// Adds the option `volatile` to each overlay that can be written, unless another option says when
/// it is synced.
pub fn make_volatile(mounts: &mut [Mount]) {
    for mount in mounts.iter_mut().filter(|mount| mount.type_ == "overlay") {
        let has = |start: &str| mount.options.iter().any(|option| option.starts_with(start));
        if has("upperdir=") && !has(VOLATILE) && !has("fsync=") {
            mount.options.push(VOLATILE.to_owned());
        }
    }
}

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
    fn overlays_that_can_be_written_become_volatile() {
        let made = |kind: &str, options: &[&str]| {
            let mut mount = Mount::new();
            (mount.type_, mount.options) = (kind.to_owned(), strings(options));
            let mut mounts = [mount.clone(), mount];
            make_volatile(&mut mounts);
            assert_eq!(mounts[0], mounts[1]);
            mounts[0].options.join(",")
        };
        assert_eq!(
            made("overlay", &["upperdir=/u", "workdir=/w"]),
            "upperdir=/u,workdir=/w,volatile"
        );
        for options in [
            &["lowerdir=/a:/b"][..],
            &["upperdir=/u", "volatile"],
            &["upperdir=/u", "fsync=strict"],
        ] {
            assert_eq!(made("overlay", options), options.join(","));
        }
        assert_eq!(made("bind", &["upperdir=/u"]), "upperdir=/u");
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
