#!/bin/sh
# Installs the sandboxer on the nodes of a cluster, or removes it: starts a Job with install.sh on
# one node after the other, and labels the nodes. It runs in an unprivileged pod, which ends with
# the work. The Jobs are privileged, and have no account of the API.
#
# usage: rollout.sh install | uninstall
#
# The exit status is 3 if more than MAX_FAILURES nodes have failed, or if a removal cannot end; the
# last lines name the nodes and the reasons.
#
# The state is in the cluster: the Jobs, and the result of each in an annotation of its node. So
# another run continues where one was interrupted, and two runs at once choose the same nodes, where
# the name of the Job admits one. A run whose REVISION is not that of the ConfigMap ends.
#
# RELEASE is the name of the objects, and of the ConfigMap with the Job's template. NAMESPACE is
# theirs. NODES selects nodes by label. Nodes that can run pods of the RuntimeClass CLASS get the
# label LABEL. PARALLEL nodes are changed at once. With RETRY=true nodes that have failed are tried
# again. With REFUSE=true a removal does not begin while there are pods, and waits no longer than
# for what kubelet has not removed yet of the last ones. EVERY is the interval of the requests in
# seconds.
set -eu

case ${1-} in
install) removal=false ;;
uninstall) removal=true ;;
*) sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2 ;;
esac
mode=$1
account=${ACCOUNT:-/var/run/secrets/kubernetes.io/serviceaccount}
plan=${PLAN:-/usr/local/lib/plan.jq}
every=${EVERY:-5}
# Between two attempts to remove the sandboxer from a node with pods.
retry=${WAIT:-60}
# For how long a removal that must not wait repeats them.
patience=${PATIENCE:-180}
began=$(date +%s)
since=0
[ "${RETRY-}" != true ] || since=$began
annotation=pause-sandboxer/installer
batch=/apis/batch/v1/namespaces/$NAMESPACE
core=/api/v1/namespaces/$NAMESPACE
said=
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 143' HUP INT TERM

say() { echo "rollout.sh: $*"; }
uri() { jq -rn --arg text "$1" '$text | @uri'; }

# The nodes of a removal are those that this release has changed or is changing, whatever their
# labels are now.
selected=
$removal || selected=$(uri "$NODES")
ours=$(uri "app.kubernetes.io/instance=$RELEASE,app.kubernetes.io/component=installer")

# ask METHOD PATH [DATA]: a request to the API server, whose answer is in $work/answer. Fails with
# a message unless the status is 2xx; $code is the status, 000 without a whole answer, such as that
# of a lost connection or on a full disk: an empty list would be one without nodes.
ask() {
    type=application/json
    [ "$1" != PATCH ] || type=application/merge-patch+json
    server=$KUBERNETES_SERVICE_HOST
    # kubelet sets a bare IPv6 address; in a URL it has brackets.
    case $server in *:*) server="[$server]" ;; esac
    : >"$work/answer"
    # curl reads the token from stdin, because every user of the node can read its arguments.
    code=$(printf 'Authorization: Bearer %s\n' "$(cat "$account/token")" |
        curl --silent --show-error --max-time 60 --cacert "$account/ca.crt" -H @- \
            -H "Content-Type: $type" -X "$1" ${3:+--data "$3"} --output "$work/answer" \
            --write-out '%{http_code}' \
            "${API:-https://$server:${KUBERNETES_SERVICE_PORT-443}}$2") || code=000
    case $code in
    2??) ;;
    *) say "$1 ${2%%\?*}: status $code: $(head -c 500 "$work/answer")" >&2; return 1 ;;
    esac
}

# all PATH FILTER: writes what the filter of jq makes of each object of a list, page by page.
all() {
    next=
    while :; do
        ask GET "$1&limit=200&continue=$next" || return 1
        jq -c --arg annotation "$annotation" --arg key "$LABEL" --arg class "$CLASS" \
            ".items[] | $2" "$work/answer" || return 1
        next=$(jq -r '.metadata.continue // ""' "$work/answer")
        [ -n "$next" ] || return 0
    done
}

# Reads the Jobs, their pods and then the nodes: a Job that another run has deleted meanwhile has
# its result on the node. The credentials of a node can write its annotations, and status and labels
# of its pods, but own no pod by a Job: none of that affects another node.
read_cluster() {
    all "$batch/jobs?labelSelector=$ours" '
        ([ .status.conditions[]? | select(.status == "True") ]) as $true | {
        name: .metadata.name, uid: .metadata.uid,
        node: .metadata.annotations["pause-sandboxer/node"],
        mode: .spec.template.spec.containers[0].args[0],
        revision: .metadata.annotations["pause-sandboxer/revision"],
        failed: ([ $true[] | select(.type == "Failed") | .message // "" ][0]),
        state: (if any($true[]; .type == "Complete" or .type == "Failed") then "ended"
            else "active" end) }' >"$work/jobs" || return 1
    all "$core/pods?labelSelector=$ours" '
        .status.containerStatuses[0].state as $state | {
        job: (.metadata.ownerReferences[0].uid // ""), created: .metadata.creationTimestamp,
        code: $state.terminated.exitCode,
        message: (($state.terminated.message // $state.waiting.message
            // ([ .status.conditions[]? | select(.status == "False" and .type == "PodScheduled")
                | .message ][0]))[-1000:]) }' \
        >"$work/pods" || return 1
    all "/api/v1/nodes?labelSelector=$selected" '{
        name: .metadata.name, uid: .metadata.uid, boot: .status.nodeInfo.bootID,
        label: .metadata.labels[$key],
        record: (.metadata.annotations[$annotation] | fromjson? // null
            | if type == "object" then .time = (.time | numbers // 0)
                | .label = [ .label | strings | select(length < 64) ][0] else null end),
        ready: any(.status.conditions[]?; .type == "Ready" and .status == "True") }' \
        >"$work/nodes" || return 1
}

# Prints the next actions.
next_actions() {
    jq -nc --slurpfile nodes "$work/nodes" --slurpfile jobs "$work/jobs" \
        --slurpfile pods "$work/pods" --arg release "$NAMESPACE/$RELEASE" \
        --argjson now "$(date +%s)" --arg revision "$REVISION" --argjson removal $removal \
        --argjson parallel "$PARALLEL" \
        --argjson maxFailures "$MAX_FAILURES" --argjson since "$since" --argjson retry "$retry" '
        ($pods | group_by(.job) | map({ key: .[0].job, value: max_by(.created) }) | from_entries)
            as $last
        | { $release, $revision, $removal, $parallel, $maxFailures, $since, $retry, $now,
            nodes: (if $removal then [ $nodes[] | select(.record.release == $release
                or (.name as $name | any($jobs[]; .node == $name))) ] else $nodes end),
            jobs: [ $jobs[] | $last[.uid] as $pod
                | .code = (if .failed == null then 0 elif $pod.code == 0 then 1
                    else $pod.code end)
                | .message = ([ $pod.message, .failed ] | map(select(. != null and . != ""))[0]
                    // "") ] }' |
        jq -c -f "$plan"
}

# mark NODE LABEL RECORD: sets label and annotation, JSON values each; `keep` does not change the
# label.
mark() {
    labels='{}'
    [ "$2" = keep ] || labels=$(jq -nc --arg key "$LABEL" --argjson value "$2" '{ ($key): $value }')
    ask PATCH "/api/v1/nodes/$1" "$(jq -nc --argjson labels "$labels" --argjson record "$3" \
        --arg annotation "$annotation" '{ metadata: { $labels, annotations: {
            ($annotation): (if $record == null then null else $record | tojson end) } } }')"
}

# record NODE RESULT MESSAGE [JOB REVISION]: prints the node's new annotation.
record() {
    jq -c --arg node "$1" --arg result "$2" --arg message "$3" --arg job "${4-}" \
        --arg revision "${5-$REVISION}" --arg release "$NAMESPACE/$RELEASE" \
        --argjson now "$(date +%s)" 'select(.name == $node) | {
        $release, $revision, $result, $job, boot, time: $now, message: $message[-1000:],
        label: (if .record.result == "removing" then .record.label else .label end) }' \
        "$work/nodes"
}

# Prints the pods of a node whose RuntimeClass or node selector needs the label. kubelet uses the
# label too: when it restarts on a node without it, it terminates these pods.
pods_of() {
    fields=spec.nodeName=$1,status.phase!=Succeeded,status.phase!=Failed
    all "/api/v1/pods?fieldSelector=$(uri "$fields")" '
        select(.spec.runtimeClassName == $class or .spec.nodeSelector[$key] != null)
        | "\(.metadata.namespace)/\(.metadata.name)"' >"$work/pods-of" || return 1
    jq -rs 'join(" ")' "$work/pods-of"
}

# take_label NODE VALUE RECORD: sets the label to a value other than "true", unless the node has
# pods of the class; those that have arrived meanwhile get it back. $pods are these pods.
take_label() {
    pods=$(pods_of "$1") || return 1
    [ -z "$pods" ] || return 0
    before=$(jq -c --arg node "$1" 'select(.name == $node) | .label' "$work/nodes")
    mark "$1" "$2" "$3" || return 1
    pods=$(pods_of "$1") || return 1
    [ -z "$pods" ] || mark "$1" "$before" "$3"
}

# ended NODE JOB: writes down the result of a Job.
ended() {
    job=$(printf '%s' "$2" | jq -r .uid)
    code=$(printf '%s' "$2" | jq -r .code)
    revision=$(printf '%s' "$2" | jq -r .revision)
    message=$(printf '%s' "$2" | jq -r .message)
    how=$(printf '%s' "$2" | jq -r .mode)-$code
    case $how in
    install-0) mark "$1" '"true"' "$(record "$1" installed '' "$job" "$revision")" ;;
    *-77) mark "$1" keep "$(record "$1" package '' "$job" "$revision")" ;;
    install-76)
        failed=$(record "$1" failed "$message" "$job" "$revision")
        take_label "$1" '"false"' "$failed" || return 1
        [ -n "$pods" ] || return 0
        mark "$1" keep "$(record "$1" failed \
            "$message (cordon the node; the label stays for its pods $pods)" "$job" "$revision")"
        ;;
    uninstall-0) mark "$1" null null ;;
    uninstall-75)
        waiting=$(record "$1" waiting "$message" "$job" "$revision")
        mark "$1" "$(printf '%s' "$waiting" | jq -c .label)" "$waiting"
        ;;
    *) mark "$1" keep "$(record "$1" failed "${message:-no message}" "$job" "$revision")" ;;
    esac || return 1
    say "$1: $how${message:+: $message}"
    case $how in
    *-0 | *-77) delete "$(printf '%s' "$2" | jq -r .name)" ;;
    esac
}

delete() { ask DELETE "$batch/jobs/$1?propagationPolicy=Background" || [ "$code" = 404 ]; }

# start NODE UID
start() {
    if $removal; then
        take_label "$1" null "$(record "$1" removing '')" || return 1
        if [ -n "$pods" ]; then
            mark "$1" keep "$(record "$1" waiting "pods need it: $pods")"
            return
        fi
    fi
    name=$RELEASE-$(printf '%s' "$2" | sha256sum | cut -c 1-10)
    # Kubernetes deletes the Job with the node.
    object=$(jq -c --arg node "$1" --arg uid "$2" --arg name "$name" --arg mode "$mode" \
        --arg revision "$REVISION" '
        .metadata += { $name, ownerReferences: [ { apiVersion: "v1", kind: "Node", name: $node,
            $uid } ], annotations: { "pause-sandboxer/node": $node,
            "pause-sandboxer/revision": $revision } }
        | .spec.template.spec.containers[0].args = [ $mode ]
        | .spec.template.spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution
            .nodeSelectorTerms = [ { matchFields: [ { key: "metadata.name", operator: "In",
                values: [ $node ] } ] } ]' "$work/job")
    # Another run has started it.
    ask POST "$batch/jobs" "$object" || [ "$code" = 409 ]
}

# Ends this run if the ConfigMap is not, or no more, of this revision.
end_if_replaced() {
    ask GET "$core/configmaps/$RELEASE" || { [ "$code" != 404 ] || exit 0; return 1; }
    jq -r .data.job "$work/answer" >"$work/job" || return 1
    revision=$(jq -r .data.revision "$work/answer") || return 1
    [ "$revision" != "$REVISION" ] || return 0
    say "revision $revision has replaced $REVISION"
    exit 0
}

# Succeeds if a removal that must not wait has done so long enough: kubelet removes the sandbox of a
# deleted pod up to a minute later, and until then the node needs the sandboxer.
gives_up() { [ "${REFUSE-}" = true ] && [ $(($(date +%s) - began)) -ge $patience ]; }

# One look at the cluster and what follows from it.
cycle() {
    end_if_replaced || return 1
    read_cluster || return 1
    # Then a node that waits is not tried again.
    ! gives_up || retry=1000000000
    next_actions >"$work/actions" || return 1
    # One node that cannot be changed does not hold up the others.
    complete=true
    while read -r action; do
        node=$(printf '%s' "$action" | jq -r '.node // .job')
        case $action in
        '{"do":"record"'*) ended "$node" "$(printf '%s' "$action" | jq -c .job)" ;;
        '{"do":"drop"'*) mark "$node" keep null ;;
        '{"do":"delete"'*) delete "$node" ;;
        '{"do":"start"'*) start "$node" "$(printf '%s' "$action" | jq -r .uid)" ;;
        *) printf '%s' "$action" >"$work/state" ;;
        esac || complete=false
    done <"$work/actions"
    $complete
}

state() { jq -r ".$1" "$work/state"; }

# A removal that must not wait begins only if no pod needs the sandboxer, and takes over from the
# runs that install.
take_over() {
    read_cluster || return 1
    for node in $(jq -r --arg release "$NAMESPACE/$RELEASE" \
        'select(.record.release == $release) | .name' "$work/nodes"); do
        pods=$(pods_of "$node") || return 1
        if [ -n "$pods" ]; then
            say "refused, nothing is changed: pods on $node need the sandboxer: $pods"
            exit 3
        fi
    done
    ask PATCH "$core/configmaps/$RELEASE" \
        "$(jq -nc --arg revision "$REVISION" '{ data: { $revision } }')"
}

if [ "${REFUSE-}" = true ]; then
    until take_over; do sleep "$every"; done
fi
while :; do
    if cycle; then
        now=$(state said)
        [ "$now" = "$said" ] || say "$now"
        said=$now
        if [ "$(state finished)" = true ]; then
            [ "$(state stopped)" != true ] || { say "stopped: too many nodes have failed"; exit 3; }
            $removal || exit 0
            [ "$(state left)" != 0 ] || exit 0
            # What is left has failed, is not ready, or waits for its pods.
            waits=$(jq '.waiting + .notReady > 0' "$work/state")
            if [ "$waits" = false ] || gives_up; then
                say "the nodes above still have the sandboxer"
                exit 3
            fi
        fi
        # What is recorded makes room for other nodes.
        ! grep -q '^{"do":"record"' "$work/actions" || continue
    fi
    sleep "$every" &
    wait $!
done
