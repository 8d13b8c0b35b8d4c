#!/bin/sh
# Installs the sandboxer on the node of this container, or removes it. The DaemonSets of installer/
# and uninstaller/ run rollout.sh, which runs this script.
#
# usage: install.sh install | unneeded | uninstall | ready
#
# install     places programs and units, starts the daemon, also one that was stopped or disabled,
#             adds its handler to containerd's config (`pause-sandboxer enable --restart`), labels
#             the node, and sleeps
# unneeded    succeeds if no pod has a sandbox of this daemon and the node's default handler is of
#             another sandboxer; otherwise says what needs this one, with the status 75
# uninstall   removes the label, the handler (`pause-sandboxer disable --restart`) and the placed
#             files, and sleeps; changes nothing and has the status 75 unless it is unneeded
# ready       succeeds if the node's sandboxer answers, or is that of a package
#
# The script does not change a node with the Debian or RPM package.
#
# HOST is the mount point of the node's root, DIST the directory of the files to install. ON_HOST
# runs a command on the node. ENABLE_OPTIONS are options of `pause-sandboxer enable`, such as
# `--default`: without them the script undoes these options of an earlier command. It makes the
# handler the default only if `check` succeeds without that, and undoes it if `check` fails. With
# EDIT_CONTAINERD_CONFIG=false an operator runs `enable` and `disable`: the script prints what they
# would change, and fails until they have run.
set -eu

host=${HOST-/host}
dist=${DIST:-/dist}
on_host=${ON_HOST-nsenter --target 1 --mount --uts --ipc --net --pid --}
edit=${EDIT_CONTAINERD_CONFIG:-true}
account=${ACCOUNT:-/var/run/secrets/kubernetes.io/serviceaccount}
label=pause-sandboxer/ready

program=/usr/local/bin/pause-sandboxer
# The daemon looks for it in its own directory.
shim=/usr/local/bin/pause-sandboxer-runc-shim
packaged=/usr/bin/pause-sandboxer
units=/etc/systemd/system
# Exists from the first change of a file until the daemon has been restarted, so that the next run
# completes an interrupted installation. `enable` completes an interrupted `enable`.
unfinished=/var/lib/pause-sandboxer.unfinished
# Exists from before a removal removes the label, or a failed check sets it to `false`, until it is
# certain that no pod has arrived meanwhile, or the node has the label again.
unlabelled=/var/lib/pause-sandboxer.unlabelled
state=/run/pause-sandboxer
needed=75

say() { echo "install.sh: $*"; }
die() { say "$*" >&2; exit 1; }
# shellcheck disable=SC2086 # a list of words
node() { $on_host "$@"; }
forever() { [ -n "${ONCE-}" ] || while :; do sleep 3600 & wait $!; done; }

# begin MARKER
begin() {
    mkdir -p "$(dirname "$host$1")"
    # A shell exits when a redirection of its built-in `:` fails.
    (: >"$host$1") || die "cannot write $1"
}

# place FILE PATH MODE: replaces PATH by rename, because the old program may be running. Succeeds if
# the file changed.
place() {
    cmp -s "$1" "$host$2" && return 1
    begin $unfinished
    mkdir -p "$(dirname "$host$2")"
    install -m "$3" "$1" "$host$2.new" ||
        die "cannot write $2: with a read-only $(dirname "$2"), use an image with the sandboxer"
    mv "$host$2.new" "$host$2" || die "cannot rename $2.new to $2"
    say "placed $2"
}

# mark VALUE: labels the node; null removes the label. kubelet also uses the label: when it restarts
# on a node without it, it terminates the running pods of the RuntimeClass. Therefore a node with
# such pods keeps its label.
mark() {
    [ -n "${KUBERNETES_SERVICE_HOST-}" ] || return 0
    server=$KUBERNETES_SERVICE_HOST
    # kubelet sets a bare IPv6 address; in a URL it has brackets.
    case $server in *:*) server="[$server]" ;; esac
    # curl reads the token from stdin, because every user of the node can read its arguments.
    printf 'Authorization: Bearer %s\n' "$(cat "$account/token")" |
        curl --silent --show-error --fail --max-time 30 --cacert "$account/ca.crt" \
            -H @- -H 'Content-Type: application/merge-patch+json' -X PATCH \
            -d "{\"metadata\":{\"labels\":{\"$label\":$1}}}" \
            "https://$server:${KUBERNETES_SERVICE_PORT-443}/api/v1/nodes/$NODE_NAME" \
            >/dev/null || die "cannot label node $NODE_NAME"
}

# Sets the label again, which pods need.
relabel() {
    [ -e "$host$unlabelled" ] || return 0
    mark '"true"'
    rm -f "$host$unlabelled"
}

# Does so if there are pods, or if that is unknown.
relabel_for_pods() { ! has_pods || relabel; }

# Succeeds if there are pods, or if that is unknown.
has_pods() { has pod || [ $? = 2 ]; }

# Prints what needs the sandboxer, a fact per line that begins with its kind: `pod`, `default`, and
# what does not keep it: `config`, `unread`. Has the status 75 if something needs it; with any other
# status but 0 it is unknown.
needs() {
    if [ -e "$host$program" ]; then
        node $program disable --check
    elif [ -n "$(ls "$host$state/sandboxes" 2>/dev/null)" ]; then
        say "pods have records in $state, but $program is missing: install it again" >&2
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

# Succeeds if the node's sandboxer is that of a package. This is not a failure of the script,
# because a DaemonSet's update stops at a node whose pod fails.
is_packaged() {
    [ -e "$host$packaged" ] || return 1
    say "this node has the package: upgrade or remove the package; nothing is changed here"
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

install_all() {
    ! is_packaged || return 0
    options=${ENABLE_OPTIONS-}
    # Of a command that was interrupted.
    [ ! -e "$host$unlabelled" ] || relabel_for_pods
    changed=''
    # The progress of an interrupted installation is unknown.
    if [ -e "$host$unfinished" ]; then
        say "completing an interrupted installation"
        changed=1
    fi
    place "$dist/pause-sandboxer-runc-shim" $shim 0755 && changed=1
    place "$dist/pause-sandboxer" $program 0755 && changed=1
    for unit in pause-sandboxer.service pause-sandboxer.socket; do
        place "$dist/$unit" $units/$unit 0644 && changed=1
    done
    [ -z "$changed" ] || node systemctl daemon-reload
    # Also without a change: a node whose units are disabled has no daemon after a reboot.
    if ! start_daemon; then
        node $program check || check_failed "; the daemon does not start"
        die "cannot start or enable the daemon's units (see above), although check succeeds"
    fi
    rm -f "$host$unfinished"
    if [ "$edit" != true ]; then
        say "run \`pause-sandboxer enable${options:+ $options} --restart\` on the node,"
        say "which makes these changes:"
        enable "$options" --dry-run
        node $program check || check_failed
    else
        # The default handler serves every pod of the node: it must be one that works. Where it is
        # unknown whether it is the default (status 2), it stays what it is.
        if without_default && { has default; [ $? = 1 ]; }; then
            enable "$others" --restart
            node $program check || check_failed "; the handler is not the node's default"
        fi
        enable "$options" --restart
        node $program check || check_failed
    fi
    mark '"true"'
    rm -f "$host$unlabelled"
    say "done"
}

# enable OPTIONS HOW
enable() {
    # shellcheck disable=SC2086 # a list of words
    node $program enable $1 "$2" || die "cannot add the handler to containerd"
}

# Sets `others` to the options of `enable` without `--default`. Succeeds if they have it.
without_default() {
    others=
    for option in $options; do
        [ "$option" = --default ] || others="$others${others:+ }$option"
    done
    case " $options " in *' --default '*) return 0 ;; *) return 1 ;; esac
}

# check_failed [MORE]: undoes --default, sets the label and ends the script.
check_failed() {
    say "check failed (see above)${1-}" >&2
    # Sets `others`; an earlier command may have had --default.
    without_default || :
    if [ "$edit" = true ] && { has default || [ $? = 2 ]; }; then
        say "undoing --default"
        # Whether it succeeds or not: the label is set.
        if (enable "$others" --restart); then
            say "--default is undone" >&2
        else
            say "--default is not undone (see above)" >&2
        fi
    fi
    if ! has_pods; then
        # On a full disk the label matters more.
        (begin $unlabelled) || :
        mark '"false"'
        # A pod may have arrived before the label changed.
        if ! has_pods; then
            rm -f "$host$unlabelled"
            die "the node has the label $label=false and gets no pods of the RuntimeClass"
        fi
        # Also without the marker.
        mark '"true"'
        rm -f "$host$unlabelled"
        say "cordon the node"
        say "a pod arrived: without the label a kubelet that restarts terminates it" >&2
        die "the node has the label $label=true"
    fi
    say "cordon the node"
    die "the label is unchanged: a kubelet that restarts without it terminates running pods"
}

# Ends the script if something needs the sandboxer, or if that is unknown.
exit_if_needed() {
    status=0
    facts=$(needs) || status=$?
    [ $status != 0 ] || return 0
    if [ $status != $needed ]; then
        relabel
        die "it is unknown what needs the sandboxer (see above)"
    fi
    ! printf '%s\n' "$facts" | grep -q '^pod: ' || relabel
    say "waiting for what needs the sandboxer: delete or drain the pods (remove runtimeClassName"
    say "from their workloads first, or cordon the node), and undo a default handler:"
    echo "$facts"
    exit $needed
}

# Removes the handler from containerd's config, or fails until an operator has done so: containerd
# must not have a handler without a program.
remove_handler() {
    if [ "$edit" = true ]; then
        node $program disable --restart || die "cannot remove the handler from containerd"
        return 0
    fi
    left=$(needs) || die "cannot read containerd's config, or it is needed again (see above)"
    [ -n "$left" ] || return 0
    say "containerd's config has the handler:"
    echo "$left"
    die "run \`pause-sandboxer disable --restart\` on the node; nothing is removed until then"
}

uninstall_all() {
    ! is_packaged || return 0
    # Without the daemon kubelet cannot remove them.
    exit_if_needed
    begin $unlabelled
    mark null
    # A pod may have arrived before the label was removed.
    exit_if_needed
    # An interrupted removal has no program.
    if [ -e "$host$program" ] && ! (remove_handler); then
        # A pod that arrived meanwhile keeps its label.
        relabel_for_pods
        exit 1
    fi
    node systemctl disable --now pause-sandboxer.socket pause-sandboxer.service || :
    for path in $program $shim $units/pause-sandboxer.service $units/pause-sandboxer.socket; do
        # `.new` is of an interrupted installation.
        rm -f "$host$path" "$host$path.new"
    done
    # It has no records, so the only mount can be the directory of the records, of a killed daemon.
    # Removed on the node: this container has a copy of the mount, which would keep the directory.
    node umount $state/sandboxes 2>/dev/null || :
    node rm -rf --one-file-system $state || say "cannot remove $state"
    node systemctl daemon-reload
    rm -f "$host$unfinished" "$host$unlabelled"
    say "done"
}

case ${1-} in
# Not with `&&`: `set -e` ignores failures on its left side.
install) install_all; forever ;;
unneeded) is_packaged || exit_if_needed ;;
uninstall) uninstall_all; forever ;;
ready)
    # A package's daemon that is stopped must not stop the update of other nodes.
    [ ! -e "$host$packaged" ] || exit 0
    node $program list >/dev/null
    ;;
*) sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2 ;;
esac
