#!/bin/sh
# Installs the sandboxer on the node of this container, or removes it. rollout.sh starts the Jobs
# that run this script.
#
# usage: install.sh install | uninstall
#
# install     places programs and units, starts the daemon, also one that was stopped or disabled,
#             adds its handler to containerd's config (`pause-sandboxer enable --restart`), and runs
#             a pod (`pause-sandboxer selftest`); restores the earlier files if the daemon does not
#             start with changed ones
# uninstall   removes the handler (`pause-sandboxer disable --restart`) and the placed files
#
# Exit status, besides 0 and 1:
#   75  a pod needs the sandboxer, or new ones would: nothing is removed
#   76  pods of this sandboxer cannot run on the node
#   77  the node has the Debian or RPM package: nothing is changed
#
# HOST is the mount point of the node's root, DIST the directory of the files to install,
# DIRECTORY the one on the node for the programs. ON_HOST runs a command on the node.
# ENABLE_OPTIONS are options of `pause-sandboxer enable`, such as `--default`: without them the
# script undoes these options of an earlier command. It makes the handler the default only if pods
# can run without that, and undoes it if `check` or the pod fails later. SELFTEST_OPTIONS are
# options of `pause-sandboxer selftest`. SETTINGS is the text of the daemon's config file; without
# it the script leaves the file of an operator alone. With EDIT_CONTAINERD_CONFIG=false an
# operator runs `enable` and `disable`: the script prints what they would change, and fails until
# they have run.
set -eu

host=${HOST-/host}
dist=${DIST:-/dist}
on_host=${ON_HOST-nsenter --target 1 --mount --uts --ipc --net --pid --}
edit=${EDIT_CONTAINERD_CONFIG:-true}
directory=${DIRECTORY:-/usr/local/bin}
options=${ENABLE_OPTIONS-}

packaged=/usr/bin/pause-sandboxer
units=/etc/systemd/system
service=$units/pause-sandboxer.service
settings=/etc/pause-sandboxer/config.toml
# The first line of the settings that this script has written.
ours='# Written by the installer: change the values of the chart.'
# A directory from the first change of a file until the daemon has been restarted, so that the next
# run completes an interrupted installation. It has each file as it was before, empty if there was
# none. `enable` completes an interrupted `enable`.
unfinished=/var/lib/pause-sandboxer.before
state=/run/pause-sandboxer
needed=75
unfit=76
has_package=77

say() { echo "install.sh: $*"; }
die() { say "$*" >&2; exit 1; }
# shellcheck disable=SC2086 # a list of words
node() { $on_host "$@" 9>&-; }

# The directory of the programs that the unit runs, which an earlier installation has placed.
installed() {
    sed -n 's,^ExecStart=\(/.*\)/pause-sandboxer serve$,\1,p' "$host$service" 2>/dev/null
}

# Succeeds if the settings are those of an earlier installation, and not of an operator.
has_settings() { [ "$(head -n 1 "$host$settings" 2>/dev/null)" = "$ours" ]; }

# keep PATH: copies what is there, before it changes. The copy of an interrupted installation stays.
keep() {
    kept=$host$unfinished$1
    now=$host$1
    # As of a unit that is masked; on the node it can lead to another file than here.
    [ ! -L "$now" ] || die "$1 is a link: remove it, or uninstall what has made it"
    [ ! -e "$kept" ] || return 0
    [ -e "$now" ] || now=/dev/null
    mkdir -p "$(dirname "$kept")" && cp -p "$now" "$kept.new" && sync "$kept.new" &&
        mv "$kept.new" "$kept" || die "cannot copy $1 to $unfinished"
}

# Undoes all changes of files since the last complete installation. Succeeds if nothing is left.
restore() {
    paths=$(cd "$host$unfinished" 2>/dev/null && find . -type f ! -name '*.new' | cut -c 2-) || :
    # On a full disk the copies need their space.
    for path in $paths; do rm -f "$host$path.new"; done
    left=
    for path in $paths; do
        kept=$host$unfinished$path
        if [ "$path" = $settings ] && [ -e "$host$path" ] && ! has_settings; then
            continue
        elif [ ! -s "$kept" ]; then
            rm -f "$host$path"
        elif ! cmp -s "$kept" "$host$path" &&
            ! { cp -p "$kept" "$host$path.new" && mv "$host$path.new" "$host$path"; }; then
            rm -f "$host$path.new"
            say "cannot restore $path: copy $unfinished$path there, and restart the daemon" >&2
            left=1
        fi
    done
    [ -z "$paths" ] || node systemctl daemon-reload || :
    [ -z "$left" ] || return 1
    rm -rf "$host$unfinished"
}

# Succeeds if this installation is the first of the node.
is_first() {
    [ -e "$host$unfinished$service" ] && [ ! -s "$host$unfinished$service" ]
}

# place FILE PATH MODE: replaces PATH by rename, because the old program may be running. Succeeds if
# the file changed.
place() {
    cmp -s "$1" "$host$2" && return 1
    keep "$2"
    mkdir -p "$(dirname "$host$2")" && install -m "$3" "$1" "$host$2.new" ||
        die "cannot write $2: if its directory is read-only, set installDirectory of the chart"
    mv "$host$2.new" "$host$2" || die "cannot rename $2.new to $2"
    say "placed $2"
}

# Writes the settings, or removes those of an earlier installation. Succeeds if they changed.
place_settings() {
    if [ -z "${SETTINGS-}" ]; then
        has_settings || return 1
        keep $settings
        rm "$host$settings" || die "cannot remove $settings"
        say "removed $settings"
        return 0
    fi
    [ ! -e "$host$settings" ] || has_settings ||
        die "$settings is not the installer's: move its settings to the chart and delete it"
    printf '%s\n%s\n' "$ours" "$SETTINGS" >"$work/config.toml" || die "cannot write to $work"
    place "$work/config.toml" $settings 0644
}

# Prints what needs the sandboxer, a fact per line that begins with its kind: `pod`, `default`, and
# what does not keep it: `config`, `unread`. Has the status 75 if something needs it; with any other
# status but 0 it is unknown.
needs() {
    if [ -e "$host$directory/pause-sandboxer" ]; then
        node "$directory/pause-sandboxer" disable --check
    elif [ -n "$(ls "$host$state/sandboxes" 2>/dev/null)" ]; then
        say "pods have records in $state, but $directory/pause-sandboxer is missing: install it" >&2
        return 1
    fi
}

# has KIND: succeeds if there is such a fact; has the status 2 if that is unknown.
has() {
    status=0
    facts=$(needs) || status=$?
    [ $status = 0 ] || [ $status = $needed ] || return 2
    printf '%s\n' "$facts" | grep -q "^$1: "
}

# Ends the script if the node's sandboxer is that of a package.
exit_if_packaged() {
    [ -e "$host$packaged" ] || return 0
    say "this node has the package: upgrade or remove the package; nothing is changed here"
    exit $has_package
}

# Starts the daemon and enables its units. A changed file restarts it: pods outlive it, and callers
# wait on the socket.
start_daemon() {
    # systemd does not start a socket while its service runs.
    if ! node systemctl is-active pause-sandboxer.socket >/dev/null; then
        node systemctl stop pause-sandboxer.service || return 1
    fi
    node systemctl enable --now pause-sandboxer.socket &&
        node systemctl enable pause-sandboxer.service &&
        node systemctl "${changed:+re}start" pause-sandboxer.service
}

# Places all files, and sets `changed` if one was not there.
place_all() {
    changed=''
    # The progress of an interrupted installation is unknown.
    if [ -e "$host$unfinished" ]; then
        say "completing an interrupted installation"
        changed=1
    fi
    place_settings && changed=1
    for name in pause-sandboxer-runc-shim pause-sandboxer; do
        place "$dist/$name" "$directory/$name" 0755 && changed=1
    done
    # A node that cannot have the sandboxer, as with containerd 1.x, stays as it was.
    [ -n "$before" ] || (enable "$options" --dry-run) >&2
    sed "s,^ExecStart=pause-sandboxer ,ExecStart=$directory/pause-sandboxer ," \
        "$dist/pause-sandboxer.service" >"$work/service"
    place "$work/service" $service 0644 && changed=1
    place "$dist/pause-sandboxer.socket" $units/pause-sandboxer.socket 0644 && changed=1
    [ -z "$changed" ] || node systemctl daemon-reload
}

install_all() {
    exit_if_packaged
    before=$(installed) || :
    program=$directory/pause-sandboxer
    # Until a daemon runs: without one the pod of another attempt may not start.
    ended=
    trap ended=1 TERM
    trap 'restore || :; rm -rf "$work"' EXIT
    place_all
    trap 'rm -rf "$work"' EXIT
    # Also without a change: a node whose units are disabled has no daemon after a reboot.
    if ! start_daemon; then
        if node "$program" check; then
            die "cannot start or enable the daemon's units (see above), although check succeeds"
        fi
        if is_first; then
            # The files stay, for `check`.
            rm -rf "$host$unfinished"
        elif [ -n "$changed" ]; then
            restore || unfit
            if start_daemon; then
                say "the daemon does not start with the new version or settings (see above, and" >&2
                say "journalctl -u pause-sandboxer on the node); the earlier ones are restored," >&2
                die "and their daemon runs: correct the chart's values, or run helm rollback"
            fi
            say "the earlier files are restored, and their daemon does not start either" >&2
        fi
        unfit "; the daemon does not start: if the handler is the node's default, no pod starts"
    fi
    if [ -n "$before" ] && [ "$before" != "$directory" ]; then
        rm -f "$host$before/pause-sandboxer" "$host$before/pause-sandboxer-runc-shim"
    fi
    # By rename: a later attempt must not restore a part of it.
    rm -rf "$host$unfinished.done"
    [ ! -e "$host$unfinished" ] || mv "$host$unfinished" "$host$unfinished.done"
    rm -rf "$host$unfinished.done"
    trap 'exit 143' TERM
    [ -z "$ended" ] || exit 143
    if [ "$edit" != true ]; then
        say "run \`pause-sandboxer enable${options:+ $options} --restart\` on the node,"
        say "which makes these changes:"
        enable "$options" --dry-run
        runs_pods || is_unfit
    else
        # The default handler serves every pod of the node: it must be one that works. Where it is
        # unknown whether it is the default (status 2), it stays what it is.
        if without_default && { has default; [ $? = 1 ]; }; then
            enable "$others" --restart
            runs_pods || is_unfit "; the handler is not the node's default"
        fi
        enable "$options" --restart
        # A default handler must not stay if it fails.
        trap : TERM
        runs_pods || is_unfit
    fi
    say "done"
}

# enable OPTIONS HOW
enable() {
    # shellcheck disable=SC2086 # a list of words
    node "$program" enable $1 "$2" || die "cannot add the handler to containerd"
}

# Succeeds if pods of this sandboxer can run.
runs_pods() {
    # shellcheck disable=SC2086 # a list of words
    node "$program" check && node "$program" selftest ${SELFTEST_OPTIONS-}
}

# Sets `others` to the options of `enable` without `--default`. Succeeds if they have it.
without_default() {
    others=
    for option in $options; do
        [ "$option" = --default ] || others="$others${others:+ }$option"
    done
    case " $options " in *' --default '*) return 0 ;; *) return 1 ;; esac
}

# unfit [MORE]: ends the script.
unfit() {
    say "pods cannot run (see above)${1-}" >&2
    exit $unfit
}

# is_unfit [MORE]: undoes --default and ends the script.
is_unfit() {
    # Sets `others`; an earlier command may have had --default.
    without_default || :
    if [ "$edit" = true ] && { has default || [ $? = 2 ]; }; then
        say "undoing --default"
        if (enable "$others" --restart); then
            say "--default is undone" >&2
        else
            say "--default is not undone (see above)" >&2
        fi
    fi
    unfit "${1-}"
}

# Ends the script if something needs the sandboxer, or if that is unknown.
exit_if_needed() {
    status=0
    facts=$(needs) || status=$?
    [ $status != 0 ] || return 0
    [ $status = $needed ] || die "it is unknown what needs the sandboxer (see above)"
    say "waiting for what needs the sandboxer: delete or drain the pods (remove runtimeClassName"
    say "from their workloads first, or cordon the node), and undo a default handler:"
    echo "$facts"
    exit $needed
}

# Removes the handler from containerd's config, or fails until an operator has done so: containerd
# must not have a handler without a program.
remove_handler() {
    if [ "$edit" = true ]; then
        node "$directory/pause-sandboxer" disable --restart ||
            die "cannot remove the handler from containerd"
        return 0
    fi
    left=$(needs) || die "cannot read containerd's config, or it is needed again (see above)"
    [ -n "$left" ] || return 0
    say "containerd's config has the handler:"
    echo "$left"
    die "run \`pause-sandboxer disable --restart\` on the node; nothing is removed until then"
}

# Removes what place_all has placed.
remove_files() {
    for path in "$directory/pause-sandboxer" "$directory/pause-sandboxer-runc-shim" $service \
        $units/pause-sandboxer.socket; do
        # `.new` is of an interrupted installation.
        rm -f "$host$path" "$host$path.new"
    done
    ! has_settings || rm -f "$host$settings"
    rm -f "$host$settings.new"
    rm -rf "$host$unfinished" "$host$unfinished.done"
}

uninstall_all() {
    exit_if_packaged
    before=$(installed) || :
    directory=${before:-$directory}
    # Without the daemon kubelet cannot remove them.
    exit_if_needed
    # An interrupted removal has no program.
    [ ! -e "$host$directory/pause-sandboxer" ] || remove_handler
    node systemctl disable --now pause-sandboxer.socket pause-sandboxer.service || :
    remove_files
    # It has no records, so the only mount can be the directory of the records, of a killed daemon.
    # Removed on the node: this container has a copy of the mount, which would keep the directory.
    node umount $state/sandboxes 2>/dev/null || :
    node rm -rf --one-file-system $state || say "cannot remove $state"
    node systemctl daemon-reload
    say "done"
}

case ${1-} in
install | uninstall) ;;
*) sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Ends the script after the command that runs: if the shell ended first, containerd would kill that
# command too. kubelet leaves 180 s for it.
trap 'exit 143' TERM
# The pod of an earlier attempt may still end.
mkdir -p "$host/run"
exec 9>"$host/run/pause-sandboxer.installer"
flock --nonblock 9 || die "another installer works on this node"
"$1_all"
