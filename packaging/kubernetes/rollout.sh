#!/bin/sh
# Runs install.sh on the nodes of a cluster, on one node after the other. The DaemonSets of
# installer/ and uninstaller/ run this script.
#
# usage: rollout.sh install | uninstall | ready
#
# install     waits for the Lease, runs `install.sh install`, gives the Lease back, and sleeps
# uninstall   waits until nothing on the node needs the sandboxer, then for the Lease, runs
#             `install.sh uninstall`, gives the Lease back, and sleeps
# ready       succeeds if the command is done on this node; after an installation the node's
#             sandboxer must answer too, unless it is that of a package
#
# The Lease exists while a node is changed. A node on which the command fails keeps it, so that all
# other nodes stay as they are, until the command succeeds there or an operator deletes the Lease. A
# node that waits for the end of its pods, which may take days, does not have it. Its owner is the
# pod that made it: Kubernetes deletes it with the pod, or with the node.
#
# LEASE is the name of the Lease: without it the script does not wait for other nodes. NAMESPACE,
# POD_NAME, POD_UID and NODE_NAME come from the pod. EVERY is the polling interval in seconds
# (default: 20 for the Lease, where it varies by half, and 30 for pods). With
# EDIT_CONTAINERD_CONFIG=false a removal restarts nothing, and needs no Lease.
set -eu

command=${1-}
lease=${LEASE-}
every=${EVERY:-20}
# In the container: a container that is restarted begins again.
finished=${FINISHED:-/run/rollout.finished}
account=${ACCOUNT:-/var/run/secrets/kubernetes.io/serviceaccount}
# The status of `install.sh` while something needs the sandboxer.
needed=75
answer=
waiting=
# Whether this pod may have the Lease: an earlier container of the pod may have taken it.
held=1
trap 'rm -f "$answer"; [ -z "$waiting" ] || kill "$waiting" 2>/dev/null || :' EXIT
trap 'exit 143' TERM

say() { echo "rollout.sh: $*"; }
# Runs a command that is interrupted when the pod is deleted.
interruptible() {
    "$@" &
    waiting=$!
    wait "$waiting"
    waiting=
}

# Sleeps for half to one and a half of the interval, so that nodes do not all ask at once.
pause() {
    random=$(od -An -N2 -tu2 /dev/urandom)
    interruptible sleep "$(awk "BEGIN { print $every * (0.5 + $random / 65536) }")"
}

# ask METHOD PATH [DATA]: a request to the API server about Leases. Prints the status code, 000
# without an answer, which is in $answer.
ask() {
    : >"$answer"
    server=$KUBERNETES_SERVICE_HOST
    # kubelet sets a bare IPv6 address; in a URL it has brackets.
    case $server in *:*) server="[$server]" ;; esac
    api=https://$server:${KUBERNETES_SERVICE_PORT-443}
    # curl reads the token from stdin, because every user of the node can read its arguments.
    printf 'Authorization: Bearer %s\n' "$(cat "$account/token")" |
        curl --silent --show-error --max-time 30 --cacert "$account/ca.crt" \
            -H @- -H 'Content-Type: application/json' \
            -X "$1" ${3:+--data "$3"} --output "$answer" --write-out '%{http_code}' \
            "$api/apis/coordination.k8s.io/v1/namespaces/$NAMESPACE/leases$2" || :
}

# Succeeds if the Lease in $answer is this pod's.
is_ours() { grep -q "\"$POD_UID\"" "$answer"; }

# Prints the strings of KEY in $answer.
strings() { tr ',{}' '\n' <"$answer" | sed -n "s/^[[:space:]]*\"$1\": *\"\([^\"]*\)\".*/\1/p"; }

# Waits until this pod has the Lease. It may wait for hours, together with all other nodes:
# therefore it tries to create the Lease only when there is none, and logs only what is new.
take_lease() {
    [ -n "$lease" ] || return 0
    held=1
    said=
    owner="{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"name\":\"$POD_NAME\",\"uid\":\"$POD_UID\"}"
    object="{\"apiVersion\":\"coordination.k8s.io/v1\",\"kind\":\"Lease\",\"metadata\":{\
\"name\":\"$lease\",\"ownerReferences\":[$owner]},\"spec\":{\"holderIdentity\":\"$NODE_NAME\"}}"
    while :; do
        code=$(ask GET "/$lease")
        [ "$code" != 404 ] || code=$(ask POST '' "$object")
        case $code in
        201) return 0 ;;
        200)
            # Of an earlier container of this pod.
            ! is_ours || return 0
            holder=$(strings holderIdentity | head -n 1)
            now="waiting for node ${holder:-unknown}, which has Lease $lease"
            ;;
        # Another node was faster; the next answer names it.
        409) now=$said ;;
        *) now="cannot take Lease $lease: status $code: $(head -c 500 "$answer")" ;;
        esac
        [ "$now" = "$said" ] || say "$now"
        said=$now
        pause
    done
}

# Deletes the Lease of this pod, and no other: an operator may have deleted it, and another node may
# have taken it since, also between the two requests.
give_lease_back() {
    [ -n "$lease" ] && [ -n "$held" ] || return 0
    while :; do
        code=$(ask GET "/$lease")
        if [ "$code" = 200 ]; then
            is_ours || { say "another pod has Lease $lease"; held=; return 0; }
            # The owner also has a uid.
            uid=$(strings uid | grep -vxF "$POD_UID" | head -n 1)
            version=$(strings resourceVersion | head -n 1)
            code=$(ask DELETE "/$lease" "{\"apiVersion\":\"v1\",\"kind\":\"DeleteOptions\",\
\"preconditions\":{\"uid\":\"$uid\",\"resourceVersion\":\"$version\"}}")
        fi
        case $code in
        200 | 404) held=; return 0 ;;
        esac
        say "cannot delete Lease $lease: status $code: $(head -c 500 "$answer")"
        interruptible sleep "$every"
    done
}

# Removes the sandboxer with the Lease, as soon as nothing on this node needs it.
uninstall() {
    while :; do
        status=0
        install.sh unneeded || status=$?
        if [ "$status" = 0 ]; then
            take_lease
            # A failure ends the script, as that of an installation; a pod that has arrived since
            # does not.
            install.sh uninstall || status=$?
        fi
        [ "$status" = "$needed" ] || return "$status"
        give_lease_back
        interruptible sleep "${EVERY:-30}"
    done
}

case $command in
# Not for a probe, which kubelet may kill: its file would stay.
install | uninstall) answer=$(mktemp) ;;
esac

case $command in
install)
    rm -f "$finished"
    take_lease
    # A failure ends the script here. The container starts again, and the pod still has the Lease.
    # Not interrupted: it has the pod's grace period to complete.
    ONCE=1 install.sh install
    give_lease_back
    echo install >"$finished"
    ;;
uninstall)
    rm -f "$finished"
    export ONCE=1
    [ "${EDIT_CONTAINERD_CONFIG:-true}" = true ] || lease=
    uninstall
    give_lease_back
    echo uninstall >"$finished"
    ;;
ready)
    case $(cat "$finished" 2>/dev/null) in
    install) install.sh ready ;;
    uninstall) ;;
    *) exit 1 ;;
    esac
    exit 0
    ;;
*)
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
    ;;
esac
[ -z "${ROLLOUT_ONCE-}" ] || exit 0
while :; do interruptible sleep 3600; done
