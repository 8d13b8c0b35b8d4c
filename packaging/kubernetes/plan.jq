# Decides what rollout.sh does next. Input: one object with the nodes and Jobs of a release and its
# settings. Output: one object per action, and a last one that describes the state:
#
# record  a Job has ended: write the result to the node's annotation, and set the label
# drop    the node has the package: forget it, without a change
# delete  a Job that has ended and is recorded, of a node that needs another
# start   the node needs a Job
#
# A node's `record` is its annotation, or null. A failure counts until the node boots again or the
# revision changes, and only from the time `since` on.

. as $in
| def is_current: .record.revision == $in.revision and .record.boot == .boot;
def has_failed: .record.result == "failed" and is_current and .record.time >= $in.since;

def install_state:
    if .record.release != null and .record.release != $in.release then "taken"
    elif has_failed then "failed"
    elif is_current and (.record.result == "installed" or .record.result == "package") then "done"
    elif .ready then "todo"
    else "not ready" end;

def removal_state:
    if .record.result == "package" then "package"
    elif has_failed then "failed"
    elif .record.result == "waiting" and .record.time >= $in.since
        and $in.now - .record.time < $in.retry then "waiting"
    elif .ready then "todo"
    else "not ready" end;

# A result that is written already.
def is_recorded($node): $node.record.job == .uid;

($in.jobs | map({ key: .node, value: . }) | from_entries) as $jobs
| [ $in.nodes[]
    | . as $node
    | $jobs[.name] as $job
    | .job = $job
    | .state = (
        if $job != null and $job.state == "active" then "active"
        elif $job != null and ($job | is_recorded($node) | not) then "ended"
        elif $in.removal then removal_state
        else install_state end)
  ] as $nodes
| [ $nodes[] | .state ] as $states
| def count($state): [ $states[] | select(. == $state) ] | length;
  (count("failed") + count("taken")) as $failed
# Also those of nodes that are not selected any more, until they end.
| ([ $in.jobs[] | select(.state == "active") ] | length) as $active
# The first node of a revision goes alone.
| (if count("done") == 0 and ($in.removal | not) then 1 else $in.parallel end) as $parallel
# A node that waits for its pods comes after those that were not tried since.
| ([ $nodes[] | select(.state == "todo") ]
    | sort_by(if .record.result == "waiting" then .record.time else 0 end)) as $todo
| ($failed > $in.maxFailures) as $stopped
| ( $nodes[]
    | if .state == "ended" then { do: "record", node: .name, job: .job }
      elif .state == "package" then { do: "drop", node: .name }
      else empty end ),
  ( if $stopped then empty
    else $todo[:([ 0, $parallel - $active - count("ended") ] | max)][]
        | if .job != null then { do: "delete", job: .job.name }
          else { do: "start", node: .name, uid: .uid } end
    end ),
  { do: "state", $stopped,
    finished: ($active + count("ended") + count("package") == 0 and ($stopped or ($todo == []))),
    failed: $failed, waiting: count("waiting"), notReady: count("not ready"),
    left: ($nodes | length),
    said: ([
        "\($nodes | length) nodes:",
        ([ $states | group_by(.)[] | "\(length) \(.[0])" ] | join(", ")),
        ( $nodes[]
          | if .state == "failed" or .record.result == "waiting" then
                "\n  \(.name): \(.record.result): \(.record.message)"
            elif .state == "taken" then
                "\n  \(.name): failed: belongs to release \(.record.release)"
            elif .state == "not ready" then "\n  \(.name): not ready"
            elif .state == "active" and .job.message != "" then "\n  \(.name): \(.job.message)"
            else empty end )
      ] | join(" ")) }
