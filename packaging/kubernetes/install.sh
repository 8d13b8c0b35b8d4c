#!/bin/sh
# Installs the sandboxer on the node of this container, or removes it. The DaemonSets of installer/
# and uninstaller/ run this script.
#
# usage: install.sh install | uninstall | ready
#
# install     places programs, units and drop-in, starts the daemon, restarts containerd, labels the
#             node, and sleeps
# uninstall   waits until no pod has a sandbox of this daemon, removes the label and the placed
#             files, and sleeps
# ready       succeeds if the node's sandboxer answers
#
# The script does not change a node with the Debian package.
#
# HOST is the mount point of the node's root, DIST the directory of the files to install. ON_HOST
# runs a command on the node. EVERY is the polling interval in seconds.
set -eu

host=${HOST-/host}
dist=${DIST:-/dist}
on_host=${ON_HOST-nsenter --target 1 --mount --uts --ipc --net --pid --}
edit=${EDIT_CONTAINERD_CONFIG:-true}
every=${EVERY:-30}
label=pause-sandboxer/ready

program=/usr/local/bin/pause-sandboxer
# The daemon looks for it in its own directory.
shim=/usr/local/bin/pause-sandboxer-runc-shim
packaged=/usr/bin/pause-sandboxer
units=/etc/systemd/system
drop_in=/etc/containerd/conf.d/pause-sandboxer.toml
config=/etc/containerd/config.toml
kubelet=/var/lib/kubelet/config.yaml
# Exists from the first change of a file until the services that read the files have been restarted,
# so that the next run completes an interrupted installation.
unfinished=/var/lib/pause-sandboxer.unfinished
state=/run/pause-sandboxer
records=$state/sandboxes

say() { echo "install.sh: $*"; }
die() { say "$*" >&2; exit 1; }
# shellcheck disable=SC2086 # a list of words
node() { $on_host "$@"; }
forever() { [ -n "${ONCE-}" ] || while :; do sleep 3600 & wait $!; done; }

begin() {
    mkdir -p "$(dirname "$host$unfinished")"
    : >"$host$unfinished" || die "cannot write $unfinished"
}

# place FILE PATH MODE: replaces PATH by rename, because the old program may be running. Succeeds if
# the file changed.
place() {
    cmp -s "$1" "$host$2" && return 1
    begin
    mkdir -p "$(dirname "$host$2")"
    install -m "$3" "$1" "$host$2.new" ||
        die "cannot write $2: with a read-only $(dirname "$2"), use an image with the sandboxer"
    mv "$host$2.new" "$host$2" || die "cannot rename $2.new to $2"
    say "placed $2"
}

# Prints SystemdCgroup of the node's default handler, from which kubelet takes its cgroup driver, or
# of runc if this handler is the default. Prints nothing if containerd does not show its config.
default_driver() {
    node containerd --config $config config dump 2>/dev/null | awk '
        { gsub(/[ \t"\047]/, "") }
        /^\[/ {
            section = $0
            sub(/\].*/, "", section)
            sub(/^\[plugins\.io\.containerd\.cri\.v1\.runtime\.containerd/, "", section)
        }
        section == "" && /^default_runtime_name=/ { sub(/^[^=]*=/, ""); default_name = $0 }
        /^SystemdCgroup=/ { sub(/^[^=]*=/, ""); set[section] = $0 }
        END {
            if (default_name == "" || default_name == "runc-pause") default_name = "runc"
            print set[".runtimes." default_name ".options"]
        }'
}

# Prints the drop-in for this node. Its handler has the cgroup driver of the default handler, or
# else that of kubelet's own config (`systemd` with kubeadm).
drop_in_of_node() {
    driver=$(default_driver)
    systemd="^cgroupDriver:[[:space:]]*[\"']?systemd[\"']?[[:space:]]*(#.*)?\$"
    if [ -z "$driver" ] && grep -Eqs "$systemd" "$host$kubelet"; then
        driver=true
    fi
    if [ "$driver" = true ]; then
        sed -e 's/^#\(\[plugins.*\.runc-pause\.options\]\)$/\1/' \
            -e 's/^#\(SystemdCgroup = true\)$/\1/' "$dist/pause-sandboxer.toml"
    else
        cat "$dist/pause-sandboxer.toml"
    fi
}

# mark VALUE: labels the node; null removes the label. kubelet also uses the label: when it restarts
# on a node without it, it terminates the running pods of the RuntimeClass. Therefore a node with
# such pods keeps its label.
mark() {
    [ -n "${KUBERNETES_SERVICE_HOST-}" ] || return 0
    account=/var/run/secrets/kubernetes.io/serviceaccount
    curl --silent --show-error --fail --max-time 30 --cacert $account/ca.crt \
        -H "Authorization: Bearer $(cat $account/token)" \
        -H 'Content-Type: application/merge-patch+json' -X PATCH \
        -d "{\"metadata\":{\"labels\":{\"$label\":$1}}}" \
        "https://$KUBERNETES_SERVICE_HOST:${KUBERNETES_SERVICE_PORT-443}/api/v1/nodes/$NODE_NAME" \
        >/dev/null || die "cannot label node $NODE_NAME"
}

# Succeeds if the node's sandboxer is the Debian package's. This is not a failure of the script,
# because a DaemonSet's update stops at a node whose pod fails.
is_packaged() {
    [ -e "$host$packaged" ] || return 1
    say "this node has the Debian package: upgrade or remove the package; nothing is changed here"
}

install_all() {
    ! is_packaged || return 0
    changed='' containerd=''
    # The progress of an interrupted installation is unknown.
    if [ -e "$host$unfinished" ]; then
        say "completing an interrupted installation"
        changed=1 containerd=1
    fi
    place "$dist/pause-sandboxer-runc-shim" $shim 0755 && changed=1
    place "$dist/pause-sandboxer" $program 0755 && changed=1
    for unit in pause-sandboxer.service pause-sandboxer.socket; do
        place "$dist/$unit" $units/$unit 0644 && changed=1
    done
    made=$(mktemp)
    drop_in_of_node >"$made"
    place "$made" $drop_in 0644 && containerd=1
    rm "$made"
    if [ -n "$changed" ]; then
        node systemctl daemon-reload
        node systemctl enable --now pause-sandboxer.socket
        node systemctl enable pause-sandboxer.service
        # Pods outlive it, and callers wait on the socket.
        node systemctl restart pause-sandboxer.service
    fi
    if ! grep -qs '^imports' "$host$config"; then
        if [ "$edit" = true ]; then
            begin
            [ -e "$host$config" ] || echo 'version = 3' >"$host$config"
            cp -p "$host$config" "$host$config.before-pause-sandboxer"
            sed '1i imports = ["/etc/containerd/conf.d/*.toml"]' \
                "$host$config.before-pause-sandboxer" >"$host$config.new"
            mv "$host$config.new" "$host$config"
            say "$config now imports /etc/containerd/conf.d; backup: $config.before-pause-sandboxer"
            containerd=1
        else
            say "$config imports nothing: add this line to it and restart containerd:"
            say "imports = [\"/etc/containerd/conf.d/*.toml\"]"
        fi
    fi
    if [ -n "$containerd" ] && [ "$edit" = true ]; then
        node systemctl restart containerd
    fi
    rm -f "$host$unfinished"
    if ! node $program check; then
        if running=$(pods) && [ -z "$running" ]; then
            mark '"false"'
            die "check failed (see above); the node has the label $label=false and gets no pods"
        fi
        say "check failed (see above); cordon the node"
        die "the label is unchanged: a kubelet that restarts without it terminates running pods"
    fi
    mark '"true"'
    say "done"
}

# Prints the pods with a sandbox of this daemon. If the daemon does not answer, because it is down
# or recovers its pods, prints its records.
pods() {
    if listed=$(node $program list); then
        echo "$listed" | tail -n +2
    elif [ -d "$host$records" ]; then
        find "$host$records" -mindepth 1 -maxdepth 1 -printf '%f (the daemon does not answer)\n'
    fi
}

# Prints the files that make the handler the node's default. containerd does not serve CRI with an
# unknown default handler.
defaults() {
    default="^[^#]*default_runtime_name[\"']?[[:space:]]*=[[:space:]]*[\"']runc-pause[\"']"
    for file in "$host$config" "$host${drop_in%/*}"/*.toml; do
        if grep -Eqs "$default" "$file"; then
            echo "${file#"$host"}"
        fi
    done
}

wait_for_pods() {
    while alive=$(pods) || die "cannot read $records"; [ -n "$alive" ]; do
        say "waiting for the end of these pods; delete or drain them"
        say "(a cordon, or the deletion of the RuntimeClass, prevents new ones):"
        echo "$alive"
        sleep "$every"
    done
}

uninstall_all() {
    ! is_packaged || return 0
    while made_default=$(defaults); [ -n "$made_default" ]; do
        say "waiting: runc-pause is the node's default handler"
        say "remove default_runtime_name from these files and restart containerd:"
        echo "$made_default"
        sleep "$every"
    done
    # Without the daemon kubelet cannot remove them.
    while
        wait_for_pods
        mark null
        # A pod may have arrived before the label was removed.
        alive=$(pods) || die "cannot read $records"
        [ -n "$alive" ]
    do
        mark '"true"'
    done
    node systemctl disable --now pause-sandboxer.socket pause-sandboxer.service || :
    rm -f "$host$drop_in" "$host$program" "$host$shim" "$host$unfinished" \
        "$host$units/pause-sandboxer.service" "$host$units/pause-sandboxer.socket"
    # It has no records, so the only mount can be the directory of the records, of a killed daemon.
    # Removed on the node: this container has a copy of the mount, which would keep the directory.
    node umount $records 2>/dev/null || :
    node rm -rf --one-file-system $state || say "cannot remove $state"
    node systemctl daemon-reload
    [ "$edit" != true ] || node systemctl restart containerd
    say "done; $config still imports /etc/containerd/conf.d, which has no effect"
}

case ${1-} in
# Not with `&&`: `set -e` ignores failures on its left side.
install) install_all; forever ;;
uninstall) uninstall_all; forever ;;
ready)
    [ ! -e "$host$packaged" ] || program=$packaged
    node $program list >/dev/null
    ;;
*) sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2 ;;
esac
