#!/bin/sh
# Installs the sandboxer on the node that this container runs on, or takes it off again. Run by the DaemonSet of installer/ and uninstaller/.
#
# usage: install.sh install | uninstall | ready
#
# install     puts program, units and drop-in in place, starts the daemon, lets containerd know, labels the node, and sleeps
# uninstall   waits until no pod has its sandbox from here, takes the label away, removes what install put in place, and sleeps
# ready       succeeds if the node's sandboxer answers
#
# A node with the Debian package is left as it is.
#
# HOST is where the node's root is mounted, DIST holds what is installed, ON_HOST runs a command on the node, EVERY is how many seconds there are
# between two looks at what is waited for.
set -eu

host=${HOST-/host}
dist=${DIST:-/dist}
on_host=${ON_HOST-nsenter --target 1 --mount --uts --ipc --net --pid --}
edit=${EDIT_CONTAINERD_CONFIG:-true}
every=${EVERY:-30}
label=pause-sandboxer/ready

program=/usr/local/bin/pause-sandboxer
packaged=/usr/bin/pause-sandboxer
units=/etc/systemd/system
drop_in=/etc/containerd/conf.d/pause-sandboxer.toml
config=/etc/containerd/config.toml
kubelet=/var/lib/kubelet/config.yaml
# There from the first change of a file until all who read them have been restarted: what an interrupted installation leaves to the next.
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

# place FILE PATH MODE: by rename, since the old one may be running. Says whether it was changed.
place() {
    cmp -s "$1" "$host$2" && return 1
    begin
    mkdir -p "$(dirname "$host$2")"
    install -m "$3" "$1" "$host$2.new" || die "cannot write $2: a node with a read-only $(dirname "$2") needs an image that holds the sandboxer"
    mv "$host$2.new" "$host$2" || die "cannot rename $2.new to $2"
    say "placed $2"
}

# SystemdCgroup of the node's default handler, from which kubelet takes its cgroup driver; where that handler is this one, of runc.
# Nothing where containerd does not show its config.
default_driver() {
    node containerd --config $config config dump 2>/dev/null | awk '
        { gsub(/[ \t"\047]/, "") }
        /^\[/ { section = $0; sub(/\].*/, "", section); sub(/^\[plugins\.io\.containerd\.cri\.v1\.runtime\.containerd/, "", section) }
        section == "" && /^default_runtime_name=/ { sub(/^[^=]*=/, ""); default_name = $0 }
        /^SystemdCgroup=/ { sub(/^[^=]*=/, ""); set[section] = $0 }
        END {
            if (default_name == "" || default_name == "runc-pause") default_name = "runc"
            print set[".runtimes." default_name ".options"]
        }'
}

# The drop-in for this node: its handler makes cgroups as the default handler does, or else as kubelet's own config says; `systemd` with kubeadm.
drop_in_of_node() {
    driver=$(default_driver)
    if [ -z "$driver" ] &&
        grep -Eqs "^cgroupDriver:[[:space:]]*[\"']?systemd[\"']?[[:space:]]*(#.*)?\$" "$host$kubelet"; then
        driver=true
    fi
    if [ "$driver" = true ]; then
        sed -e 's/^#\(\[plugins.*\.runc-pause\.options\]\)$/\1/' -e 's/^#\(SystemdCgroup = true\)$/\1/' "$dist/pause-sandboxer.toml"
    else
        cat "$dist/pause-sandboxer.toml"
    fi
}

# mark VALUE: labels the node; null takes the label away. kubelet goes by the label too: when it is restarted on a node without it, it ends the pods
# of the RuntimeClass that run there. So the label is not taken from a node that has any.
mark() {
    [ -n "${KUBERNETES_SERVICE_HOST-}" ] || return 0
    account=/var/run/secrets/kubernetes.io/serviceaccount
    curl --silent --show-error --fail --max-time 30 --cacert $account/ca.crt \
        -H "Authorization: Bearer $(cat $account/token)" -H 'Content-Type: application/merge-patch+json' \
        -X PATCH "https://$KUBERNETES_SERVICE_HOST:${KUBERNETES_SERVICE_PORT-443}/api/v1/nodes/$NODE_NAME" \
        -d "{\"metadata\":{\"labels\":{\"$label\":$1}}}" >/dev/null || die "cannot label node $NODE_NAME"
}

# Whether the node's sandboxer is the Debian package's. No failure: a DaemonSet's update does not go beyond a node whose pod fails.
is_packaged() {
    [ -e "$host$packaged" ] || return 1
    say "the Debian package is installed on this node, which is left as it is: upgrade or remove the package instead"
}

install_all() {
    ! is_packaged || return 0
    changed='' containerd=''
    # It cannot be told how far it came.
    if [ -e "$host$unfinished" ]; then
        say "finishing what was begun"
        changed=1 containerd=1
    fi
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
            sed '1i imports = ["/etc/containerd/conf.d/*.toml"]' "$host$config.before-pause-sandboxer" >"$host$config.new"
            mv "$host$config.new" "$host$config"
            say "$config imports /etc/containerd/conf.d now; as it was it is in $config.before-pause-sandboxer"
            containerd=1
        else
            say "$config imports nothing: add imports = [\"/etc/containerd/conf.d/*.toml\"] and restart containerd"
        fi
    fi
    if [ -n "$containerd" ] && [ "$edit" = true ]; then
        node systemctl restart containerd
    fi
    rm -f "$host$unfinished"
    if ! node $program check; then
        if running=$(pods) && [ -z "$running" ]; then
            mark '"false"'
            die "see above; the node is labelled $label=false, and gets no pods"
        fi
        die "see above; the label of the node is left as it was, since a kubelet that is restarted without it ends the pods that run: cordon the node"
    fi
    mark '"true"'
    say "done"
}

# The pods that have their sandbox from here. A daemon that is down, or does not answer as it takes over its pods, has not said that there are none:
# then its records tell.
pods() {
    if listed=$(node $program list); then
        echo "$listed" | tail -n +2
    elif [ -d "$host$records" ]; then
        find "$host$records" -mindepth 1 -maxdepth 1 -printf '%f, of which the daemon does not answer\n'
    fi
}

# The files that make the handler the node's default. containerd runs no CRI at all with a default handler that it does not know.
defaults() {
    for file in "$host$config" "$host${drop_in%/*}"/*.toml; do
        if grep -Eqs "^[^#]*default_runtime_name[\"']?[[:space:]]*=[[:space:]]*[\"']runc-pause[\"']" "$file"; then
            echo "${file#"$host"}"
        fi
    done
}

wait_for_pods() {
    while alive=$(pods) || die "cannot read $records"; [ -n "$alive" ]; do
        say "waiting for these pods to go (delete or drain them; a cordon, or the removal of the RuntimeClass, keeps new ones away):"
        echo "$alive"
        sleep "$every"
    done
}

uninstall_all() {
    ! is_packaged || return 0
    while made_default=$(defaults); [ -n "$made_default" ]; do
        say "waiting until runc-pause is not the node's default handler: take default_runtime_name from these files and restart containerd:"
        echo "$made_default"
        sleep "$every"
    done
    # Without the daemon nobody could end them.
    while
        wait_for_pods
        mark null
        # One may have come before the label was gone.
        alive=$(pods) || die "cannot read $records"
        [ -n "$alive" ]
    do
        mark '"true"'
    done
    node systemctl disable --now pause-sandboxer.socket pause-sandboxer.service || :
    rm -f "$host$drop_in" "$host$units/pause-sandboxer.service" "$host$units/pause-sandboxer.socket" "$host$program" "$host$unfinished"
    # No records are in it, so nothing is mounted there but their directory itself, where a daemon was killed.
    node umount $records 2>/dev/null || :
    rm -rf --one-file-system "${host:?}$state" || say "$state is left"
    node systemctl daemon-reload
    [ "$edit" != true ] || node systemctl restart containerd
    say "done; $config still imports /etc/containerd/conf.d, which does no harm"
}

case ${1-} in
# Not with `&&`, within which nothing that fails ends the script.
install) install_all; forever ;;
uninstall) uninstall_all; forever ;;
ready)
    [ ! -e "$host$packaged" ] || program=$packaged
    node $program list >/dev/null
    ;;
*) sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2 ;;
esac
